"""The class of a managed model: its own and ``GeminiDDP`` in one, with what only models of transformers have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partialmethod
from typing import Any

from torch import nn

from gemini.train.adapters import faces_of


@cache
def managed_class(original: type[nn.Module], face: type[nn.Module]) -> type[nn.Module]:
    """The class that is both ``original`` and ``face``; one per original class, with its name: configs and reprs do not
    change.
    """
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_gemini_original": original,
    }
    if not hasattr(original, "save_pretrained"):
        namespace["save_pretrained"] = _no_save_pretrained
    if not hasattr(original, "resize_token_embeddings"):
        namespace["resize_token_embeddings"] = property(_no_such_method)
    if not hasattr(original, "device"):
        namespace["device"] = _OfEngine()
    first = (*faces_of(original), face)
    if nn.Module in _laid_out_as(original):
        return type(original.__name__, (*first, original), namespace)
    # Python changes the class of an object to one of the same layout only, and a class has that of its first base. A
    # class whose own first base is not nn.Module (ABC, Generic[T], a mixin with __slots__) has a layout of its own: it
    # comes first among the bases, and behind ours in the order in which methods are looked for.
    order = {"mro": partialmethod(_ours_first, original)}
    kind: Any = type(f"Managed{type(original).__name__}", (type(original),), order)
    return kind(original.__name__, (original, *first), namespace)


def _laid_out_as(kind: type | None) -> Iterator[type]:
    """The classes whose layout in memory a class has, or has more fields than."""
    while kind is not None:
        yield kind
        kind = kind.__base__


def _ours_first(cls: type, original: type) -> list[type]:
    theirs = original.__mro__
    return [*(kind for kind in type.mro(cls) if kind not in theirs), *theirs]


class _OfEngine:
    """``model.device``, where batches go, for models that have none. One that a model sets itself stays its own."""

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else model.__dict__["_gemini_engine"].store.device.torch_device


def _no_save_pretrained(self: Any, save_directory: Any, **kwargs: Any) -> None:
    raise AttributeError(
        f"{type(self).__name__} is not a transformers model: save it with torch.save(model.state_dict(), file) or "
        "gemini.save_checkpoint(dir, model, optimizer)"
    )


def _no_such_method(self: Any) -> None:
    raise AttributeError("resize_token_embeddings")
