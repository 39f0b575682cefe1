"""Ctrl-C at every moment of an operation at which it can come, one after the other.

A :class:`Moment` is an instruction of Python, in a file of Gemini or of what it stands on (``threading``,
``contextlib``, torch's module call), and the how-manieth time that it is run. :func:`moments_of` runs an
operation and finds them all; :func:`interrupt_at` runs it again, with SIGINT right before one. Python takes a signal
after a call, where a function begins and where a loop goes back, and not between other instructions; so the signal is
sent from a trace function, out of C that is called by no call instruction, and is taken wherever Python itself would
take it next. To raise in the trace function instead would interrupt where no signal can: between ``with`` and its
block, for one.
"""

import _thread
import dis
import faulthandler
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import gemini

_GEMINI = str(Path(gemini.__file__).parent)
_BESIDE = (
    "/threading.py",
    "/contextlib.py",
    "/queue.py",
    "/concurrent/futures/thread.py",
    "/torch/nn/modules/module.py",
)

HANG_SECONDS = 60.0

SILENT = frozenset({
    "LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST", "PUSH_NULL", "PRECALL",
    "KW_NAMES", "COPY", "SWAP", "NOP", "IS_OP", "MAKE_FUNCTION", "MAKE_CELL", "COPY_FREE_VARS", "BUILD_TUPLE",
    "BUILD_LIST", "JUMP_FORWARD", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "RETURN_VALUE",
})  # fmt: skip
"""Instructions that Python takes no signal in, nor after: one that is sent before them is taken where one is that is
sent before the instruction that follows."""


class Moment(NamedTuple):
    code: CodeType
    offset: int
    occurrence: int

    def __str__(self) -> str:
        lines = [line for start, stop, line in self.code.co_lines() if start <= self.offset < stop]
        where = f"{Path(self.code.co_filename).name}:{lines[0] if lines else '?'} {self.code.co_qualname}"
        return f"{where} +{self.offset} ({self.occurrence}.)"


class Hang(BaseException):
    """What an operation stands in is in its traceback."""


def _is_looked_at(code: CodeType) -> bool:
    name = code.co_filename
    return name.startswith(_GEMINI) or name.endswith(_BESIDE)


def moments_of(operation: Callable[[], Any], *, silent: bool = False, everywhere: bool = False) -> list[Moment]:
    """Each instruction that the training thread runs, at its first and at its last time, in the order of the first.

    ``silent``: also those that make no difference. ``everywhere``: in files of tests too.
    """
    counts: Counter[tuple[CodeType, int]] = Counter()

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            counts[frame.f_code, frame.f_lasti] += 1
        return local

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if not (_is_looked_at(frame.f_code) or (everywhere and "/tests/" in frame.f_code.co_filename)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    sys.settrace(begin)
    try:
        operation()
    finally:
        sys.settrace(None)
    return [
        Moment(code, offset, number)
        for (code, offset), count in counts.items()
        if silent or dis.opname[code.co_code[offset]] not in SILENT
        for number in ([1, count] if count > 1 else [1])
    ]


def interrupt_at(moment: Moment, operation: Callable[[], Any]) -> bool:
    """Run it with Ctrl-C at that moment, which raises KeyboardInterrupt where it takes effect: whether it was sent."""
    num_times, was_sent = 0, False

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_times, was_sent
        if event == "opcode" and frame.f_lasti == moment.offset:
            num_times += 1
            if num_times == moment.occurrence:
                sys.settrace(None)
                was_sent = True
                (_,) = map(_thread.interrupt_main, (signal.SIGINT,))  # the last: no call follows in this function
        return local

    def begin(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code is not moment.code:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    sys.settrace(begin)
    try:
        operation()
    finally:
        sys.settrace(None)
    return was_sent


@contextmanager
def no_hang(seconds: float = HANG_SECONDS) -> Iterator[None]:
    """Fail, saying where all threads stand, instead of waiting for ever."""

    def fail(number: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback()
        raise Hang(f"it stood still for {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds, 2.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def locks_of(root: object) -> list[tuple[str, Any]]:
    """The locks that objects of Gemini have, from one of them on, with the names of who has them."""
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (_thread.LockType, _thread.RLock)):
            found.append((name, value))
        elif isinstance(value, dict):
            todo += [(name, inner) for inner in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += [(name, inner) for inner in value]
        elif type(value).__module__.startswith("gemini."):
            parts = dict(getattr(value, "__dict__", {}))
            for kind in type(value).__mro__:
                for slot in vars(kind).get("__slots__", ()):
                    if isinstance(slot, str) and hasattr(value, slot):
                        parts[slot] = getattr(value, slot)
            todo += [(f"{type(value).__name__}.{key}", inner) for key, inner in parts.items()]
    return found


def held_locks(locks: list[tuple[str, Any]], seconds: float = 5.0) -> list[str]:
    """Which of these another thread cannot take."""
    held: list[str] = []

    def take() -> None:
        for name, lock in locks:
            if lock.acquire(timeout=seconds):
                lock.release()
            else:
                held.append(name)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return held
