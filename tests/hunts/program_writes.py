"""Habits of drawn programs that write weights or keep averages of them: EMA, target networks, clipped weights, noise,
initialization anew, and what modules offer that would replace params.

What writes stands in ``side.writing(params)``: the plain side notes there which masters were rewritten. ``whole``: the
value becomes the master of every element, as in ``copy_``; else of those that changed.
"""

from textwrap import indent

from tests.hunts.program_parts import Habit, after, at_setup, before, stepped

PARAMS = "params = list({block}.parameters()) or list(model.parameters())\n"


def _write(lines: str, *, whole: bool = False, when: int | None = None) -> Habit:
    """``lines`` write ``p``, one of a block's params, or all ``params`` of it."""
    each = lines if "params" in lines else f"for p in params:\n{indent(lines, '    ')}"
    spoken = f"with torch.no_grad(), side.writing(params{', whole=True' * whole}):\n{indent(each, '    ')}"
    text = PARAMS + spoken
    return stepped(text if when is None else f"if step == {when}:\n{indent(text, '    ')}")


WRITES: dict[str, Habit] = {
    # In place, on the param and on its data.
    "copy_": _write("p.copy_(p * 0.9)", whole=True),
    "data_copy_": _write("p.data.copy_(p.data * 0.9)", whole=True),
    "detach_copy_": _write("p.detach().copy_(p * 0.9)", whole=True),
    "mul_": _write("p.mul_(0.99)"),
    "data_mul_": _write("p.data.mul_(0.99)"),
    "imul": _write("p *= 0.99"),
    "add_": _write("p.add_(0.01)"),
    "sub_": _write("p.sub_(p, alpha=0.01)"),
    "div_": _write("p.div_(1.5)"),
    "lerp_": _write("p.lerp_(torch.zeros_like(p), 0.1)"),
    "data_lerp_": _write("p.data.lerp_(torch.zeros_like(p), 0.1)"),
    "clamp_": _write("p.clamp_(-0.2, 0.2)"),
    "data_clamp_": _write("p.data.clamp_(-0.2, 0.2)"),
    "fill_": _write("p.fill_(0.1)", when=1),
    "zero_": _write("p.zero_()", when=1),
    "data_fill_": _write("p.data.fill_(0.1)", when=1),
    "normal_": _write("p.normal_(0, 0.1)", when=1),
    "uniform_": _write("p.data.uniform_(-0.1, 0.1)", when=1),
    "addcmul_": _write("p.addcmul_(p, p, value=-0.1)"),
    "masked_fill_": _write("p.masked_fill_(p.abs() < 0.05, 0)"),
    "row": _write("p[0] = 0.25", when=1),
    "row_of_data": _write("p.data[0] = 0.25", when=1),
    "view_of": _write("p.view(-1)[::2].mul_(0.5)", when=1),
    "noise": _write("p.add_(torch.randn_like(p) * 0.01)"),
    "renorm": _write("p.div_(p.norm().clamp(min=1e-3))"),
    "foreach_mul_": _write("torch._foreach_mul_(params, 0.99)"),
    "foreach_lerp_": _write("torch._foreach_lerp_(params, [torch.zeros_like(p) for p in params], 0.1)"),
    "foreach_copy_": _write("torch._foreach_copy_(params, [p * 0.9 for p in params])", whole=True),
    "init": _write("nn.init.normal_(p, std=0.1)", when=1),
    "init_constant": _write("nn.init.constant_(p, 0.1)", when=1),
    "init_uniform": _write("nn.init.uniform_(p, -0.1, 0.1)", when=1),
    "init_trunc": _write("nn.init.trunc_normal_(p, std=0.02)", when=1),
    "init_matrices": _write("if p.dim() == 2:\n    nn.init.xavier_uniform_(p)", when=1),
    "reset_parameters": _write(
        'for m in {block}.modules():  # params\n    if hasattr(m, "reset_parameters"):\n        m.reset_parameters()',
        when=1,
    ),
    "data_assigned": _write("p.data = p.data * 0.5", when=1),
    "to_vector_and_back": _write(
        "vector = nn.utils.parameters_to_vector(params)\nnn.utils.vector_to_parameters(vector * 0.5, params)", when=1
    ),
    "swap_tensors": _write("torch.utils.swap_tensors(params[0], nn.Parameter(params[0] * 0.5))", when=1),
    "gathered_copy_": stepped(
        PARAMS + "with torch.no_grad(), side.gathered(params, write=True):\n    for p in params:\n        p.lerp_("
        "torch.zeros_like(p), 0.1)"
    ),
    # Averages of weights.
    "ema": stepped("""
        if step == 0:
            average = {name: p.detach().clone().float() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach().float(), 0.1)
            side.see(f"average {name}", average[name])
        """),
    "ema_mul_add": stepped("""
        if step == 0:
            average = [p.data.clone() for p in model.parameters()]
        with torch.no_grad():
            for a, p in zip(average, model.parameters()):
                a.mul_(0.9).add_(p, alpha=0.1)
        side.see("average", average)
        """),
    "ema_foreach": stepped("""
        with torch.no_grad():
            if step == 0:
                average = [p.clone() for p in model.parameters()]
            torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            torch._foreach_mul_(average, 0.99)
            torch._foreach_add_(average, [p.data for p in model.parameters()], alpha=0.01)
        side.see("average", average)
        """),
    "ema_of_state": stepped("""
        if step == 0:
            average = copy.deepcopy(model.state_dict())
        for name, value in model.state_dict().items():
            if torch.is_tensor(value) and value.is_floating_point() and value.shape == average[name].shape:
                average[name].mul_(0.9).add_(value, alpha=0.1)
                side.see(f"average {name}", average[name])
        """),
    "ema_swapped": stepped("""
        if step == 0:
            average = [p.detach().clone() for p in model.parameters()]
        for a, p in zip(average, model.parameters()):
            a.lerp_(p.detach(), 0.5)
        backup = [p.detach().clone() for p in model.parameters()]
        with side.writing(list(model.parameters()), whole=True):
            for a, p in zip(average, model.parameters()):
                p.data.copy_(a)
        <EVALUATE>
        with side.writing(list(model.parameters()), whole=True):
            for b, p in zip(backup, model.parameters()):
                p.data.copy_(b.data)
        """),
    "ema_loaded": stepped("""
        now = {name: value.clone() for name, value in model.state_dict().items()
               if torch.is_tensor(value) and value.is_floating_point()}
        backup = copy.deepcopy(model.state_dict())
        side.load({**backup, **{name: value * 0.5 for name, value in now.items()}})
        <EVALUATE>
        side.load(backup)
        """),
    "averaged_model": stepped("""
        if step == 0:
            average = torch.optim.swa_utils.AveragedModel(side.cast(make()))
        average.update_parameters(model)
        side.see("average", list(average.module.parameters()))
        """),
    "averaged_managed": stepped("""
        if step == 0:
            average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        side.see("average", list(average.module.parameters()))
        """),
    "target_network": stepped("""
        if step == 0:
            target = side.cast(make()).requires_grad_(False)
        with torch.no_grad():
            for t, p in zip(target.parameters(), model.parameters()):
                t.data.mul_(0.9).add_(0.1 * p.data)
        side.see("target", list(target.parameters()))
        """),
    "managed_target": stepped("""
        if step == 0:
            target = side.another(make().requires_grad_(False))
        with torch.no_grad(), side.writing(list(target.parameters()), whole=True):
            for t, p in zip(target.parameters(), model.parameters()):
                t.data.lerp_(p.data, 0.1)
        with torch.no_grad():
            side.see("target", take(target, target(batch(side, 70 + step))))
        """),
    "hard_target": stepped("""
        if step == 0:
            target = side.another(make().requires_grad_(False))
        target.load_state_dict(model.state_dict())
        with torch.no_grad():
            side.see("target", take(target, target(batch(side, 70 + step))))
        """),
    "deepcopied": stepped("frozen = copy.deepcopy(model)\nside.see('copy', list(frozen.parameters()))"),
    # What a module offers.
    "to_cpu": before('model.to("cpu")\nmodel.cpu()'),
    "to_own_dtype": before("side.to_own_dtype()"),
    "to_double": before("if step == 1:\n    model.double()"),
    "type_of": before("if step == 1:\n    model.type(torch.float64)"),
    "shared": before("if step == 0:\n    model.share_memory()"),
    "applied": before(
        'model.apply(lambda m: side.see("applied", sum(float(p.float().sum()) for p in m.parameters(recurse=False))))'
    ),
    "late_param": before(
        'if step == 1:\n    {block}.register_parameter("late", nn.Parameter(torch.ones(2, dtype=side.dtype)))'
    ),
    "late_buffer_registered": before('if step == 1:\n    {block}.register_buffer("late", torch.ones(2))'),
    "late_module": before('if step == 1:\n    model.add_module("late", nn.Identity())'),
    "replaced_param": before("""
        if step == 1:
            name, p = next(iter(model.named_parameters()))
            whose, _, last = name.rpartition(".")
            setattr(model.get_submodule(whose), last, nn.Parameter(p.detach().clone()))
        """),
    "parametrized_later": before("""
        if step == 1:
            for m in {block}.modules():
                if isinstance(m, nn.Linear):
                    nn.utils.parametrizations.weight_norm(m)
        """),
    "unparametrized_later": before("""
        if step == 1:
            for m in {block}.modules():
                if nn.utils.parametrize.is_parametrized(m, "weight"):
                    nn.utils.parametrize.remove_parametrizations(m, "weight")
        """),
    "pruned_later": before("""
        if step == 1:
            for m in {block}.modules():
                if isinstance(m, nn.Linear):
                    nn.utils.prune.l1_unstructured(m, "weight", amount=0.5)
        """),
    "vector_read": before('side.see("vector", nn.utils.parameters_to_vector(model.parameters()))'),
    "norms_read": before(
        'side.see("norms", nn.utils.get_total_norm([p.detach().float() for p in model.parameters()]))'
    ),
    "grad_total_norm": after(
        "side.see('norm', nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))"
    ),
    "clip_with_norm": after("nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, torch.tensor(1.0))"),
    # What an optimizer offers.
    "step_hooks": at_setup("""
        optimizer.register_step_pre_hook(lambda o, args, kwargs: side.see("pre", len(o.param_groups)))
        optimizer.register_step_post_hook(
            lambda o, args, kwargs: side.see("post", [p.detach() for g in o.param_groups for p in g["params"]])
        )
        """),
    "closure": stepped('optimizer.zero_grad()\nside.see("closure", 1)'),
    "read_states": stepped("""
        for number, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            for name in ("step", "exp_avg", "exp_avg_sq"):
                if name in optimizer.state.get(p, {}):
                    side.see(f"{name} {number}", optimizer.state[p][name].float())
        """),
    "read_defaults": at_setup(
        'side.see("defaults", [[name, optimizer.defaults[name]] for name in ("lr", "betas", "eps", "weight_decay")])'
    ),
    "new_group": before("""
        if step == 1:
            owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
            rest = [p for p in model.parameters() if id(p) not in owned]
            if rest:
                optimizer.add_param_group({"params": rest, "lr": 0.01})
        """),
}
