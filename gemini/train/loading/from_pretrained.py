"""``gemini.from_pretrained``: weights of a transformers model straight from safetensors into chunks at their homes.

transformers does what it knows (which class, which files, renamed keys, fused experts, ties, dtypes, the report of
missing and unexpected keys), and Gemini what it knows (where each param lives). Its ``from_pretrained`` runs with two
of its internal steps replaced: the files are loaded as meta tensors, which settles names, shapes and ties without a
byte of weights; then the chunks are placed, and the files are read a second time, one param at a time, into them.

What ``adapt`` is given has shapes, dtypes, ties and buffers, and params whose values come at the first touch: each is a
:class:`~gemini.train.loading.skeleton.PagedParameter` until then. So whatever the function does (a larger embedding,
the norms of DoRA, a copied layer, zeros) it does with the values that it would find in a loaded model, and what has
been touched is kept as it is afterwards.

Of a param of which only a slice is here (``tp``, ``ep``) no more is read. transformers has the step for it, which it
takes for params that are DTensors: what it would read of each tensor of a file is asked of us instead. Tensors in files
are mapped memory, so what of them is not copied is not read.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini.config import GeminiConfig, config_of
from gemini.errors import GeminiError, StorageError
from gemini.patches import original, replaced, replaced_for_thread
from gemini.ranks.group import Ranks
from gemini.train.checkpoint.states import generators_kept
from gemini.train.ddp import managed_class
from gemini.train.loading.skeleton import (
    Away,
    PagedParameter,
    Pager,
    Skeleton,
    attention_keyword,
    check_class,
    class_of,
    generator_of_first,
    need_transformers,
    replace_by_stand_ins,
)
from gemini.train.modules.codes import WHAT_WORKS
from gemini.train.modules.reading import Structure, own_buffers
from gemini.train.params.by_name import ByName, same_bits
from gemini.train.params.handle import ParamHandle, TensorSlice
from gemini.train.setup.wrappable import refuse_unwrappable


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
    if model_class is None:
        with _naming_files(path):
            model_class = class_of(_read_config(path, kwargs))
    check_class(model_class)
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
    """Within: transformers loads shapes instead of values on this thread; of what, is in the list then. Raises
    GeminiError if this version of transformers has no such steps.
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
        with noting_how(made, shapes):
            found, _ = convert(model, shapes, on_meta)
        sources.append(StoredFiles(files, file_of, settings, frozenset(found.missing_and_mismatched()), made))
        # Before transformers ties: it compares values, which are not here.
        _tie_equal(model, file_of, found)
        return found, None

    def finish(model: Any, settings: Any, found: Any) -> Any:
        with generators_kept():  # some initializations draw real numbers for meta tensors
            return finalize(model, replace(settings, device_map={"": "meta"}), found)

    with (
        _LOCK,
        replaced_for_thread(base, "_load_pretrained_model", load),
        replaced_for_thread(base, "_finalize_model_loading", finish),
    ):
        yield sources


def _refuse(path: Any, kwargs: dict[str, Any]) -> None:
    for name in ("quantization_config", "device_map", "state_dict", "tp_plan", "distributed_config", "gguf_file"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"gemini.from_pretrained({name}=) is not possible: weights go from the files to their homes. Leave it "
                'out, or load the model with transformers (to quantize it with device_map="cpu", so that host memory '
                "takes the codes alone) and wrap it, or get_peft_model of it, with GeminiDDP(model, config); "
                + WHAT_WORKS
            )
    if Path(path).is_dir() and (Path(path) / "adapter_config.json").is_file():
        raise ValueError(
            f"{path} is an adapter: load its base model with gemini.from_pretrained and put it on with "
            "peft.PeftModel.from_pretrained(model, path)"
        )


def _read_config(path: Any, kwargs: dict[str, Any]) -> Any:
    import transformers

    given = kwargs.get("config")
    if given is not None and not isinstance(given, (str, os.PathLike)):
        return given
    # Arguments that choose the file; all others are for the model.
    hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder", "trust_remote_code")
    return transformers.AutoConfig.from_pretrained(given or path, **{key: kwargs[key] for key in hub if key in kwargs})


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
    folder = Path(os.path.expanduser(path))
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
        return torch.equal(one[...], other[...])  # mapped memory: no copy


class Made(NamedTuple):
    """How a param comes from tensors of a checkpoint."""

    keys: tuple[str, ...]  # of all tensors that take part
    operations: tuple[Any, ...] | None
    """transformers', in their order; none for a tensor that is the param. None for one among several of one conversion,
    or of tensors of several shapes.
    """
    shape: tuple[int, ...]  # of each tensor, all of which have it
    numbers: tuple[int, ...]  # how many tensors each of the patterns that the operations begin with has found


class SliceReading(NamedTuple):
    """The part of the tensors behind one param that is read."""

    of_each: TensorSlice | None  # the slice of each tensor; None if those that are read are read whole
    some: tuple[int, int] | None  # the first that is read of those that each pattern has found, and the end

    def shard_tensor(self, tensor: Any, tensor_idx: Any = None, device: Any = None, dtype: Any = None) -> Any:
        """Read what is here of the tensor with this number, None if nothing is: transformers calls it by this name."""
        if self.some is not None and tensor_idx is not None and not self.some[0] <= tensor_idx < self.some[1]:
            return None
        # A view of mapped memory: nothing is read until it is copied.
        mapped: torch.Tensor = tensor[...]
        if self.of_each is None:
            return mapped.to(dtype)
        parts = [part.to(dtype) for part in self.of_each.views_of(mapped)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.of_each.dim)


def reading_of(cut: TensorSlice, made: Made) -> SliceReading | None:
    """How a slice is read, or None if an operation does not leave slices what they are: the whole must be read then."""
    if made.operations is None:
        return None
    dim, groups, shape, some = cut.dim, cut.groups, cut.shape, None
    # From the param back to the files: each step says which slice of its input gives that slice of its result.
    for operation in reversed(made.operations):
        kind = type(operation).__name__
        if kind == "MergeModulelist" and operation.dim == 0 and some is None:
            if dim == 0:
                # The first dim of the param counts tensors: some of them are read whole, the others not at all.
                each = shape[0] // cut.size
                some = (cut.rank * each, (cut.rank + 1) * each)
                if groups != 1 or set(made.numbers) != {shape[0]}:
                    return None
            dim, shape = dim - 1, shape[1:]
        elif kind == "Concatenate" and some is None:
            parts = len(made.numbers)
            if operation.dim == dim:
                if groups % parts:
                    return None
                # Each of the concatenated tensors has its own share of the groups.
                groups //= parts
            shape = tuple(n // parts if at == operation.dim else n for at, n in enumerate(shape))
        elif kind != "Interleave" or operation.dim == dim:
            return None
    # Something else happens in between that is not known here: the whole is read.
    if shape != made.shape:
        return None
    of_each = None if some is not None else TensorSlice(shape, dim, groups, cut.rank, cut.size)
    return SliceReading(of_each, some)


@contextlib.contextmanager
def noting_how(made: dict[str, Made], shapes: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within transformers loads tensors of ``shapes``; ``made`` is told how params come from them. No bar is shown."""
    from transformers import core_model_loading

    def noting(convert: Any) -> Any:
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers = tuple(map(len, self.collected_tensors.values()))
            keys = tuple({key: None for found in self.layer_targets.values() for key in found})
            sources = {tuple(shapes[key].shape) for key in keys}
            converted = convert(self, *args, **kwargs)
            operations = tuple(getattr(self, "operations", ())) if len(converted) == len(sources) == 1 else None
            made.update(dict.fromkeys(converted, Made(keys, operations, next(iter(sources), ()), numbers)))
            return converted

        return noted

    with contextlib.ExitStack() as stack:
        if hasattr(core_model_loading, "tqdm"):
            stack.enter_context(replaced_for_thread(core_model_loading, "tqdm", lambda each, **_: each))
        for name in ("WeightRenaming", "WeightConverter"):
            class_: Any = getattr(core_model_loading, name)
            stack.enter_context(replaced_for_thread(class_, "convert", noting(original(class_, "convert"))))
        yield


_LOCK = threading.RLock()  # a constructor that loads another model is told so by transformers
"""One load at a time: transformers sets torch's default dtype, and torch's initializations, for all threads."""

Place = Callable[[str, torch.Tensor], None]
"""What becomes of a value, given by the name of a param or a buffer."""


@dataclass
class StoredFiles:
    """A folder as transformers sees it: the files, how their keys become params, and which params they lack."""

    files: list[str]
    file_of: dict[str, str]
    settings: Any
    missing: frozenset[str]
    made: dict[str, Made]


class StoredModel(Skeleton):
    """A model whose weights are read from files; what they lack is initialized."""

    def __init__(self, model: Any, source: StoredFiles):
        self._stored = self.model = model
        self._source = source
        self._metas = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        # After the metas were kept: transformers goes by them when it reads.
        replace_by_stand_ins(model)
        self._params = dict(model.named_parameters(remove_duplicate=False))
        self._drawn = {id(self._params[name]) for name in source.missing if name in self._params}
        # A tied param of which the files have one name is not missing.
        self._drawn -= {id(param) for name, param in self._params.items() if name not in source.missing}
        self._kept: dict[int, torch.Tensor] = {}
        self._is_adapted = False
        # Buffers get memory, to be filled.
        for module in model.modules():
            module._buffers.update({name: torch.empty_like(b, device="cpu") for name, b in own_buffers(module).items()})

    def adapt(self, adapt: Callable[[Any], Any]) -> None:
        """Let a program change the model before it is placed: what ``adapt`` touches is read, and kept."""
        self._is_adapted = True
        away = _ReadAtTouch(self, self._params, self._source.missing)
        buffers = dict(self._stored.named_buffers())
        # Buffers first: an initialization may compute with them.
        self._read_each(lambda name, value: _fill_buffer(buffers.get(name), value), list(buffers))
        self._initialize(self._params.values())
        for param in self._params.values():
            if id(param) in self._drawn and isinstance(param, PagedParameter):
                away.bring_in(param)
        result = adapt(self._stored)
        self.model = self._stored if result is None else result
        if not isinstance(self.model, nn.Module):
            raise TypeError(
                f"adapt= returned a {type(result).__name__}: it takes the model, changes it and returns it (an "
                "nn.Module), or nothing if it changed it in place"
            )
        untouched = {id(param) for param in self._params.values() if isinstance(param, PagedParameter)}
        away.finish()
        refuse_unwrappable(Structure(self.model), managed_class)
        self._kept = {id(p): p.data for p in self.model.parameters() if id(p) not in untouched}

    def fill(self, homes: ByName, ranks: Ranks) -> nn.Module:
        handles = {id(handle.param): handle for handle in homes.handles}
        kept = {handles[key].name: value for key, value in self._kept.items()}
        ranks.take_from_first(kept, ranks.job)  # they are whole, however they will be cut
        places = {
            name: handles[id(param)]
            for name, param in self._params.items()
            if id(param) in handles and id(param) not in self._kept and name not in self._source.missing
        }
        # Given up one by one: each is freed when it is home.
        for key in list(self._kept):
            homes.write_whole(handles[key], self._kept.pop(key))
        self._stream(homes, places)
        if not self._is_adapted:
            # After streaming, so that an initialization which reads a param finds its value at home.
            pager = Pager(homes, [handle.name for key, handle in handles.items() if key not in self._drawn])
            with generator_of_first(ranks):
                self._initialize([handle.param for handle in homes.handles])
            pager.finish()
        ranks.take_from_first(dict(self.model.named_buffers()))
        return self.model

    def read(self, name: str) -> torch.Tensor:
        """The value of one param, which the files have, in memory of its own."""
        found: list[torch.Tensor] = []

        def note(of: str, value: torch.Tensor) -> None:
            if of == name:
                found.append(value.clone())

        self._read_each(note, [name])
        if not found:  # what its key becomes depends on other keys
            self._read_each(note)
        return found[0]

    def _initialize(self, params: Iterable[nn.Parameter]) -> None:
        """Let transformers draw what the files lack, and compute the buffers that no file has."""
        # transformers draws what carries no mark; modules were marked while shapes were loaded.
        for module in self._stored.modules():
            module._is_hf_initialized = False
        for param in params:
            param._is_hf_initialized = id(param) not in self._drawn  # type: ignore[attr-defined]
        # Tied params would be drawn once for each of their modules.
        with _apart(self._stored):
            self._stored.initialize_weights()

    def _stream(self, homes: ByName, places: dict[str, ParamHandle]) -> None:
        """Put each value that the files have where it belongs."""
        buffers = {} if self._is_adapted else dict(self._stored.named_buffers())
        # What of the files is read for params of which slices are here.
        cuts = {name: handle.cut for name, handle in places.items() if name in self._source.made}
        found = {name: reading_of(cut, self._source.made[name]) for name, cut in cuts.items() if cut is not None}
        readings = {name: reading for name, reading in found.items() if reading is not None}

        def place(name: str, value: torch.Tensor) -> None:
            if name in readings:
                homes.write(places[name], value)
            elif name in places:
                homes.write_whole(places[name], value)
            else:
                _fill_buffer(buffers.get(name), value)

        self._read_each(place, readings=readings)

    def _read_each(
        self, place: Place, names: Collection[str] | None = None, readings: dict[str, SliceReading] | None = None
    ) -> None:
        """Let transformers read and convert one param after the other (those of ``names``, or all)."""
        from transformers import core_model_loading

        internal_step(core_model_loading, "set_param_for_module")

        def put(model: Any, name: str, value: torch.Tensor, found: Any, *_: Any) -> None:
            # As set_param_for_module does: what is left at the end counts as missing.
            found.missing_keys.discard(name)
            place(name, value)

        model, settings, made = self._stored, self._source.settings, self._source.made
        with contextlib.ExitStack() as stack:
            opened, steps = None, dict[str, Callable[..., Any]]()
            if names is not None:
                keys = list({key for name in names if name in made for key in made[name].keys})
                opened = dict(zip(keys, open_tensors(self._source.file_of, keys, stack), strict=True))
                settings = replace(settings, weight_mapping=deepcopy(settings.weight_mapping))
                stack.enter_context(replaced(model, "_weight_conversions", None))
                steps["tqdm"] = lambda each, **_: each
            stack.enter_context(replaced(model, "state_dict", lambda: self._metas))
            # It asks about the tensors of that state dict, and reads slices of what it takes for DTensors.
            by_meta = {id(self._metas[name]): reading for name, reading in (readings or {}).items()}
            steps |= {
                "set_param_for_module": put,
                "is_dtensor": lambda param: id(param) in by_meta,
                "DtensorShardOperation": lambda param: by_meta[id(param)],
                # Else threads read far ahead, and what is replaced here is so for this one alone.
                "ThreadPoolExecutor": lambda **_: None,
            }
            for step in steps.keys() & vars(core_model_loading).keys():  # an older one reads whole tensors
                stack.enter_context(replaced_for_thread(core_model_loading, step, steps[step]))
            type(model)._load_pretrained_model(model, opened, self._source.files, settings)


class _ReadAtTouch(Away):
    """Params whose values come from the files when somebody touches them; those that were only read go again."""

    def __init__(self, stored: StoredModel, params: dict[str, nn.Parameter], missing: Collection[str]):
        self._stored = stored
        self._names = {id(param): name for name, param in params.items() if name not in missing}
        super().__init__({param: param.shape for param in params.values()})

    def _read(self, param: nn.Parameter) -> torch.Tensor:
        if self._may_leave(param):
            return self._stored.read(self._names[id(param)])
        return torch.zeros(param.shape, dtype=param.dtype, device="cpu")  # it is still to be drawn

    def _may_leave(self, param: nn.Parameter) -> bool:
        return id(param) in self._names

    def send_home(self, param: nn.Parameter) -> None:
        # Another tensor, or an array, may look into its memory, and write there yet: beside it and us.
        num_users = torch._C._storage_Use_Count(param.untyped_storage()._cdata)  # type: ignore[attr-defined]
        if param.grad is not None or num_users > 2:
            return
        value, now = self._stored.read(self._names[id(param)]), param.data
        # Only what may be unchanged counts: what somebody has changed stays, beside the budget.
        self._forget(param)
        # Only what is as in the files, to the bit, can come from there again.
        alike = (now.shape, now.stride(), now.dtype) == (value.shape, value.stride(), value.dtype)
        if alike and same_bits(now, value):
            self._put_away(param, param.shape)


def open_tensors(file_of: Mapping[str, str], keys: Sequence[str], stack: contextlib.ExitStack) -> list[Any]:
    """Open the files for these tensors, which are not read yet."""
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    for file in sorted({file_of[key] for key in keys}):
        if file.endswith(".safetensors"):
            opened[file] = stack.enter_context(safe_open(file, framework="pt")).get_slice
        else:
            opened[file] = torch.load(file, map_location="cpu", weights_only=True, mmap=True).__getitem__
    return [opened[file_of[key]](key) for key in keys]


def internal_step(owner: Any, name: str) -> Any:
    """A step inside transformers that has no public name."""
    found = original(owner, name)
    if found is None:
        import transformers

        raise GeminiError(
            f"transformers {transformers.__version__} has no {name} any more, which streaming needs: load the model "
            "with transformers and wrap it with GeminiDDP(model, config), or use a version tested with Gemini "
            "(constraints.txt)"
        )
    return found


def _fill_buffer(buffer: Any, value: torch.Tensor) -> None:
    if buffer is not None:
        buffer.data = value.clone()
        buffer._is_hf_initialized = True


@contextlib.contextmanager
def _apart(model: Any) -> Iterator[None]:
    """Take tied params from all owners but the first: transformers initializes before it ties, so draws them once."""
    with contextlib.ExitStack() as stack:
        for target in model.all_tied_weights_keys:
            owner, _, leaf = target.rpartition(".")
            params = model.get_submodule(owner)._parameters
            if leaf in params:
                empty = torch.empty(params[leaf].shape, dtype=params[leaf].dtype)  # takes memory only if written
                placeholder: Any = nn.Parameter(empty, requires_grad=False)
                placeholder._is_hf_initialized = True
                stack.callback(params.__setitem__, leaf, params[leaf])
                params[leaf] = placeholder
        yield
