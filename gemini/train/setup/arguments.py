"""What people mean when they call a function of the face with something else: said in the error, with what to write."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from gemini.errors import GeminiError, StorageError
from gemini.train.params.guard import tensors_in

_LOOPS = {
    "transformers.trainer": (
        "transformers' Trainer",
        "use gemini.integrations.huggingface.GeminiTrainer in its place (for a subclass such as TRL's put "
        "GeminiTrainerMixin before it), with the model managed or not",
    ),
    "lightning.pytorch.strategies.": (
        "Lightning's Trainer",
        'import gemini.integrations.lightning and write Trainer(strategy="gemini")',
    ),
    "pytorch_lightning.strategies.": (
        "the Trainer of pytorch_lightning",
        'import gemini.integrations.lightning and write lightning.Trainer(strategy="gemini")',
    ),
    "lightning.fabric.": ("Lightning Fabric", "write the loop without it, as Gemini's quickstart has it"),
    "accelerate.accelerator": (
        "accelerate's Accelerator",
        "use gemini.integrations.accelerate.GeminiAccelerator in its place",
    ),
}
"""Whose loops move a model to its device before they train it: by module, and what to use in their place."""
_ON_THE_WAY = ("torch.", "gemini.", "transformers.modeling_utils", "lightning.fabric.utilities.device_dtype_mixin")
"""Modules of the calls between such a loop and the model."""


def refuse_stock_loop() -> None:
    """Refuse the loop of a framework whose bridge is not used, where it moves a managed model to its device: it would
    look for gradients and masters where there are none. Somebody else may move the model to where it is.

    Raises:
        GeminiError: naming the bridge.
    """
    modules = list(_modules_that_call())
    nearest = next((module for module in modules if not module.startswith(_ON_THE_WAY)), "")
    # Only who calls directly counts: a program inside such a loop may move the model itself.
    if not nearest.startswith(tuple(_LOOPS)):
        return
    who, instead = next(told for known, told in _LOOPS.items() if any(module.startswith(known) for module in modules))
    raise GeminiError(f"this model is managed by Gemini, and {who} cannot train it by itself: {instead}")


def _modules_that_call() -> Iterator[str]:
    # Above this generator and the function that asks.
    frame = sys._getframe(2)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back  # type: ignore[assignment]


def refuse_wrong_device(error: BaseException, device: torch.device, batch: Any) -> None:
    """Say that the batch was somewhere else, if that is what ``error`` of a forward on ``device`` is about. Not asked
    before a forward: some inputs belong elsewhere (lengths for a packed sequence), and some models move theirs.

    Raises:
        GeminiError: from ``error``.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, (GeminiError, torch.OutOfMemoryError)):
        return
    elsewhere = sorted({str(tensor.device) for tensor in tensors_in(batch) if tensor.device != device})
    # torch's words for tensors on two devices, of operations and of convolutions.
    if elsewhere and ("device" in str(error) or "weight type" in str(error)):
        raise GeminiError(
            f"the model computes on {device}, and it was called with tensors on {', '.join(elsewhere)}. Move each "
            "batch there: batch = {name: value.to(model.device) for name, value in batch.items()}"
        ) from error


def need_transformers(what: str) -> None:
    """Say which optional part of Gemini ``what`` needs.

    Raises:
        ImportError: if it is not installed.
    """
    try:
        import_module("transformers")
    except ModuleNotFoundError as e:
        if e.name != "transformers":
            raise
        raise ImportError(
            f"{what} needs transformers 5.0 or newer, the extra 'hf' of Gemini: pip install 'transformers>=5.0'",
            name="transformers",
        ) from e


@contextlib.contextmanager
def naming_files(path: Any) -> Iterator[None]:
    """Name a file that is damaged and a folder that is not there, around what reads a model folder.

    Raises:
        StorageError: for a damaged file.
        OSError: for a folder that is neither here nor on a hub.
    """
    folder = Path(path).expanduser()
    try:
        yield
    except OSError as e:
        if folder.exists() or isinstance(e, StorageError):
            raise
        first = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise OSError(
            f"{path}: there is no such folder (looked for in {Path.cwd()}), and a model of that name could not be got "
            f"from a hub: {first}"
        ) from e
    except StorageError:
        raise
    except Exception as e:
        # Looked for only now: opening every file costs time.
        damaged = _damaged(folder)
        if damaged is None:
            raise
        raise damaged_file(*damaged) from e


def damaged_file(file: Path | str, why: Exception) -> StorageError:
    """The error for a file of weights that cannot be read."""
    return StorageError(
        f"{file} cannot be read: {' '.join(str(why).split())[:200] or type(why).__name__}. The file is damaged or was "
        "not copied to its end: get it again (the other files of the model may be good)"
    )


def _damaged(folder: Path) -> tuple[Path, Exception] | None:
    """The first file of weights in a folder that cannot be opened."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as e:
            return file, e
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            torch.load(file, map_location="meta", weights_only=True, mmap=True)
        except Exception as e:
            return file, e
    return None
