"""Whatever of other packages Gemini changes for the whole process: what, and why there is no other way.

Nothing here does anything to a model, a param or an optimizer that is not managed. What stays is installed by
:func:`patch` and :func:`register` alone, so these tables are the whole list: a test compares them with what a process
has after a run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any

from gemini.errors import GeminiError

PATCHES = {
    "torch.nn.Parameter.data": (
        "torch counts no writes to param.data. While modules compute, a managed param is an ordinary nn.Parameter, and "
        "such a write would leave its master as it was"
    ),
    "torch.autograd.backward": (
        "a backward that runs out of memory has left a part of its gradients, and nobody else tells of it: the models "
        "whose backward it was see to it that no step uses that part. Errors stay torch's"
    ),
    "torch.autograd.graph.disable_saved_tensors_hooks": (
        "inside a module whose weights move torch.func would raise torch's words about saved-tensor hooks, which no "
        "user has opened: ours say what to do"
    ),
    "bitsandbytes.autograd._functions.MatMul4Bit": (
        "the library keeps 4-bit codes on its context, where no saved-tensor hook sees them; with save_for_backward "
        "they come back for backward. The same code computes the same bits"
    ),
}
"""What is another object now, from the time when it is first needed."""

HOOKS = {
    "torch.nn.modules.module.register_module_parameter_registration_hook": (
        "counts, so that params that came into a managed model after it was wrapped are found"
    ),
    "torch.nn.modules.module.register_module_module_registration_hook": (
        "the same for modules; torch.compile(module) and PEFT around a managed model are refused before they change it"
    ),
    "torch.optim.optimizer.register_optimizer_step_pre_hook": (
        "torch's optimizers would find no gradient on managed params, and do nothing without a word"
    ),
    "torch._dynamo.trace_rules.add": "our hooks inside of code that others compile run as they are",
    "atexit.register": "threads of ours end before the interpreter goes",
    "os.register_at_fork": "a forked child has neither memory nor threads of a model: each use of it is refused there",
}
"""Where somebody tells us of what happens in the process."""


def patch(place: str, value: Any) -> None:
    """Put ``value`` at a place of :data:`PATCHES`, for good."""
    assert place in PATCHES, f"{place} is not in the table"
    owner, _, name = place.rpartition(".")
    setattr(resolve_name(owner), name, value)


def register(place: str, function: Any, argument: str = "") -> Any:
    """Give ``function`` to one of :data:`HOOKS`, as ``argument`` of it; returns it, so that this decorates too."""
    assert place in HOOKS, f"{place} is not in the table"
    resolve_name(place)(*(() if argument else (function,)), **({argument: function} if argument else {}))
    return function


@contextmanager
def sums_in_fp16(on: bool = True) -> Iterator[None]:
    """Let cuBLAS sum products in fp16 inside the block, or without ``on`` let no other block do it: torch's switch is
    one for the whole process. Raises GeminiError inside of a block that needs it otherwise.
    """
    switches, name = resolve_name("torch.backends.cuda.matmul"), "allow_fp16_accumulation"
    if any(other is not on for other, _ in _sums):
        raise GeminiError(
            f"this model in fp16 has fp16_accumulation={on}, and another one that is managed has {not on}: it is one "
            "switch for the whole process. Say the same for both, or let the other one go (gemini.release)"
        )
    _sums.append((on, getattr(switches, name)))
    try:
        if on:
            setattr(switches, name, True)
        yield
    finally:
        # Whichever block ends first: it was on before all but the first one. At the end of the interpreter this module
        # may be gone, and nobody computes any more.
        if _sums:
            _, before = _sums.pop()
            if on:
                setattr(switches, name, before)


_sums: list[tuple[bool, bool]] = []  # by block: what it needs, and how the switch was before


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let ``owner`` have another attribute inside the block: an object of one thread, no module and no class."""
    own = vars(owner)
    # An inherited attribute is not set on the owner afterwards.
    before, was_own = own.get(name), name in own
    try:
        setattr(owner, name, value)
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        elif name in own:
            delattr(owner, name)


@contextmanager
def replaced_for_thread(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a function of a module or a class be another one inside the block, for calls of this thread. Those of other
    threads stay as they are, and each may have its own, whichever ends first. What ``function`` needs of the one that
    it replaces it takes from :func:`original`: the attribute may be another thread's.
    """
    place, entry = (owner, name), (threading.get_ident(), function)
    try:
        with _lock:
            if place not in _by_thread:
                _by_thread[place] = _ByThread(owner, name)
            _by_thread[place].entries += (entry,)
        yield
    finally:
        with _lock:
            if (found := _by_thread.get(place)) is not None:
                found.entries = tuple(other for other in found.entries if other is not entry)
                if not found.entries:
                    _by_thread.pop(place).put.close()


def original(owner: Any, name: str) -> Any:
    """The attribute of a module or a class where no thread has replaced it."""
    with _lock:
        found = _by_thread.get((owner, name))
        return getattr(owner, name, None) if found is None else found.before


class _ByThread:
    """A function of which some threads have another one."""

    def __init__(self, owner: Any, name: str):
        self.before, self.put = getattr(owner, name), ExitStack()
        self.entries: tuple[tuple[int, Callable[..., Any]], ...] = ()  # never changed in place: all threads read it

        def called(*args: Any, **kwargs: Any) -> Any:
            # The last entry of a thread is the one that it has.
            return dict(self.entries).get(threading.get_ident(), self.before)(*args, **kwargs)

        is_static = isinstance(vars(owner).get(name), staticmethod)
        self.put.enter_context(replaced(owner, name, staticmethod(called) if is_static else called))


_by_thread: dict[tuple[Any, str], _ByThread] = {}
_lock = threading.RLock()


class Overrides:
    """Attributes that objects are given of their own, in front of those of their classes, until they are taken away."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, dict[str, Any]]] = []

    def _put(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        # Noted first: an interrupt in between leaves what can be taken away.
        self._before.append((own, name, {name: own[name]} if name in own else {}))
        own[name] = value

    def take_away(self) -> None:
        """Let objects have what they had: what a class has shows again."""
        while self._before:
            # In reverse: an attribute may have been put twice.
            own, name, before = self._before.pop()
            own.pop(name, None)
            own.update(before)
