"""Objectives of drawn programs: the middle of a step, from the batch to the gradients, as source text.

``{block}`` is one of the model's blocks, ``{other}`` another one if there is another, ``{call}`` how the loop calls the
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True)
class Objective:
    """``floats``: the batch has to take a gradient. ``once``: one backward per step, so that nothing has to be kept."""

    source: str
    floats: bool = False
    once: bool = False


BACKWARD = 'side.see("loss", loss)\nscaler.scale(loss).backward()'


def _objective(source: str, *, floats: bool = False, once: bool = False, backward: bool = True) -> Objective:
    """``backward``: what has none in its source ends with that of ``loss``."""
    source = dedent(source).strip()
    ends = "backward(" in source or not backward
    return Objective(source if ends else f"{source}\n{BACKWARD}", floats, once)


OBJECTIVES: dict[str, Objective] = {
    "plain": _objective("loss = loss_of(model, {call}(x), step)", once=True),
    "accumulate": _objective(
        """
        for micro in range(2):
            loss = loss_of(model, {call}(batch(side, 10 * step + micro)), step) / 2
            side.see("loss", loss)
            scaler.scale(loss).backward()
        """
    ),
    "two_forwards": _objective(
        "loss = loss_of(model, {call}(x), step) + loss_of(model, {call}(batch(side, step + 50)), step)", once=True
    ),
    "two_backwards": _objective(
        """
        first = loss_of(model, {call}(x), step)
        second = loss_of(model, {call}(batch(side, step + 50)), step)
        scaler.scale(first).backward()
        scaler.scale(second).backward()
        """
    ),
    "two_backwards_reversed": _objective(
        """
        first = loss_of(model, {call}(x), step)
        second = loss_of(model, {call}(batch(side, step + 50)), step)
        scaler.scale(second).backward()
        scaler.scale(first).backward()
        """
    ),
    "retain_graph": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(loss).backward()
        """
    ),
    "retained_over_another": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward(retain_graph=True)
        other = loss_of(model, {call}(batch(side, step + 50)), step)
        scaler.scale(other).backward()
        scaler.scale(loss).backward()
        """
    ),
    "freed_twice": _objective(
        "loss = loss_of(model, {call}(x), step)\nscaler.scale(loss).backward()\nscaler.scale(loss).backward()"
    ),
    "input_grad": _objective(
        """
        x.requires_grad_()
        loss = loss_of(model, {call}(x), step)
        side.see("loss", loss)
        scaler.scale(loss).backward()
        side.see("x.grad", x.grad)
        """,
        floats=True,
        once=True,
    ),
    "plain_upstream": _objective(
        """
        prompt = side.noise(99, D).requires_grad_()
        loss = loss_of(model, {call}(x * prompt), step)
        scaler.scale(loss).backward()
        side.see("prompt.grad", prompt.grad)
        """,
        floats=True,
        once=True,
    ),
    "inputs_x": _objective(
        """
        x.requires_grad_()
        scaler.scale(loss_of(model, {call}(x), step)).backward(inputs=[x])
        side.see("x.grad", x.grad)
        loss = loss_of(model, {call}(x.detach()), step)
        """,
        floats=True,
    ),
    "inputs_params": _objective(
        "loss = loss_of(model, {call}(x), step)\n"
        "scaler.scale(loss).backward(inputs=list({block}.parameters()) or list(model.parameters()))"
    ),
    "adversarial": _objective(
        """
        x.requires_grad_()
        g, = torch.autograd.grad(loss_of(model, {call}(x), step), x)
        side.see("g", g)
        loss = loss_of(model, {call}((x + 0.1 * g.sign()).detach()), step)
        """,
        floats=True,
    ),
    "gradient_first": _objective(
        """
        x.requires_grad_()
        loss = loss_of(model, {call}(x), step)
        g, = torch.autograd.grad(loss, x, retain_graph=True)
        side.see("g", g)
        scaler.scale(loss * (1 + g.detach().float().sum())).backward()
        """,
        floats=True,
    ),
    "penalty": _objective(
        """
        x.requires_grad_()
        out = take(model, {call}(x))
        g, = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.float().mean() + (g.float().norm() - 1) ** 2
        """,
        floats=True,
    ),
    "late_penalty": _objective(
        """
        x.requires_grad_()
        g, = torch.autograd.grad(take(model, {call}(x)).sum(), x, create_graph=True)
        loss = loss_of(model, {call}(batch(side, step + 50)), step) + g.float().square().sum()
        """,
        floats=True,
    ),
    "second_derivative": _objective(
        """
        x.requires_grad_()
        u = take(model, {call}(x)).sum()
        du, = torch.autograd.grad(u, x, create_graph=True)
        ddu, = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = ddu.float().square().mean() + u.float() * 0.01
        """,
        floats=True,
    ),
    "create_graph": _objective(
        "loss = loss_of(model, {call}(x), step)\nscaler.scale(loss).backward(create_graph=True)"
    ),
    "param_grads": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        for number, g in enumerate(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)):
            side.see(f"g{number}", g)
        """,
        backward=False,
    ),
    "feature_loss": _objective(
        """
        with features_of({block}) as features:
            out = {call}(x)
        loss = loss_of(model, out, step) + sum(f.float().square().mean() for f in features)
        """,
        once=True,
    ),
    "feature_only": _objective(
        """
        with features_of({block}) as features:
            {call}(x)
        loss = sum(f.float().square().mean() for f in features)
        """
    ),
    "feature_grad": _objective(
        """
        with features_of({block}) as features:
            out = {call}(x)
        loss = loss_of(model, out, step)
        g = torch.autograd.grad(loss, features, retain_graph=True, allow_unused=True)
        side.see("g", [f for f in g if f is not None])
        scaler.scale(loss).backward()
        """
    ),
    "feature_penalty": _objective(
        """
        with features_of({block}) as features:
            out = {call}(x)
        loss = loss_of(model, out, step)
        g = torch.autograd.grad(loss, features, create_graph=True, allow_unused=True)
        loss = loss + sum(f.float().square().sum() for f in g if f is not None)
        """
    ),
    "feature_backwards": _objective(
        """
        with features_of({block}) as features:
            out = {call}(x)
        loss = loss_of(model, out, step)
        scaler.scale(sum(f.float().square().mean() for f in features)).backward(retain_graph=True)
        scaler.scale(loss).backward()
        """
    ),
    "split_graph": _objective(
        """
        cut = []
        def split(module, args):
            h = args[0].detach().requires_grad_()
            cut.append((args[0], h))
            return (h, *args[1:])
        handle = {other}.register_forward_pre_hook(split)
        loss = loss_of(model, {call}(x), step)
        handle.remove()
        side.see("loss", loss)
        scaler.scale(loss).backward(retain_graph=True)  # x goes around the block, too
        for before, after in reversed(cut):
            if before.requires_grad and after.grad is not None:
                before.backward(after.grad, retain_graph=True)
        """
    ),
    "fed_back": _objective(
        "h = take(model, {call}(x))\nloss = loss_of(model, {call}(0.5 * h), step)", floats=True, once=True
    ),
    "truncated": _objective(
        """
        h = x
        for chunk in range(2):
            h = take(model, {call}(x + 0.5 * h.detach()))
            loss = h.float().square().mean()
            side.see("loss", loss)
            scaler.scale(loss).backward()
        """,
        floats=True,
    ),
    "contrastive": _objective(
        """
        a = take(model, {call}(x)).float()
        with torch.no_grad():
            b = take(model, {call}(batch(side, step + 50))).float()
        loss = (a - b).square().mean() - F.cosine_similarity(a.flatten(), b.flatten(), dim=0)
        """,
        once=True,
    ),
    "after_step": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        if step == 0:
            old = loss_of(model, {call}(batch(side, 50)), step)
        scaler.scale(loss).backward()
        if step == 1:
            scaler.scale(old).backward()
        """
    ),
    "retained_over_step": _objective(
        """
        if step == 0:
            old = loss_of(model, {call}(x), step)
            scaler.scale(old).backward(retain_graph=True)
        else:
            scaler.scale(old).backward(retain_graph=True)
        """
    ),
    "late_x_grad": _objective(
        """
        if step == 0:
            z = x.clone().requires_grad_()
            old = loss_of(model, {call}(z), step)
        else:
            side.see("g", torch.autograd.grad(old, z, retain_graph=True))
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward()
        """,
        floats=True,
    ),
    "discarded": _objective("{call}(batch(side, step + 50))\nloss = loss_of(model, {call}(x), step)", once=True),
    "evaluated_between": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        with torch.no_grad():
            side.see("between", take(model, {call}(batch(side, step + 50))))
        """,
        once=True,
    ),
    "part": _objective(
        """
        loss = take_block({block}({batch_of_block})).float().square().mean()
        """
    ),
    "part_and_whole": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        loss = loss + take_block({block}({batch_of_block})).float().square().mean()
        """
    ),
    "toggled": _objective(
        """
        {block}.requires_grad_(False)
        scaler.scale(loss_of(model, {call}(x), step)).backward()
        {block}.requires_grad_(True)
        {other}.requires_grad_(False)
        scaler.scale(loss_of(model, {call}(batch(side, step + 50)), step)).backward()
        {other}.requires_grad_(True)
        """
    ),
    "boom_forward": _objective(
        """
        if step == 1:
            handle = {block}.register_forward_hook(boom)
            try:
                {call}(x)
            except Boom:
                side.see("boom", 1)
            handle.remove()
        loss = loss_of(model, {call}(x), step)
        """,
        once=True,
    ),
    "boom_before": _objective(
        """
        if step == 1:
            handle = {block}.register_forward_pre_hook(boom)
            try:
                {call}(x)
            except Boom:
                side.see("boom", 1)
            handle.remove()
        loss = loss_of(model, {call}(x), step)
        """,
        once=True,
    ),
    "boom_backward": _objective(
        """
        if step == 1:
            with features_of({block}) as features:
                out = {call}(x)
            for f in features:
                f.register_hook(boom)
            try:
                scaler.scale(loss_of(model, out, step)).backward()
            except Boom:
                side.see("boom", 1)
            optimizer.zero_grad()
        loss = loss_of(model, {call}(x), step)
        """
    ),
    "boom_and_again": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        handle = loss.register_hook(boom) if step == 1 else None
        try:
            scaler.scale(loss).backward(retain_graph=True)
        except Boom:
            handle.remove()
            scaler.scale(loss).backward()
        """
    ),
    "func_grad_whole": _objective(
        """
        side.see("g", torch.func.grad(lambda z: take(model, {call}(z)).float().sum())(x))
        loss = loss_of(model, {call}(x), step)
        """,
        floats=True,
    ),
    "vmap_whole": _objective(
        """
        with torch.no_grad():
            side.see("v", torch.func.vmap(lambda z: take(model, {call}(z)), randomness="different")(x.unsqueeze(0)))
        loss = loss_of(model, {call}(x), step)
        """
    ),
    "vmap_trained": _objective(
        """
        out = torch.func.vmap(lambda z: take(model, {call}(z)), randomness="different")(torch.stack([x, x]))
        loss = out.float().square().mean()
        """
    ),
    "jacobian_whole": _objective(
        """
        side.see("j", torch.func.jacrev(lambda z: take(model, {call}(z)).float().sum((0, 1)))(x))
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward()
        """,
        floats=True,
    ),
    "hessian_product": _objective(
        """
        def energy(z):
            return take(model, {call}(z)).float().square().sum()
        side.see("hvp", torch.autograd.functional.vhp(energy, x, torch.ones_like(x))[1])
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward()
        """,
        floats=True,
    ),
    "forward_mode": _objective(
        """
        side.see("jvp", torch.func.jvp(lambda z: take(model, {call}(z)), (x,), (torch.ones_like(x),))[1])
        loss = loss_of(model, {call}(x), step)
        scaler.scale(loss).backward()
        """,
        floats=True,
    ),
    "functional_call": _objective(
        """
        name, param = next(iter(model.named_parameters()))
        other = torch.zeros(param.shape, dtype=side.dtype, requires_grad=True)
        out = torch.func.functional_call(model, {name: other}, (x,))
        loss = loss_of(model, out, step)
        side.see("loss", loss)
        scaler.scale(loss).backward()
        side.see("g", other.grad)
        """
    ),
    "outer_weight": _objective(
        """
        h = take(model, {call}(x))
        loss = F.linear(h, next(p for p in model.parameters() if p.shape[-1:] == h.shape[-1:])).float().square().mean()
        """
    ),
    "outer_regularizer": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        loss = loss + 0.01 * sum(p.float().square().sum() for p in model.parameters())
        """
    ),
    "checkpoint_whole": _objective(
        "loss = loss_of(model, checkpoint({call}, x, use_reentrant=False), step)", once=True
    ),
    "reentrant_whole": _objective(
        "x.requires_grad_()\nloss = loss_of(model, checkpoint({call}, x, use_reentrant=True), step)", floats=True
    ),
    "save_on_cpu_whole": _objective(
        "with torch.autograd.graph.save_on_cpu():\n    loss = loss_of(model, {call}(x), step)", once=True
    ),
    "saved_hooks_whole": _objective(
        "with torch.autograd.graph.saved_tensors_hooks(pack, unpack):\n    loss = loss_of(model, {call}(x), step)",
        once=True,
    ),
    "retain_grad": _objective(
        """
        y = take(model, {call}(x))
        y.retain_grad()
        y.register_hook(lambda g: g * 2)
        loss = y.float().square().mean()
        scaler.scale(loss).backward()
        side.see("y.grad", y.grad)
        """,
        once=True,
    ),
    "in_place_on_output": _objective(
        """
        y = take(model, {call}(x))
        y.mul_(2).add_(1)
        loss = y.float().square().mean()
        """,
        once=True,
    ),
    "spoiled": _objective(
        """
        with features_of({block}) as features:
            out = {call}(x)
        with torch.no_grad():
            for f in features:
                f.add_(1)
        scaler.scale(loss_of(model, out, step)).backward()
        """
    ),
    "backward_in_thread": _objective(
        """
        loss = loss_of(model, {call}(x), step)
        side.see("loss", loss)
        in_thread(lambda: scaler.scale(loss).backward())
        """,
        once=True,
    ),
    "forward_in_thread": _objective(
        """
        loss = loss_of(model, in_thread({call}, x), step)
        """,
        once=True,
    ),
    "zero_loss": _objective("loss = loss_of(model, {call}(x), step) * 0", once=True),
    "inference_input": _objective(
        """
        with torch.inference_mode():
            z = take(model, {call}(x))
        loss = loss_of(model, {call}(x), step) + z.clone().float().mean()
        """,
        once=True,
    ),
}
