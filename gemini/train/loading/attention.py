"""Which attention a transformers model is built with: what the user says, else FlashAttention where it can run.

transformers takes the name of an implementation (``attn_implementation``) when it builds a model. For whoever builds
one here (``from_config``, ``from_pretrained``, the jobs) :class:`Attention` gives that keyword, or none where
transformers is to choose, which then is torch's ``scaled_dot_product_attention`` for the models that have it. Another
implementation gives other bits; and FlashAttention is never chosen while ``torch.use_deterministic_algorithms(True)``
holds, because its backward adds up in any order unless told not to (``deterministic`` in flash-attention's
``flash_attn/flash_attn_interface.py``; transformers tells it so where ``FLASH_ATTENTION_DETERMINISTIC=1``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gemini.errors import warn
from gemini.memory.devices.device import torch_device_of

AUTO = "auto"
FLASH = "flash_attention_2"

MOST_WIDTH = 256
"""The widest head that FlashAttention 2 has kernels for (its README)."""

_INSTALL = "pip install '.[flash]' (flash-attn, which needs a CUDA toolkit to build)"
_NEWER = re.compile(r"flash_attention_\d+")


class Conditions(NamedTuple):
    """The conditions that FlashAttention depends on."""

    cuda: bool
    """The model computes on a CUDA device of compute capability 8.0 or newer."""
    half: bool
    """It computes in bf16 or fp16."""
    package: bool
    """``flash_attn`` can be imported."""
    hub: bool
    """The ``kernels`` package is there, with which transformers fetches kernels from the Hub instead."""
    supported: bool
    """The model class has FlashAttention 2, and its heads are not too wide."""
    deterministic: bool
    """The user wants the same bits from every run, and FlashAttention was not told so."""


def choose(requested: str | None, stored: str | None, has: Conditions) -> str | None:
    """The implementation to ask transformers for, or None to ask for nothing.

    Args:
        requested: what the user says; None and "auto" say nothing.
        stored: what the model's config says, where it says something.

    Raises:
        ValueError: for FlashAttention where it cannot run, with what to do.
    """
    # What the user or the config names is taken as it is, or refused: never replaced by something else.
    if requested not in (None, AUTO):
        _refuse_impossible(requested, "", has)
        return requested
    if stored is not None:
        _refuse_impossible(stored, "the config's ", has)
        return None
    fits = has.cuda and has.half and has.package and has.supported and not has.deterministic
    return FLASH if fits else None


def _refuse_impossible(asked: str, whose: str, has: Conditions) -> None:
    # Only the names of FlashAttention: transformers judges all others itself.
    if not _NEWER.fullmatch(asked):
        return
    said = f"{whose}attn_implementation={asked!r}"
    otherwise = "Leave it out (torch's scaled_dot_product_attention, which has flash kernels of its own)"
    if asked == FLASH and not has.package and not has.hub:
        raise ValueError(f"{said} needs the package flash_attn, which cannot be imported. {otherwise}, or {_INSTALL}")
    if not has.cuda:
        raise ValueError(
            f"{said} runs on CUDA devices of compute capability 8.0 or newer only, and this model computes elsewhere. "
            f"{otherwise}, or say device='cuda'"
        )
    if not has.half:
        raise ValueError(f"{said} computes in bf16 and fp16 only, and precision is fp32. {otherwise}")


@dataclass(frozen=True)
class Attention:
    """The attention that a user asks for, with what it depends on.

    Args:
        requested: ``attn_implementation``: a name, "auto" or None (which say nothing), or a dict by sub-config.
        precision, device: as in :class:`gemini.GeminiConfig`.
    """

    requested: Any = None
    precision: str = "bf16"
    device: Any = None

    @property
    def is_open(self) -> bool:
        """Whether the user leaves the choice."""
        return self.requested in (None, AUTO)

    def keyword(self, hf_config: Any, model_class: Any) -> dict[str, Any]:
        """``{"attn_implementation": ...}`` for a model class (or auto class) and its config, or nothing.

        Raises:
            ValueError: for FlashAttention where it cannot run, with what to do.
        """
        has = conditions(hf_config, model_class, self.precision, self.device)
        if isinstance(self.requested, dict):
            # Looked at one by one; the dict itself is transformers' to deal out.
            for name in self.requested.values():
                choose(name, None, has)
            return {"attn_implementation": self.requested}
        chosen = choose(self.requested, stored_in(hf_config), has)
        return {} if chosen is None else {"attn_implementation": chosen}

    @contextlib.contextmanager
    def refused_by_transformers(self, hf_config: Any) -> Iterator[None]:
        """Turn what transformers cannot do (an old package, one for other GPUs) into an error about the user's value.

        Raises:
            ValueError: instead of ``ImportError``, where FlashAttention was asked for.
        """
        try:
            yield
        except ImportError as e:
            asked = stored_in(hf_config) if self.is_open else self.requested
            if "flash" not in str(asked):
                raise
            raise ValueError(
                f"attn_implementation={asked!r}: {e} Leave it out for torch's scaled_dot_product_attention"
            ) from e


def conditions(hf_config: Any, model_class: Any, precision: str, device: Any) -> Conditions:
    """Find out what there is of what FlashAttention needs."""
    told = os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") == "1"
    return Conditions(
        cuda=_computes_on_cuda(device),
        half=precision in ("bf16", "fp16"),
        package=has_package(),
        hub=importlib.util.find_spec("kernels") is not None,
        # Of models made of several (text and vision) some parts may lack it: there the user has to ask.
        supported=supports_flash(model_class, hf_config) and not getattr(hf_config, "sub_configs", None),
        deterministic=torch.are_deterministic_algorithms_enabled() and not told,
    )


def stored_in(hf_config: Any) -> str | None:
    """The attention that a config, or one of its parts, names; None if none does."""
    found = getattr(hf_config, "_attn_implementation", None)
    for key in getattr(hf_config, "sub_configs", None) or ():
        found = found or getattr(getattr(hf_config, key, None), "_attn_implementation", None)
    return found


def has_package() -> bool:
    """Whether ``flash_attn`` is there, and works: one that was built for another torch fails when it is imported."""
    try:
        if importlib.util.find_spec("flash_attn") is None:
            return False
        # Imported, not only found: its binary fits one version of torch.
        importlib.import_module("flash_attn")
    except Exception as e:
        warn(f"flash_attn is installed and cannot be imported ({e}): attention is torch's own")
        return False
    return True


def without_package(hf_config: Any) -> None:
    """Let a config mean FlashAttention's kernels as torch has them: what can be traced where there is no GPU."""
    parts = [getattr(hf_config, key, None) for key in getattr(hf_config, "sub_configs", None) or ()]
    for part in (hf_config, *parts):
        if part is not None and getattr(part, "_attn_implementation", None) == FLASH:
            # Past the setter, which would ask for the package.
            part._attn_implementation_internal = "sdpa"


def _computes_on_cuda(device: Any) -> bool:
    if not torch.cuda.is_available():
        return False
    # What GeminiDDP takes where the user says nothing and CUDA is there.
    try:
        where = torch_device_of("cuda" if device is None else device)
    except RuntimeError:  # no device: GeminiDDP will say so
        return False
    return where.type == "cuda" and torch.cuda.get_device_capability(where) >= (8, 0)


def supports_flash(model_class: Any, hf_config: Any) -> bool:
    """Whether a model class (or auto class) of transformers has FlashAttention 2, for heads as wide as the config's."""
    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is not None:
        # Of an auto class, which builds the first where a config has several.
        found = mapping[type(hf_config)] if type(hf_config) in mapping else None
        model_class = found[0] if isinstance(found, (tuple, list)) else found
    only = getattr(model_class, "_compatible_flash_implementations", None)
    if not getattr(model_class, "_supports_flash_attn", False) or (only is not None and FLASH not in only):
        return False
    width = getattr(hf_config, "head_dim", None)
    hidden, heads = getattr(hf_config, "hidden_size", None), getattr(hf_config, "num_attention_heads", None)
    if width is None and isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads
    return not isinstance(width, int) or width <= MOST_WIDTH
