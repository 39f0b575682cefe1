"""Programs as text: a small training script that needs nothing but torch and a ``side`` (see ``program_sides``).

So a finding is a script that can be read, changed and run alone.
"""

import re
from textwrap import indent

from tests.hunts import program_adapters as adapters
from tests.hunts import program_schedules as schedules
from tests.hunts.program_draw import Block, Program
from tests.hunts.program_exits import AUX, CALLS, EXITS, LATE
from tests.hunts.program_habits import ADAMS, HABITS
from tests.hunts.program_kinds import KINDS
from tests.hunts.program_objectives import OBJECTIVES

PRELUDE = """
import abc
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import threading
import types
import typing

import peft
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
"""

HELPERS = {
    "Mixin": "class Mixin:\n    __slots__ = ()\n\n    def told(self):\n        return 1\n",
    "Result": "@dataclasses.dataclass\nclass Result:\n    y: torch.Tensor\n",
    "Pair": 'Pair = collections.namedtuple("Pair", "y other")\n',
    "Box": "class Box:\n    def __init__(self, y):\n        self.y = y\n",
    "Slots": 'class Slots:\n    __slots__ = ("y",)\n\n    def __init__(self, y):\n        self.y = y\n',
    "Found": "class Found(Exception):\n    pass\n",
    "Boom": "class Boom(Exception):\n    pass\n",
    "boom": "def boom(*args):\n    raise Boom\n",
    "STORE": "STORE = {}\n",
    "pack": "def pack(t):\n    return t.clone()\n",
    "unpack": "def unpack(t):\n    return t\n",
    "in_thread": """
def in_thread(function, *args):
    found = []
    grad = torch.is_grad_enabled()

    def work():
        try:
            with torch.set_grad_enabled(grad):
                found.append((function(*args), None))
        except BaseException as e:
            found.append((None, e))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if found[0][1] is not None:
        raise found[0][1]
    return found[0][0]
""",
    "many_threads": """
def many_threads(function, count):
    found = [None] * count

    def work(k):
        try:
            with torch.no_grad():
                found[k] = function(k)
        except BaseException as e:
            found[k] = e

    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found
""",
    "features_of": """
@contextlib.contextmanager
def features_of(block):
    found = []
    handle = block.register_forward_hook(lambda m, a, out: found.extend(t for t in tensors_in(out) if t.requires_grad))
    try:
        yield found
    finally:
        handle.remove()
""",
    "tensors_in": """
def tensors_in(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
""",
    "tree_map": """
def tree_map(tree):
    return torch.utils._pytree.tree_map(lambda t: t * 0.5 if isinstance(t, torch.Tensor) else t, tree)
""",
}


def source(program: Program) -> str:
    """The script of a program: ``make()`` gives its model, ``run(model, side)`` trains it."""
    classes = [_block_class(program, at) for at in range(len(program.blocks))]
    extras = dict.fromkeys(KINDS[block.kind].extra for block in program.blocks if KINDS[block.kind].extra)
    body = "\n\n\n".join([*extras, *classes, _model_class(program), _functions(program), _run(program)])
    needed: list[str] = []
    for _ in range(2):  # helpers use helpers
        text = "".join([body, *(HELPERS[name] for name in needed)])
        needed = [name for name in HELPERS if name in text]
    helpers = [HELPERS[name].strip() for name in needed]
    imports = [line for line in PRELUDE.strip().splitlines() if _needed(line, body + "".join(helpers))]
    size = f"D, B, T = {program.width}, {program.batch}, {program.length}"
    told = f'"""Program {program.seed}: {"; ".join(program.features)}."""'
    return "\n\n".join([told, "\n".join(imports), size, *helpers, "", body]) + "\n"


def _needed(line: str, text: str) -> bool:
    words = line.split()
    return (
        not words
        or words[-1] + "." in text
        or words[-1] + "(" in text
        or words[0] == "from"
        or words[-1] in ("torch", "F", "nn")
        or words[-1].removeprefix("torch.") + "." in text
    )


def path(program: Program, at: int, model: str = "self") -> str:
    """How block ``at`` is reached from its model."""
    if program.blocks[at].numbered:
        return f"{model}.layers[{sum(block.numbered for block in program.blocks[:at])}]"
    return f"{model}.b{at}"


def _block_class(program: Program, at: int) -> str:
    block = program.blocks[at]
    kind = KINDS[block.kind]
    init, before = kind.init, ""
    text = ""
    if block.inside:
        inner = KINDS[block.inside]
        text += _module(f"Inner{at}", inner.init, f"{inner.forward}\nreturn y") + "\n\n\n"
        init += f"\nself.inner = Inner{at}()"
        before = "x = x + self.inner(x)\n"
    if block.frozen:
        init += "\nself.requires_grad_(False)"
    lines = [before + kind.forward]
    if block.aux:
        lines.append(AUX[block.aux][0].replace("{own}", kind.own))
    if block.late and LATE[block.late][0] != "pass":
        lines.append(LATE[block.late][0].replace("{own}", kind.own))
    lines.append(EXITS[block.exit][0])
    name, args = f"Block{at}", "x, sink=None" if _takes_sink(block) else "x"
    text += _module(name, init.replace("{Block}", name), "\n".join(lines), args)
    return f"{text}\n\n{indent(kind.methods, '    ')}" if kind.methods else text


def _takes_sink(block: Block) -> bool:
    return "sink" in EXITS[block.exit][0] or block.aux == "list"


def _module(name: str, init: str, forward: str, args: str = "x", bases: str = "nn.Module", declares: str = "") -> str:
    return (
        f"class {name}({bases}):\n{declares}"
        f"    def __init__(self):\n        super().__init__()\n{indent(init, ' ' * 8)}\n\n"
        f"    def forward(self, {args}):\n{indent(forward, ' ' * 8)}"
    )


def _call_of(program: Program, at: int) -> str:
    """Lines of the model's forward that run block ``at``: from ``h`` to ``y``."""
    block, me = program.blocks[at], path(program, at)
    sink = ", sink" if _takes_sink(block) else ""
    lines = CALLS[block.call].replace("{args}", "x" + sink).replace("{detached}", "x.detach()" + sink)
    if block.exit == "raised":
        lines = f"try:\n{indent(lines, '    ')}\nexcept Found as e:\n    r = e.args[0]"
    take = EXITS[block.exit][1]
    if block.call == "skipped":
        take = f"if r is None:\n    y = x\nelse:\n{indent(take, '    ')}"
    own = KINDS[block.kind].own
    if block.aux:
        take += "\n" + AUX[block.aux][1]
    if block.late:
        take += "\n" + LATE[block.late][1].replace("{outside}", own.replace("self.", me + "."))
    return (lines + "\n" + take).replace("{block}", me)


def _model_class(program: Program) -> str:
    root, blocks = program.root, program.blocks
    init: list[str] = []
    if "embedding" in root:
        init += ["self.embed = nn.Embedding(11, D)", "self.head = nn.Linear(D, 11, bias=False)"]
    if "tied" in root:
        init.append("self.head.weight = self.embed.weight")
    if "own_param" in root:
        init.append("self.scale = nn.Parameter(torch.ones(D))")
    if "param_property" in root:
        init.append("self.logit_scale = nn.Parameter(torch.zeros(1))")
    if "state" in root:
        init.append("self.state = None")
    init += [f"self.b{at} = Block{at}()" for at, block in enumerate(blocks) if not block.numbered]
    numbered = [f"Block{at}()" for at, block in enumerate(blocks) if block.numbered]
    if numbered:
        init.append(f"self.layers = nn.ModuleList([{', '.join(numbered)}])")
    body = ["x = self.embed(x)"] if "embedding" in root else []
    if any(_takes_sink(block) for block in blocks):
        body.append("sink = []")
    body.append("aux = 0.0")
    if "forces" in root:
        body.append("x0 = x = x if x.requires_grad else x.detach().requires_grad_()")
    if "state" in root:
        body.append("if self.state is not None and self.state.shape == x.shape:\n    x = x + 0.5 * self.state")
    if "own_param" in root:
        body.append("x = x * self.scale")
    if "unet" in root:
        body.append("self.skips = []")
    calls = []
    for at in range(len(blocks)):
        calls.append(f"{_call_of(program, at)}\nx = {'y' if 'chain' in root else 'x + y'}")
        if "unet" in root:
            calls.append("self.skips.append(y)")
    if "residual_list" in root:
        body.append("every = [x]")
        calls = [f"{call}\nevery.append(x)" if call.endswith("x + y") else call for call in calls]
    text = "\n".join(calls)
    body.append(f"for _ in range(2):\n{indent(text, '    ')}" if "recurrent" in root else text)
    if "unet" in root:
        body.append("while self.skips:\n    x = x + 0.5 * self.skips.pop()")
    if "residual_list" in root:
        body.append("x = torch.stack(every).mean(0)")
    if "own_param" in root:
        body.append("x = x * self.scale")
    if "regularizer" in root:
        body.append("aux = aux + 0.01 * sum(p.float().square().sum() for p in self.parameters())")
    if "stacked_regularizer" in root:
        body.append("aux = aux + 0.01 * torch.cat([p.float().flatten() for p in self.parameters()]).norm()")
    if "param_property" in root:
        body.append("self.said = self.logit_scale.exp()\nx = x * self.said")
    if "state" in root:
        body.append("self.state = x.detach()")
    if "forces" in root:
        body.append("with torch.enable_grad():\n    x = -torch.autograd.grad(x.sum(), x0, create_graph=True)[0] + x")
    if "embedding" in root:
        body.append("x = F.linear(x, self.head.weight)" if "fused_head" in root else "x = self.head(x)")
    body.append("self.aux = aux" if "aux_kept" in root else "x = x + aux if torch.is_tensor(aux) else x")
    if "aux_kept" not in root:
        body[-1] = "y = (x + aux).to(x.dtype)"
    else:
        body.append("y = x")
    body.append(EXITS[program.root_exit][0])
    bases = next((BASES[name] for name in root if name in BASES), "nn.Module")
    slots = '    __slots__ = ("slotted", "__dict__")[:1]\n' if "slotted" in root else ""
    in_fp32 = [name for block in blocks for name in re.findall(r"self\.(\w+32)\b", KINDS[block.kind].init)]
    told = "keep_fp32" if "kept_by_name" in root else "_keep_in_fp32_modules_strict"
    declares = f"{slots}    {told} = {sorted(set(in_fp32))}\n\n" if in_fp32 else slots
    declares += "    averages = 0.75\n\n" if "averaged" in root else ""
    if "encode" not in root:
        return _module("Model", "\n".join(init), "\n".join(body), bases=bases, declares=declares)
    whole = _module("Model", "\n".join(init), "return self.encode(x)", bases=bases, declares=declares)
    return whole + "\n\n    def encode(self, x):\n" + indent("\n".join(body), " " * 8)


BASES = {
    "generic_first": "typing.Generic[typing.TypeVar('T')], nn.Module",
    "generic_last": "nn.Module, typing.Generic[typing.TypeVar('T')]",
    "abstract_first": "abc.ABC, nn.Module",
    "protocol_last": "nn.Module, collections.abc.Callable",
    "mixin_first": "Mixin, nn.Module",
}
"""What the class of the model derives from."""


def _functions(program: Program) -> str:
    """What the loop needs to get at results: of the model, of a block; and the loss and the batches."""
    take = EXITS[program.root_exit][1].replace("{block}", "model").replace("self.", "model.")
    if "embedding" in program.root:
        loss = "F.cross_entropy(y.flatten(0, 1).float(), side_ids(key).flatten())"
        batch = "side.ids(key, 11, B, T)"
    else:
        loss, batch = "y.float().square().mean()", "side.noise(key, B, T, D)"
    aux = "\n    loss = loss + model.aux" if "aux_kept" in program.root else ""
    parts = [
        f"def take(model, r):\n{indent(take, '    ')}\n    return y",
        f"def loss_of(model, r, key):\n    y = take(model, r)\n    loss = {loss}{aux}\n    return loss",
        f"def batch(side, key):\n    return {batch}",
        "def make():\n    torch.manual_seed(0)\n"
        + (adapters.make(program.adapter) if program.adapter else "    return Model()"),
    ]
    if "embedding" in program.root:
        draw_ids = "torch.randint(0, 11, (B, T), generator=torch.Generator().manual_seed(1000 + key))"
        parts.insert(0, f"def side_ids(key):\n    return {draw_ids}")
    block = program.blocks[program.target]
    if "take_block" in _loop_text(program):
        # The list that some blocks append to is given by the loop.
        took = EXITS[block.exit][1].replace("{block}", path(program, program.target, "model"))
        parts.append(f"SINK = []\n\n\ndef take_block(r, model=None, sink=SINK):\n{indent(took, '    ')}\n    return y")
    return "\n\n\n".join(parts)


def _loop_text(program: Program) -> str:
    return OBJECTIVES[program.objective].source + "".join(HABITS[name].source for name in program.habits)


def _optimizer(program: Program) -> str:
    """The lines that make the optimizer and its schedule."""
    made = ADAMS[program.adam]
    schedule = schedules.SCHEDULES.get(program.schedule, "scheduler = None")
    return made.replace("{schedule}", schedule) if "{schedule}" in made else f"{made}\n{schedule}"


def _run(program: Program) -> str:
    def at(place: str) -> list[str]:
        return [habit.source for name, habit in HABITS.items() if name in program.habits and habit.place == place]

    objective = OBJECTIVES[program.objective].source
    inner = ["x = batch(side, step)", *at("before"), objective]
    if at("after"):
        inner += ["scaler.unscale_(optimizer)", *at("after")]
    inner += ["scaler.step(optimizer)", "scaler.update()"]
    if program.schedule:
        inner.append(schedules.stepped(program.schedule))
    inner += at("stepped") + (at("zero") or ["optimizer.zero_grad()"])
    inner.append('side.see("step", step)')
    lines = [_optimizer(program), "scaler = side.scaler", *at("setup")]
    lines += [f"for step in range({program.steps}):", indent("\n".join(inner), "    ")]
    text = re.sub(r"^( *)\{optimizer\}$", lambda m: indent(_optimizer(program), m[1]), "\n".join(lines), flags=re.M)
    other = (program.target + 1) % len(program.blocks)
    block = program.blocks[program.target]
    of_block = "side.noise(step + 60, B, T, D)" + (", SINK" if _takes_sink(block) else "")
    text = text.replace("take_block(", "take_block(model=model, r=") if "{block}.kept" in EXITS[block.exit][1] else text
    for name, value in (
        ("{block}", path(program, program.target, "model")),
        ("{other}", path(program, other, "model")),
        ("{call}", "model.encode" if "encode" in program.root else "model"),
        ("{batch_of_block}", of_block),
        ("{last}", str(program.steps - 1)),
    ):
        text = text.replace(name, value)
    return "def run(model, side):\n" + indent(text, "    ")
