"""Ranks leave a model together, before any of them waits in a collective that is not Gemini's.

A rank that waits in a collective of accelerate, of TRL or of the program serves nobody, and the others may still need
its shards: they generate longer answers, or have let go of other weights meanwhile. So who comes to such a collective
first waits, in the model that it has used last and serving it, until all ranks have ended there; and so does who goes
on to another model, in which again others may need it. In a step whose collectives follow a script nobody needs
anything that is not in it, and nobody waits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from gemini.patches import original, replaced_for_thread
from gemini.ranks.agree import Point

_FUNCTIONS = ("gather", "gather_object")
"""What modules of TRL's import from ``accelerate.utils`` and call without an accelerator."""


class Turns:
    """Which of the models that are watched this rank has used last, until all ranks have left it. For the thread that
    trains.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[nn.Module] | None = None

    def watch(self, model: nn.Module) -> None:
        """Note each use of a managed model from here on, if others have shards of it."""
        engine = model.__dict__["_gemini_engine"]
        if not engine.shards.divides or any(getattr(hook, "func", None) == self._enter for hook in _hooks(model)):
            return
        enter = partial(self._enter, weakref.ref(model))
        # PEFT generates by the model inside, and not by what is around it.
        for part in {model, getattr(model, "get_base_model", lambda: model)()}:
            part.register_forward_pre_hook(enter, prepend=True)

    def _enter(self, model: weakref.ref[nn.Module], module: nn.Module, args: Any) -> None:
        if self._last is not model:
            self.leave()
        self._last = model

    @contextmanager
    def before_functions_of(self, kind: type) -> Iterator[None]:
        """Inside, accelerate's functions wait as its methods do where modules of ``kind`` and its bases call them, for
        this thread alone.
        """
        from accelerate import utils  # not there for Lightning

        with ExitStack() as stack:
            for name in {base.__module__ for base in kind.__mro__}:
                module = sys.modules.get(name)
                for function in _FUNCTIONS:
                    if original(module, function) is (own := getattr(utils, function)):
                        stack.enter_context(replaced_for_thread(module, function, partial(self._after_all, own)))
            yield

    def _after_all(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.leave()
        return function(*args, **kwargs)

    def leave(self) -> None:
        """Wait until all ranks have ended what they do in the model that this one has used last.

        Raises:
            RankMismatch: if another rank makes a step or a checkpoint meanwhile.
            RankLost: if a rank does not answer.
        """
        last, self._last = self._last, None
        model = None if last is None else last()
        engine = None if model is None else model.__dict__.get("_gemini_engine")
        if engine is not None and engine.shards.step is None:
            engine.shards.agree(Point.LEAVE, "a collective of the program")


def _hooks(model: nn.Module) -> list[Any]:
    return list(model._forward_pre_hooks.values())
