"""How blocks of drawn programs are called, and how results come out of them, as source text.

An *exit* is how ``y`` comes to the block that goes on: returned in some container, kept in an attribute, appended to a
list. *Late* is what else of a block is used after its call, *aux* a second result beside the output. A *call* is what
stands around the block: checkpointing, a thread, its ``forward`` called past the hooks.
"""

EXITS: dict[str, tuple[str, str]] = {
    "tensor": ("return y", "y = r"),
    "tuple": ("return y, y.detach().mean()", "y = r[0]"),
    "dict": ('return {"y": y, "none": None}', 'y = r["y"]'),
    "nested": ('return {"a": [x, (y, 3)]}', 'y = r["a"][1][0]'),
    "dataclass": ("return Result(y)", "y = r.y"),
    "namedtuple": ("return Pair(y, None)", "y = r.y"),
    "unknown": ("return Box(y)", "y = r.y"),
    "slots": ("return Slots(y)", "y = r.y"),
    "set": ("return {y}", "(y,) = r"),
    "user_dict": ("return collections.UserDict(y=y)", 'y = r["y"]'),
    "deque": ("return collections.deque([y])", "y = r[0]"),
    "namespace": ("return types.SimpleNamespace(y=y)", "y = r.y"),
    "distribution": ("return torch.distributions.Normal(y, 1.0, validate_args=False)", "y = r.mean"),
    "generator": ("return (part for part in [y])", "y = next(r)"),
    "closure": ("return lambda: y", "y = r()"),
    "attribute": ("self.kept = y", "y = {block}.kept"),
    "list": ("sink.append(y)", "y = sink.pop()"),
    "dict_passed": ('sink.append({"y": y})', 'y = sink.pop()["y"]'),
    "global": ('STORE["y"] = y', 'y = STORE.pop("y")'),
    "buffer": ("out = torch.zeros_like(x)\nout[:] = y\nsink.append(out)", "y = sink.pop()"),
    "raised": ("raise Found(y)", "y = r"),
    "iterator": ("yield y", "y = next(iter(r))"),
}
"""How ``y`` leaves a block, and how its caller takes it from what the call gave (``r``)."""

ORDINARY_EXITS = ("tensor", "tuple", "dict", "nested", "namedtuple", "dataclass")

LATE: dict[str, tuple[str, str]] = {
    "view": ("self.late = {own}.t()", "y = y + x @ {block}.late"),
    "view_detached": ("self.late = {own}.detach().mT", "y = y + x @ {block}.late"),
    "weight": ("self.late = [{own}]", "y = y + x @ {block}.late[0]"),
    "lambda": ("self.late = lambda z: z @ {own}", "y = y + {block}.late(x)"),
    "product": ("self.late = x @ {own}", "y = y + {block}.late"),
    "global_view": ('STORE["w"] = {own}.mT', 'y = y + x @ STORE["w"]'),
    "foreign": ("pass", "y = y + F.linear(x, {outside})"),
    "foreign_view": ("pass", "wt = {outside}.mT\ny = y + x @ wt"),
}
"""What else of a block its caller uses after the call: ``{own}`` inside of it, ``{outside}`` the same from outside."""

AUX: dict[str, tuple[str, str]] = {
    "attribute": ("self.aux = (x @ {own}).float().square().mean()", "aux = aux + {block}.aux"),
    "list": ("sink.append((x @ {own}).float().square().mean())", "aux = aux + sink.pop(0)"),
    "global": ('STORE["aux"] = (x @ {own}).float().square().mean()', 'aux = aux + STORE.pop("aux")'),
    "weight_only": ("self.aux = {own}.float().square().mean()", "aux = aux + {block}.aux"),
    "box": ("self.aux = Box((x @ {own}).float().square().mean())", "aux = aux + {block}.aux.y"),
}
"""A second result, the last to read the block's weights, that does not leave with the output."""

CALLS: dict[str, str] = {
    "direct": "r = {block}({args})",
    "checkpoint": "r = checkpoint({block}, {args}, use_reentrant=False)",
    "reentrant": "r = checkpoint({block}, {args}, use_reentrant=True)",
    "forward": "r = {block}.forward({args})",
    "thread": "r = in_thread({block}, {args})",
    "no_grad": "with torch.no_grad():\n    r = {block}({args})",
    "inference": "with torch.inference_mode():\n    r = {block}({args})",
    "detached": "r = {block}({detached})",
    "twice": "{block}({args})\nr = {block}({args})",
    "save_on_cpu": "with torch.autograd.graph.save_on_cpu():\n    r = {block}({args})",
    "saved_hooks": "with torch.autograd.graph.saved_tensors_hooks(pack, unpack):\n    r = {block}({args})",
    # In fp16 of its own dtype: the plain side sums in fp32, also what autocast would have rounded before.
    "autocast": (
        'with torch.autocast("cpu", torch.float16 if x.dtype == torch.float16 else torch.bfloat16):\n'
        "    r = {block}({args})"
    ),
    "anomaly": "with torch.autograd.detect_anomaly(check_nan=False):\n    r = {block}({args})",
    "skipped": "r = {block}({args}) if float(torch.rand(())) < 0.7 else None",
}
"""How a block is called."""
