"""Programs as values: which parts they have, drawn from a seed.

A :class:`Program` says which parts were drawn; ``program_source`` writes it as Python. So shrinking is dropping parts
of a value. Most parts are ordinary: a program has one to three odd ones.
"""

import random
from dataclasses import dataclass, replace
from functools import cache

from tests.hunts.program_adapters import ADAPTER_HABITS, ADAPTERS, TARGETED
from tests.hunts.program_exits import AUX, CALLS, EXITS, LATE, ORDINARY_EXITS
from tests.hunts.program_habits import ADAMS, HABITS
from tests.hunts.program_kinds import FROZEN, KINDS, ODD, ORDINARY
from tests.hunts.program_modules import KEPT
from tests.hunts.program_objectives import OBJECTIVES
from tests.hunts.program_resumes import ORDERS, RESUMES
from tests.hunts.program_schedules import SCHEDULES
from tests.hunts.program_writes import WRITES


@dataclass(frozen=True)
class Block:
    """One block of a program's model; every name is a row of a table of ``program_blocks``."""

    kind: str = "linear"
    exit: str = "tensor"
    call: str = "direct"
    late: str = ""
    aux: str = ""
    numbered: bool = True
    frozen: bool = False
    inside: str = ""
    """Of this ordinary kind a block of its own is inside, before the block's own computing."""

    def features(self) -> list[str]:
        told = [f"kind {self.kind}"]
        told += [f"exit {self.exit}"] if self.exit != "tensor" else []
        told += [f"call {self.call}"] if self.call != "direct" else []
        told += [f"late {self.late}"] if self.late else []
        told += [f"aux {self.aux}"] if self.aux else []
        told += ["frozen"] if self.frozen else []
        told += [f"inside {self.inside}"] if self.inside else []
        return told


ROOTS = (
    "embedding", "tied", "own_param", "regularizer", "stacked_regularizer", "unet", "recurrent", "state", "forces",
    "encode", "fused_head", "residual_list", "aux_kept", "param_property", "inputs_first", "generic_first",
    "generic_last", "abstract_first", "protocol_last", "mixin_first", "slotted",
    "kept_by_name", "chain", "averaged",
)  # fmt: skip
"""What the model around the blocks does."""

ROOT_EXITS = (
    "tensor", "tuple", "dict", "nested", "dataclass", "namedtuple", "unknown", "slots", "set", "user_dict", "namespace",
    "distribution", "closure", "attribute", "global", "deque",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One drawn training script."""

    seed: int
    blocks: tuple[Block, ...] = (Block(),)
    root: tuple[str, ...] = ()
    root_exit: str = "tensor"
    objective: str = "plain"
    habits: tuple[str, ...] = ()
    adam: str = "whole"
    schedule: str = ""
    adapter: str = ""
    width: int = 8
    batch: int = 2
    length: int = 4
    steps: int = 3
    target: int = 0
    """The block that objectives and habits speak of."""

    @property
    def features(self) -> list[str]:
        """What was drawn, one word per part that is not the simplest."""
        told = [f"objective {self.objective}"] + [f"habit {name}" for name in self.habits]
        told += [f"root {name}" for name in self.root]
        told += [f"root exit {self.root_exit}"] if self.root_exit != "tensor" else []
        told += [f"adam {self.adam}"] if self.adam != "whole" else []
        told += [f"schedule {self.schedule}"] if self.schedule else []
        told += [f"adapter {self.adapter}"] if self.adapter else []
        return sorted(set(told + [feature for block in self.blocks for feature in block.features()]))

    @property
    def may_step_in_backward(self) -> bool:
        return OBJECTIVES[self.objective].once and all(HABITS[name].transient for name in self.habits)


WHAT = (
    "kind", "kind", "kind", "exit", "call", "late", "aux", "root", "objective", "objective", "habit", "habit", "resume",
    "write", "schedule", "adapter",
)  # fmt: skip
"""What an odd part is, as often as it is drawn."""


# ---- drawing -------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(f"program {seed}")
    blocks = [_ordinary(rng) for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5)))]
    program = Program(
        seed,
        width=rng.choice((4, 8, 8, 16)),
        batch=rng.choice((1, 2, 3)),
        length=rng.choice((2, 4, 5)),
        steps=rng.choice((2, 3, 3)),
        adam=rng.choice(("whole",) * 3 + ("parting_groups",) + tuple(ADAMS)),
        target=rng.randrange(len(blocks)),
        root_exit=rng.choice(("tensor",) * 3 + ("tuple", "dict", "dataclass")),
        habits=tuple(name for name in ("grads", "clip", "evaluate") if rng.random() < 0.3),
    )
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        what = rng.choice(WHAT)
        at = rng.randrange(len(blocks))
        if what == "kind":
            blocks[at] = replace(blocks[at], kind=rng.choice(tuple(ODD)), frozen=False, inside="")
        elif what == "exit":
            blocks[at] = replace(blocks[at], exit=rng.choice(tuple(EXITS)), frozen=_may_freeze(blocks[at], rng))
        elif what == "call":
            blocks[at] = replace(blocks[at], call=rng.choice(tuple(CALLS)))
        elif what == "late" and KINDS[blocks[at].kind].own:
            blocks[at] = replace(blocks[at], late=rng.choice(tuple(LATE)), frozen=_may_freeze(blocks[at], rng))
        elif what == "aux" and KINDS[blocks[at].kind].own:
            blocks[at] = replace(blocks[at], aux=rng.choice(tuple(AUX)), frozen=_may_freeze(blocks[at], rng))
        elif what == "root":
            if rng.random() < 0.3:
                program = replace(program, root_exit=rng.choice(ROOT_EXITS))
            else:
                program = replace(program, root=tuple(sorted({*program.root, rng.choice(ROOTS)})))
        elif what == "objective":
            program = replace(program, objective=rng.choice(tuple(OBJECTIVES)), target=at)
        elif what == "schedule":
            program = replace(program, schedule=rng.choice(tuple(SCHEDULES)))
        else:
            if what == "adapter" and not program.adapter:
                program = replace(program, adapter=rng.choice(tuple(ADAPTERS)))
            names = {"resume": RESUMES, "write": WRITES, "adapter": ADAPTER_HABITS}.get(what, HABITS)
            program = replace(program, habits=tuple(dict.fromkeys((*program.habits, rng.choice(tuple(names))))))
    return fitted(replace(program, blocks=tuple(blocks)))


def _ordinary(rng: random.Random) -> Block:
    kind = rng.choice(tuple(ORDINARY))
    return Block(
        kind,
        exit=rng.choice(("tensor",) * 5 + ORDINARY_EXITS),
        numbered=rng.random() < 0.6,
        frozen=rng.random() < 0.15 and kind in FROZEN,
        inside=rng.choice(tuple(ORDINARY)) if rng.random() < 0.15 else "",
    )


def _may_freeze(block: Block, rng: random.Random) -> bool:
    return block.kind in FROZEN and rng.random() < 0.4


def fitted(program: Program) -> Program:
    """The nearest program that makes sense: what needs a float batch gets one, something is trained."""
    root = set(program.root)
    if "tied" in root or "fused_head" in root:
        root.add("embedding")
    if {"embedding", "forces"} & root and (OBJECTIVES[program.objective].floats or "forces" in root):
        root -= {"embedding", "tied", "fused_head"}
    blocks = tuple(b if KINDS[b.kind].own else replace(b, late="", aux="") for b in program.blocks)
    if "chain" in root:  # so that they can be stages
        blocks = tuple(replace(block, numbered=True) for block in blocks)
    if all(block.frozen for block in blocks):
        blocks = (*blocks[:-1], replace(blocks[-1], frozen=False))
    habits = tuple(name for name in program.habits if program.adapter or HABITS[name].needs != "adapter")
    averages = [name for name in habits if HABITS[name].needs == "averaged"]
    if averages:
        root.add("averaged")
    elif "averaged" in root:
        habits = (*habits, "averages")
    if program.adapter and not any(block.kind in TARGETED for block in blocks):
        blocks = (*blocks, Block("linear"))
    program = replace(program, root=tuple(sorted(root)), blocks=blocks, habits=habits)
    return replace(program, target=min(program.target, len(blocks) - 1))


def with_part(program: Program, name: str) -> Program:
    """The program with this objective, root or habit, if one is named."""
    if name in OBJECTIVES:
        return fitted(replace(program, objective=name))
    if name in ROOTS:
        return fitted(replace(program, root=tuple(sorted({*program.root, name}))))
    return fitted(replace(program, habits=tuple(dict.fromkeys((*program.habits, name))))) if name else program


def each_part() -> list[Program]:
    """Small programs with one odd part each: every row of every table. Their seeds count on from 1,000,000."""
    found = [Program(0, (Block(kind), Block())) for kind in KINDS]
    found += [Program(0, (Block("own", exit=name, frozen=f), Block())) for name in EXITS for f in (False, True)]
    found += [Program(0, (Block("own", late=name, frozen=f), Block())) for name in LATE for f in (False, True)]
    found += [Program(0, (Block("own", aux=name, frozen=f), Block())) for name in AUX for f in (False, True)]
    found += [Program(0, (Block("own", call=name), Block())) for name in CALLS]
    found += [Program(0, (Block(), Block(numbered=False)), objective=name) for name in OBJECTIVES]
    found += [
        Program(0, (Block(), Block(numbered=False)), habits=(name,), adapter="lora" if habit.needs == "adapter" else "")
        for name, habit in HABITS.items()
    ]
    found += [Program(0, (Block(kind), Block()), habits=(f"anew from {order}",)) for kind in KEPT for order in ORDERS]
    found += [Program(0, (Block(), Block("norm")), adapter=name, habits=("adapter_merged",)) for name in ADAPTERS]
    found += [Program(0, (Block(),), schedule=name, adam=adam) for name in SCHEDULES for adam in ("whole", "converted")]
    found += [Program(0, (Block(), Block("own")), root=(name,)) for name in ROOTS]
    found += [Program(0, (Block(),), root_exit=name) for name in ROOT_EXITS]
    found += [Program(0, (Block(),), adam=name, habits=("clip",)) for name in ADAMS]
    return [replace(fitted(program), seed=FIRST_PART + number) for number, program in enumerate(found)]


FIRST_PART = 1_000_000


@cache
def program_of(seed: int) -> Program:
    """Of a seed: what is drawn from it, or the part that it counts."""
    return draw(seed) if seed < FIRST_PART else each_part()[seed - FIRST_PART]
