"""Habits of drawn programs: what happens in a loop beside its objective, as source text, and what optimizers are given.

What stands in braces is as in ``program_objectives``, and ``{optimizer}`` stands for the lines that make the optimizer
and its schedule.
"""

from dataclasses import replace
from textwrap import indent

from tests.hunts.program_adapters import ADAPTER_HABITS
from tests.hunts.program_parts import EVALUATE, Habit, after, at_setup, at_zero, before, stepped
from tests.hunts.program_resumes import RESUMES
from tests.hunts.program_writes import WRITES
from tests.plain_programs import BESIDE

AVERAGES = {
    name: replace(habit, needs="averaged")
    for name, habit in {
        "averages": stepped('for name, value in side.averages():\n    side.see(f"average {name}", value)'),
        "averages_before": before('for name, value in side.averages():\n    side.see(f"average {name}", value)'),
        "averages_swapped": stepped("with side.averages_swapped():\n" + indent(EVALUATE, "    ")),
        "averages_saved": stepped("""
            with side.averages_swapped():
                for name, value in model.state_dict().items():
                    side.see(f"saved average {name}", value)
            """),
    }.items()
}
"""Of a model that keeps moving averages of its masters: ``gemini.EMA``."""

HABITS: dict[str, Habit] = {
    **RESUMES,
    # Once, before the first step.
    "collecting_hook": at_setup('{block}.register_forward_hook(lambda m, a, out: side.see("hook", tensors_in(out)))'),
    "backward_hook": at_setup(
        '{block}.register_full_backward_hook(lambda m, gi, go: side.see("go", [g for g in go if g is not None]))'
    ),
    "input_hook": at_setup("{block}.register_forward_pre_hook(lambda m, args: (args[0] * 0.5, *args[1:]))"),
    "output_hook": at_setup("{block}.register_forward_hook(lambda m, a, out: tree_map(out))"),
    "param_hook": at_setup(
        "for p in {block}.parameters():\n    if p.requires_grad:\n        p.register_hook(lambda g: g * 0.5)"
    ),
    # Before the objective.
    "evaluate_before": before(EVALUATE),
    "inference_before": before(
        'with torch.inference_mode():\n    side.see("inference", take(model, {call}(batch(side, 70 + step))))'
    ),
    "freeze": before("{block}.requires_grad_(step % 2 == 1)"),
    "unfreeze_later": before("{block}.requires_grad_(step > 0)"),
    "gathered_read": before("""
        with side.gathered():
            for name, p in model.named_parameters():
                side.see(f"gathered {name}", p)
        """),
    "gathered_write": before("""
        if step == 1:
            some = list({block}.parameters()) or list(model.parameters())
            with torch.no_grad(), side.gathered(some, write=True):
                for p in some:
                    p.view(-1)[::2] *= 0.75
        """),
    "norms": before(
        'with torch.no_grad():\n    for p in model.parameters():\n        side.see("norm", p.float().square().sum())'
    ),
    "state_dict": before("for name, value in model.state_dict().items():\n    side.see(name, value)"),
    "load_state_dict": before("""
        if step == 0:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        if step == 2:
            side.load(saved)
        """),
    "optimizer_state": before("optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"),
    "metadata": before(
        'side.see("metadata", [str((n, p.shape, p.dtype, p.requires_grad, p.numel(), p.is_leaf)) '
        "for n, p in model.named_parameters()])"
    ),
    "learning_rate": before('for group in optimizer.param_groups:\n    group["lr"] *= 0.7'),
    "other_constants": before("""
        if step == 1:
            optimizer.param_groups[-1].update(betas=(0.7, 0.9), eps=1e-5)
        """),
    "zero_first": before("optimizer.zero_grad()"),
    # Gradients are there.
    "grads": after("side.grads()"),
    "noisy_grads": after("for p in model.parameters():\n    if p.grad is not None:\n        p.grad.add_(0.01)"),
    "log_grads": after(
        'side.see("grad norm", float(sum(p.grad.float().norm() for p in model.parameters() if p.grad is not None)))'
    ),
    "drop_grads": after("for p in {block}.parameters():\n    p.grad = None"),
    "part_zero_grad": after("{block}.zero_grad()"),
    "torch_clip": after("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)"),
    "clip_value": after("torch.nn.utils.clip_grad_value_(model.parameters(), 0.001)"),
    "evaluate_after": after(EVALUATE),
    "states_written": stepped("""
        for p in {block}.parameters():
            state = optimizer.state.get(p) or {}
            if "exp_avg" in state:
                kept = state["exp_avg"]
                kept.mul_(0.5)
                kept[None].data.add_(1e-4)
                state["exp_avg_sq"] = state["exp_avg_sq"] + 1e-6
                side.see("state", kept)
        """),
    "clip": after('side.see("norm", side.clip(0.05))'),
    # Weights are new.
    "evaluate": stepped(EVALUATE),
    "evaluate_twice": stepped(EVALUATE + EVALUATE),
    "evaluate_part": stepped('with torch.no_grad():\n    side.see("part", take_block({block}({batch_of_block})))'),
    "evaluate_in_threads": stepped("""
        model.eval()
        with torch.no_grad():
            alone = [take(model, {call}(batch(side, 70 + k))) for k in range(3)]
        found = many_threads(lambda k: take(model, {call}(batch(side, 70 + k))), 3)
        side.see("alone", alone)
        side.see("in threads", found)
        model.train()
        """),
    "full_params": stepped(
        'for name, _ in model.named_parameters():\n    side.see(f"full {name}", side.full_param(name))'
    ),
    "weights_for": stepped('for name, value in side.weights():\n    side.see(f"weights for {name}", value)'),
    "parked": stepped("""
        with side.parked():
            for name, _ in model.named_parameters():
                side.see(f"parked {name}", side.full_param(name))
        """),
    "step_twice": stepped("optimizer.zero_grad()\nscaler.step(optimizer) if side.dtype != torch.float16 else None"),
    "new_optimizer": stepped("if step == 0:\n    optimizer = side.adam(model.parameters())"),
    # How gradients are forgotten.
    "model_zero_grad": at_zero("model.zero_grad()"),
    "to_zero": at_zero("optimizer.zero_grad(set_to_none=False)"),
    **AVERAGES,
    **WRITES,
    **ADAPTER_HABITS,
    **{f"beside {name}": stepped(f'side.beside("{name}")') for name in BESIDE},
}

ADAMS = {
    "whole": "optimizer = side.adam(model.parameters())",
    "l2": "optimizer = side.adam(model.parameters(), decoupled=False, betas=(0.8, 0.95))",
    "groups": (
        "named = list(model.named_parameters())\n"
        'optimizer = side.adam([{"params": [p for _, p in named[::2]], "weight_decay": 0.0},\n'
        '                       {"params": [p for _, p in named[1::2]], "lr": 0.005}])'
    ),
    # Equal at first: what one is given after a step is not the other's.
    "parting_groups": (
        "params = list(model.parameters())\n"
        'optimizer = side.adam([{"params": params[::2]}, {"params": params[1::2]}])\n'
        "def part(o, args, kwargs):\n"
        '    o.param_groups[-1].update(lr=0.5 * o.param_groups[-1]["lr"], weight_decay=0.2)\n'
        "optimizer.register_step_post_hook(part)"
    ),
    "left_out": "optimizer = side.adam(list(model.parameters())[1:])",
    "trained": "optimizer = side.adam([p for p in model.parameters() if p.requires_grad])",
    "tensor_lr": "optimizer = side.adam(model.parameters(), lr=torch.tensor(0.02))",
    "named": "optimizer = side.adam(model.named_parameters())",
    "converted": (
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)\n"
        "{schedule}\noptimizer = side.convert(optimizer)"
    ),
    "converted_adam": (
        "optimizer = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.8, 0.95), weight_decay=0.01)\n"
        "{schedule}\noptimizer = side.convert(optimizer)"
    ),
    "converted_groups": (
        "named = list(model.named_parameters())\n"
        'optimizer = torch.optim.AdamW([{"params": [p for _, p in named[::2]], "weight_decay": 0.0},\n'
        '                               {"params": [p for _, p in named[1::2]], "lr": 0.005}], lr=0.03)\n'
        "optimizer = side.convert(optimizer)\n{schedule}"
    ),
    "converted_hooked": (
        "optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)\n"
        'optimizer.register_step_pre_hook(lambda o, args, kwargs: side.see("old pre", 1))\n'
        'optimizer.register_step_post_hook(lambda o, args, kwargs: side.see("old post", 1))\n'
        "{schedule}\noptimizer = side.convert(optimizer)"
    ),
}
"""What the optimizer is given. ``{schedule}``: where its schedule is made, if not behind it."""
