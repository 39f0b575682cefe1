"""Objectives of drawn programs: the middle of a step, from the batch to the gradients, as source text.

``{block}`` is one of the model's blocks, ``{other}`` another one if there is another, ``{call}`` how the loop calls the
model.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    """``floats``: the batch has to take a gradient. ``once``: one backward per step, so that nothing has to be kept."""

    source: str
    floats: bool = False
    once: bool = False


BACKWARD = 'side.see("loss", loss)\nscaler.scale(loss).backward()'


def read_objectives(text: str) -> dict[str, Objective]:
    """Each under a heading with its name and marks; what has no backward ends with that of ``loss``, unless "none"."""
    found = {}
    for part in text.strip().removeprefix("## ").split("\n## "):
        heading, _, source = part.strip().partition("\n")
        name, *marks = heading.split()
        ends = "backward(" in source or "none" in marks
        found[name] = Objective(source if ends else f"{source}\n{BACKWARD}", "floats" in marks, "once" in marks)
    return found


OBJECTIVES = read_objectives("""
## plain once
loss = loss_of(model, {call}(x), step)

## accumulate
for micro in range(2):
    loss = loss_of(model, {call}(batch(side, 10 * step + micro)), step) / 2
    side.see("loss", loss)
    scaler.scale(loss).backward()

## train_step none
parts = [{"x": x}, {"x": batch(side, step + 20)}, {"x": batch(side, step + 40)}]
keys = {id(part["x"]): step + 20 * at for at, part in enumerate(parts)}
side.see("losses", side.train_step(parts, lambda r, part: scaler.scale(loss_of(model, r, keys[id(part["x"])]) / 3)))

## train_step_with_weights none
parts = [{"x": x}, {"x": batch(side, step + 20)}]
keys = {id(part["x"]): step + 20 * at for at, part in enumerate(parts)}
def weighted(r, part):
    loss = loss_of(model, r, keys[id(part["x"])])
    return scaler.scale(loss + 0.01 * sum(p.float().square().sum() for p in model.parameters()))
side.see("losses", side.train_step(parts, weighted))

## taught once
if step == 0:
    teacher = side.another(make().requires_grad_(False)).eval()
with torch.no_grad():
    wanted = take(teacher, teacher(x))
loss = loss_of(model, {call}(x), step) + (take(model, {call}(x)).float() - wanted.float()).square().mean()

## judged floats once
if step == 0:
    judge = side.another(make().requires_grad_(False)).eval()
y = take(model, {call}(x))
loss = y.float().square().mean() + take(judge, judge(y)).float().square().mean()

## micro_batch once none
def micro_batch():
    loss = loss_of(model, {call}(x), step)
    scaler.scale(loss).backward()
    return loss.detach()
side.see("loss", side.micro_batch(micro_batch))

## two_forwards once
loss = loss_of(model, {call}(x), step) + loss_of(model, {call}(batch(side, step + 50)), step)

## two_backwards
first = loss_of(model, {call}(x), step)
second = loss_of(model, {call}(batch(side, step + 50)), step)
scaler.scale(first).backward()
scaler.scale(second).backward()

## two_backwards_reversed
first = loss_of(model, {call}(x), step)
second = loss_of(model, {call}(batch(side, step + 50)), step)
scaler.scale(second).backward()
scaler.scale(first).backward()

## retain_graph
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward(retain_graph=True)
scaler.scale(loss).backward()

## retained_over_another
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward(retain_graph=True)
other = loss_of(model, {call}(batch(side, step + 50)), step)
scaler.scale(other).backward()
scaler.scale(loss).backward()

## freed_twice
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward()
scaler.scale(loss).backward()

## input_grad floats once
x.requires_grad_()
loss = loss_of(model, {call}(x), step)
side.see("loss", loss)
scaler.scale(loss).backward()
side.see("x.grad", x.grad)

## plain_upstream floats once
prompt = side.noise(99, D).requires_grad_()
loss = loss_of(model, {call}(x * prompt), step)
scaler.scale(loss).backward()
side.see("prompt.grad", prompt.grad)

## inputs_x floats
x.requires_grad_()
scaler.scale(loss_of(model, {call}(x), step)).backward(inputs=[x])
side.see("x.grad", x.grad)
loss = loss_of(model, {call}(x.detach()), step)

## inputs_params
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward(inputs=list({block}.parameters()) or list(model.parameters()))

## adversarial floats
x.requires_grad_()
g, = torch.autograd.grad(loss_of(model, {call}(x), step), x)
side.see("g", g)
loss = loss_of(model, {call}((x + 0.1 * g.sign()).detach()), step)

## gradient_first floats
x.requires_grad_()
loss = loss_of(model, {call}(x), step)
g, = torch.autograd.grad(loss, x, retain_graph=True)
side.see("g", g)
scaler.scale(loss * (1 + g.detach().float().sum())).backward()

## penalty floats
x.requires_grad_()
out = take(model, {call}(x))
g, = torch.autograd.grad(out.sum(), x, create_graph=True)
loss = out.float().mean() + (g.float().norm() - 1) ** 2

## late_penalty floats
x.requires_grad_()
g, = torch.autograd.grad(take(model, {call}(x)).sum(), x, create_graph=True)
loss = loss_of(model, {call}(batch(side, step + 50)), step) + g.float().square().sum()

## second_derivative floats
x.requires_grad_()
u = take(model, {call}(x)).sum()
du, = torch.autograd.grad(u, x, create_graph=True)
ddu, = torch.autograd.grad(du.sum(), x, create_graph=True)
loss = ddu.float().square().mean() + u.float() * 0.01

## create_graph
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward(create_graph=True)

## param_grads none
loss = loss_of(model, {call}(x), step)
for number, g in enumerate(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)):
    side.see(f"g{number}", g)

## feature_loss once
with features_of({block}) as features:
    out = {call}(x)
loss = loss_of(model, out, step) + sum(f.float().square().mean() for f in features)

## feature_only
with features_of({block}) as features:
    {call}(x)
loss = sum(f.float().square().mean() for f in features)

## feature_grad
with features_of({block}) as features:
    out = {call}(x)
loss = loss_of(model, out, step)
g = torch.autograd.grad(loss, features, retain_graph=True, allow_unused=True)
side.see("g", [f for f in g if f is not None])
scaler.scale(loss).backward()

## feature_penalty
with features_of({block}) as features:
    out = {call}(x)
loss = loss_of(model, out, step)
g = torch.autograd.grad(loss, features, create_graph=True, allow_unused=True)
loss = loss + sum(f.float().square().sum() for f in g if f is not None)

## feature_backwards
with features_of({block}) as features:
    out = {call}(x)
loss = loss_of(model, out, step)
scaler.scale(sum(f.float().square().mean() for f in features)).backward(retain_graph=True)
scaler.scale(loss).backward()

## split_graph
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

## fed_back floats once
h = take(model, {call}(x))
loss = loss_of(model, {call}(0.5 * h), step)

## truncated floats
h = x
for chunk in range(2):
    h = take(model, {call}(x + 0.5 * h.detach()))
    loss = h.float().square().mean()
    side.see("loss", loss)
    scaler.scale(loss).backward()

## contrastive once
a = take(model, {call}(x)).float()
with torch.no_grad():
    b = take(model, {call}(batch(side, step + 50))).float()
loss = (a - b).square().mean() - F.cosine_similarity(a.flatten(), b.flatten(), dim=0)

## after_step
loss = loss_of(model, {call}(x), step)
if step == 0:
    old = loss_of(model, {call}(batch(side, 50)), step)
scaler.scale(loss).backward()
if step == 1:
    scaler.scale(old).backward()

## retained_over_step
if step == 0:
    old = loss_of(model, {call}(x), step)
    scaler.scale(old).backward(retain_graph=True)
else:
    scaler.scale(old).backward(retain_graph=True)

## late_x_grad floats
if step == 0:
    z = x.clone().requires_grad_()
    old = loss_of(model, {call}(z), step)
else:
    side.see("g", torch.autograd.grad(old, z, retain_graph=True))
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward()

## discarded once
{call}(batch(side, step + 50))
loss = loss_of(model, {call}(x), step)

## evaluated_between once
loss = loss_of(model, {call}(x), step)
with torch.no_grad():
    side.see("between", take(model, {call}(batch(side, step + 50))))

## part
loss = take_block({block}({batch_of_block})).float().square().mean()

## part_and_whole
loss = loss_of(model, {call}(x), step)
loss = loss + take_block({block}({batch_of_block})).float().square().mean()

## toggled
{block}.requires_grad_(False)
scaler.scale(loss_of(model, {call}(x), step)).backward()
{block}.requires_grad_(True)
{other}.requires_grad_(False)
scaler.scale(loss_of(model, {call}(batch(side, step + 50)), step)).backward()
{other}.requires_grad_(True)

## boom_forward once
if step == 1:
    handle = {block}.register_forward_hook(boom)
    try:
        {call}(x)
    except Boom:
        side.see("boom", 1)
    handle.remove()
loss = loss_of(model, {call}(x), step)

## boom_before once
if step == 1:
    handle = {block}.register_forward_pre_hook(boom)
    try:
        {call}(x)
    except Boom:
        side.see("boom", 1)
    handle.remove()
loss = loss_of(model, {call}(x), step)

## boom_backward
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

## boom_and_again
loss = loss_of(model, {call}(x), step)
handle = loss.register_hook(boom) if step == 1 else None
try:
    scaler.scale(loss).backward(retain_graph=True)
except Boom:
    handle.remove()
    scaler.scale(loss).backward()

## func_grad_whole floats
side.see("g", torch.func.grad(lambda z: take(model, {call}(z)).float().sum())(x))
loss = loss_of(model, {call}(x), step)

## vmap_whole
with torch.no_grad():
    side.see("v", torch.func.vmap(lambda z: take(model, {call}(z)), randomness="different")(x.unsqueeze(0)))
loss = loss_of(model, {call}(x), step)

## vmap_trained
out = torch.func.vmap(lambda z: take(model, {call}(z)), randomness="different")(torch.stack([x, x]))
loss = out.float().square().mean()

## jacobian_whole floats
side.see("j", torch.func.jacrev(lambda z: take(model, {call}(z)).float().sum((0, 1)))(x))
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward()

## hessian_product floats
def energy(z):
    return take(model, {call}(z)).float().square().sum()
side.see("hvp", torch.autograd.functional.vhp(energy, x, torch.ones_like(x))[1])
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward()

## forward_mode floats
side.see("jvp", torch.func.jvp(lambda z: take(model, {call}(z)), (x,), (torch.ones_like(x),))[1])
loss = loss_of(model, {call}(x), step)
scaler.scale(loss).backward()

## functional_call
name, param = next(iter(model.named_parameters()))
other = torch.zeros(param.shape, dtype=side.dtype, requires_grad=True)
out = torch.func.functional_call(model, {name: other}, (x,))
loss = loss_of(model, out, step)
side.see("loss", loss)
scaler.scale(loss).backward()
side.see("g", other.grad)

## outer_weight
h = take(model, {call}(x))
loss = F.linear(h, next(p for p in model.parameters() if p.shape[-1:] == h.shape[-1:])).float().square().mean()

## outer_regularizer
loss = loss_of(model, {call}(x), step)
loss = loss + 0.01 * sum(p.float().square().sum() for p in model.parameters())

## checkpoint_whole once
loss = loss_of(model, checkpoint({call}, x, use_reentrant=False), step)

## reentrant_whole floats
x.requires_grad_()
loss = loss_of(model, checkpoint({call}, x, use_reentrant=True), step)

## save_on_cpu_whole once
with torch.autograd.graph.save_on_cpu():
    loss = loss_of(model, {call}(x), step)

## saved_hooks_whole once
with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
    loss = loss_of(model, {call}(x), step)

## retain_grad once
y = take(model, {call}(x))
y.retain_grad()
y.register_hook(lambda g: g * 2)
loss = y.float().square().mean()
scaler.scale(loss).backward()
side.see("y.grad", y.grad)

## in_place_on_output once
y = take(model, {call}(x))
y.mul_(2).add_(1)
loss = y.float().square().mean()

## spoiled
with features_of({block}) as features:
    out = {call}(x)
with torch.no_grad():
    for f in features:
        f.add_(1)
scaler.scale(loss_of(model, out, step)).backward()

## backward_in_thread once
loss = loss_of(model, {call}(x), step)
side.see("loss", loss)
in_thread(lambda: scaler.scale(loss).backward())

## forward_in_thread once
loss = loss_of(model, in_thread({call}, x), step)

## zero_loss once
loss = loss_of(model, {call}(x), step) * 0

## inference_input once
with torch.inference_mode():
    z = take(model, {call}(x))
loss = loss_of(model, {call}(x), step) + z.clone().float().mean()
""")
