"""``gemini.from_pretrained``: weights of a transformers model straight from safetensors into chunks at their homes.

transformers does what it knows (which class, which files, renamed keys, fused experts, ties, dtypes, the report of
missing and unexpected keys), and Gemini what it knows (where each param lives). Its ``from_pretrained`` runs with two
of its internal steps replaced: the files are loaded as meta tensors, which settles names, shapes and ties without a
byte of weights; then the chunks are placed, and the files are read a second time, one param at a time, into them
(:class:`~gemini.train.loading.stored_model.StoredModel`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gemini.config import GeminiConfig, config_of
from gemini.errors import GeminiError, StorageError
from gemini.patches import replaced
from gemini.train.loading.skeleton import Skeleton, attention_keyword, class_of, generators_kept, need_transformers
from gemini.train.loading.stored_model import (
    LOCK,
    Made,
    StoredFiles,
    StoredModel,
    internal_step,
    noting_how,
    open_tensors,
    without_progress,
)
from gemini.train.modules.codes import WHAT_WORKS


def from_pretrained(
    path: str | os.PathLike[str],
    config: GeminiConfig | None = None,
    *,
    model_class: Any = None,
    adapt: Callable[[Any], Any] | None = None,
    attn_implementation: Any = None,
    process_group: Any = None,
    mesh: Any = None,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a transformers model from a folder into a managed model. Its weights are streamed into their home tiers.

    Whatever the size of the model, host memory needs only one param at a time beside its budget (all experts of a layer
    together, where transformers fuses them); with ``tp`` and ``ep`` only this rank's slice of it. As in transformers,
    the dtype is that of the files unless you give ``dtype=``, missing and unexpected keys are reported, missing params
    are initialized, and the model is in ``eval()`` mode.

    Args:
        path: a transformers folder with safetensors, in one file or with an index; or a name that transformers finds.
        config: the settings, as for :class:`gemini.GeminiDDP`.
        model_class: a model class or an auto class of transformers. By default the class in ``config.json``.
        adapt: a function that changes the model before it is placed and returns it (or nothing, if it changes it in
            place), for example ``lambda model: peft.get_peft_model(model, lora_config)``. A weight that it reads or
            writes is read from the files at that moment. One that is changed stays in host memory, beside the budget,
            until the model is placed, one that is only read as long as there is room; all others go to their homes as
            without it.
        attn_implementation: "eager", "sdpa", "flash_attention_2", ..., as in :func:`from_config`.
        process_group, mesh: as for :class:`gemini.GeminiDDP`. Every rank reads the files and keeps its part. With
            ``tp`` and ``ep`` it reads only its slices.
        output_loading_info: return ``(model, info)``, where ``info`` has the missing, unexpected and mismatched keys.
        **kwargs: passed to ``from_pretrained`` of the model class, for example ``dtype=`` or ``key_mapping=``.

    Raises:
        BudgetExceeded: if the model does not fit, before a weight is read.
        ImportError: from transformers, if FlashAttention is asked for and cannot run.
        OSError: as transformers, if ``path`` is not a model.
        StorageError: if a file is damaged; the message names it.
        TypeError: if ``adapt`` returns something that is no module.
        ValueError: for what cannot be streamed: quantized models, adapters, ``device_map=``, ``state_dict=``. Also if
            ``adapt`` makes a model that cannot be managed.
    """
    need_transformers("gemini.from_pretrained")
    config = config_of(config).resolved()
    kwargs |= attention_keyword(attn_implementation)
    skeleton, info = skeleton_from_pretrained(path, model_class=model_class, adapt=adapt, **kwargs)
    model = skeleton.manage(config, process_group=process_group, mesh=mesh)
    return (model, info) if output_loading_info else model


def skeleton_from_pretrained(
    path: str | os.PathLike[str], *, model_class: Any = None, adapt: Callable[[Any], Any] | None = None, **kwargs: Any
) -> tuple[Skeleton, dict[str, Any]]:
    """Make what :func:`from_pretrained` makes before it places anything, with the report of keys."""
    _refuse(path, kwargs)
    with _naming_files(path):
        hf_config = _read_config(path, model_class, kwargs)
    if model_class is None:
        model_class = class_of(hf_config)
    # transformers runs as ever; only the two steps that touch values are ours.
    with _naming_files(path), _on_meta_tensors() as sources:
        model, info = model_class.from_pretrained(path, output_loading_info=True, **kwargs)
    # It took a way that does not pass through the replaced steps.
    if not sources:
        raise GeminiError(
            f"transformers loaded {path} in a way that does not stream: load it with {model_class.__name__}."
            "from_pretrained(...) and wrap it with GeminiDDP(model, config)"
        )
    skeleton = StoredModel(model, sources[-1])
    if adapt is not None:
        skeleton.adapt(adapt)
    return skeleton, info


@contextlib.contextmanager
def _on_meta_tensors() -> Iterator[list[StoredFiles]]:
    """Within: transformers loads shapes instead of values; of what, is in the list then. Raises GeminiError if this
    version of transformers has no such steps.
    """
    from transformers import modeling_utils

    base = modeling_utils.PreTrainedModel
    finalize = internal_step(base, "_finalize_model_loading")
    convert = internal_step(modeling_utils, "convert_and_load_state_dict_in_model")
    sources: list[StoredFiles] = []

    def load(model: Any, state_dict: Any, files: Any, settings: Any, *_: Any, **__: Any) -> Any:
        if settings.hf_quantizer is not None:
            raise ValueError(
                "gemini.from_pretrained streams files in float32, bfloat16 or float16, and these are quantized: "
                "load the model with transformers and wrap it with GeminiDDP(model, config); " + WHAT_WORKS
            )
        # Copies: transformers notes in the mapping what it has matched, and the files are read again later.
        on_meta = replace(settings, device_map={"": "meta"}, weight_mapping=deepcopy(settings.weight_mapping))
        shapes, file_of = {}, {}
        for file in files:
            for key, shape in _shapes(file).items():
                shapes[key], file_of[key] = shape, file
        made: dict[str, Made] = {}
        with without_progress(), noting_how(made, shapes):
            found, _ = convert(model, shapes, on_meta)
        sources.append(StoredFiles(files, file_of, settings, frozenset(found.missing_and_mismatched()), made))
        # Before transformers ties: it compares values, which are not here.
        _tie_equal(model, file_of, found)
        return found, None

    def finish(model: Any, settings: Any, found: Any) -> Any:
        with generators_kept():  # some initializations draw real numbers for meta tensors
            return finalize(model, replace(settings, device_map={"": "meta"}), found)

    with (
        LOCK,
        replaced(base, "_load_pretrained_model", staticmethod(load)),
        replaced(base, "_finalize_model_loading", staticmethod(finish)),
    ):
        yield sources


def _refuse(path: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("quantization_config") is not None:
        raise ValueError(
            "gemini.from_pretrained(quantization_config=) is not possible. transformers quantizes one param after the "
            "other while it loads, so that host memory takes the codes alone: model = AutoModelForCausalLM."
            'from_pretrained(path, quantization_config=..., device_map="cpu"), then GeminiDDP(get_peft_model(model, '
            "...), config); " + WHAT_WORKS
        )
    for name in ("device_map", "state_dict", "tp_plan", "distributed_config", "gguf_file"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"gemini.from_pretrained({name}=) is not possible: weights go from the files to their homes. Leave "
                "it out, or load the model with transformers and wrap it with GeminiDDP(model, config)"
            )
    if Path(path).is_dir() and (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} is an adapter: load its base model with gemini.from_pretrained and put it on with "
            "peft.PeftModel.from_pretrained(model, path)"
        )


def _read_config(path: Any, model_class: Any, kwargs: dict[str, Any]) -> Any:
    import transformers

    given = kwargs.get("config")
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    reader = getattr(model_class, "config_class", None) or transformers.AutoConfig
    # Arguments that choose the file; all others are for the model.
    hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")
    return reader.from_pretrained(given or path, **{key: kwargs[key] for key in hub if key in kwargs})


def _shapes(file: str) -> dict[str, torch.Tensor]:
    """The tensors of one file without their values."""
    from transformers.modeling_utils import load_state_dict

    try:
        return {name: tensor.to("meta") for name, tensor in load_state_dict(file, map_location="meta").items()}
    except Exception as e:  # of many classes, and none of them names the file
        why = " ".join(str(e).split())[:200] or type(e).__name__
        raise StorageError(
            f"{file} cannot be read: {why}. The file is damaged or was not copied to its end: get it again (the other "
            "files of the model may be good)"
        ) from e


@contextlib.contextmanager
def _naming_files(path: Any) -> Iterator[None]:
    """Name the folder that is neither here nor on a hub (OSError) and the file that is damaged (StorageError), which
    errors of transformers do not.
    """
    folder = Path(path).expanduser()
    try:
        yield
    except OSError as e:
        if folder.exists():
            raise
        raise OSError(
            f"{path}: there is no such folder (looked for in {Path.cwd()}), and a model of that name could not be got "
            f"from a hub: {e}"
        ) from e
    except StorageError:
        raise
    except Exception:
        # Looked for only now: opening every file costs time.
        for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
            _shapes(str(file))
        raise


def _tie_equal(model: Any, file_of: dict[str, str], found: Any) -> None:
    """Tie params of which a checkpoint has both, if they are equal, as transformers does. It compares values, which
    meta tensors do not have; so the files are compared here. Unequal ones stay apart.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in found.missing_keys or source in found.missing_keys:
            continue
        # Taken from the ties, so that transformers keeps two params.
        if not _equal_in_files(file_of, target, source):
            model.all_tied_weights_keys.pop(target)
            continue
        owner, _, leaf = target.rpartition(".")
        setattr(model.get_submodule(owner), leaf, model.get_parameter(source))


def _equal_in_files(file_of: dict[str, str], first: str, second: str) -> bool:
    if not all(file.endswith(".safetensors") for file in file_of.values()):
        return True  # what torch.save wrote twice was one tensor
    if not {first, second} <= file_of.keys():
        return False
    with contextlib.ExitStack() as stack:
        one, other = open_tensors(file_of, [first, second], stack)
        if one.get_shape() != other.get_shape():
            return False
        if not one.get_shape():  # one number each
            return torch.equal(one[...], other[...])
        rows, step = one.get_shape()[0], 4096
        return all(torch.equal(one[at : at + step], other[at : at + step]) for at in range(0, rows, step))
