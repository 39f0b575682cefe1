"""What a kind of block is: source text for its class. The kinds are in ``program_kinds`` and ``program_modules``."""

from dataclasses import dataclass
from functools import partial
from textwrap import dedent


@dataclass(frozen=True)
class Kind:
    """Source of a block. ``own``: an expression of shape (D, D) in the block's params, "" if there is none."""

    init: str
    forward: str
    own: str = ""
    extra: str = ""
    """Definitions in front of the class."""
    methods: str = ""
    """Other methods; in them and in ``init`` ``{Block}`` is the class."""


LINEAR = "self.fc = nn.Linear(D, D)"
OWN = "self.w = nn.Parameter(torch.randn(D, D) / D)"
TANH = "y = torch.tanh(self.fc(x))"


def make_kind(init: str, forward: str, own: str = "", extra: str = "", methods: str = "") -> Kind:
    return Kind(*(dedent(text).strip() for text in (init, forward, own, extra, methods)))


def linear_kind(forward: str = TANH, *, init: str = "", extra: str = "", methods: str = "") -> Kind:
    """A block with a linear layer ``fc``; ``init``: what it has beside that."""
    return make_kind(f"{LINEAR}\n{dedent(init).strip()}", forward, "self.fc.weight", extra, methods)


def weight_kind(forward: str, *, init: str = "", extra: str = "") -> Kind:
    """A block with a weight ``w`` of its own; ``init``: what it has beside that."""
    return make_kind(f"{OWN}\n{dedent(init).strip()}", forward, "self.w", extra)


def tanh_kind(init: str, *, own: str = "self.fc.weight", extra: str = "") -> Kind:
    """A block that computes the ``tanh`` of a layer ``fc``, which ``init`` makes."""
    return make_kind(init, TANH, own, extra)


@dataclass(frozen=True)
class Habit:
    """What a loop does beside its objective. ``place``: "setup" (once), "before" the objective, "after" it (gradients
    are there), "stepped" (weights are new) or "zero" (how gradients are forgotten). ``transient``: it may stand beside
    updates that run inside backward. ``needs``: only with an "adapter", or of a model that is "averaged".
    """

    place: str
    source: str
    transient: bool = True
    needs: str = ""


EVALUATE = """model.eval()
with torch.no_grad():
    side.see("evaluation", take(model, {call}(batch(side, 70 + step))))
model.train()
"""


def _habit(place: str, source: str, *, transient: bool = True) -> Habit:
    return Habit(place, dedent(source).strip().replace("<EVALUATE>", EVALUATE.strip()), transient)


at_setup = partial(_habit, "setup")
before = partial(_habit, "before")
after = partial(_habit, "after", transient=False)
"""Updates inside backward leave no gradients to look at."""
stepped = partial(_habit, "stepped")
at_zero = partial(_habit, "zero")
