"""``gemini.trace``: a step traced before there is anything to run it on, on fake tensors (torch's ``FakeTensorMode``),
which have a shape, a dtype and a device and take no memory: a 70B model runs on a laptop in seconds.

What is computed is fake, what decides is real (:class:`FakeRunner`). Models decide by values of a few small integer
tensors what they do: a mask of ones is dropped, positions that count up mean one sequence, a drawn number skips a
layer. With fake ones transformers takes other branches than a real step (it materializes masks of S x S, which keeps
attention from its fused kernel). So what follows from integers, constants and single numbers alone is computed, and
branches are those of the batch at hand. Weights and inputs of floating point are fake, and so is all that depends on
them.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from gemini.config import as_kept
from gemini.errors import GeminiError, warn
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.planning.trace import ALL, MemoryTrace, Source, as_tiles, check_kept, tile_sizes
from gemini.tracing.fused import Float8Linear, with_kernels
from gemini.tracing.meter import Target, make_target, tensors_in
from gemini.tracing.observer import ObservedStep, Observer, count_tokens, trace_of_step
from gemini.train.activations.kept import KeptBlocks
from gemini.train.checkpoint.states import generators_kept
from gemini.train.context import ContextParallel, ImaginedExchange, part_of
from gemini.train.loading.skeleton import check_class, without_drawing
from gemini.train.modules import token_tiles
from gemini.train.modules.float8 import float8_layers
from gemini.train.modules.mixed import TARGETS, KeepFp32, cast_floats, cast_where_they_meet, kept_in_fp32
from gemini.train.modules.reading import COPY_OF_COMPILED, compiled_part, is_compiled, structure_of
from gemini.train.observers import iter_tensors
from gemini.train.params.handle import handle_of
from gemini.train.slices.slicing import imagine_slices

FLASH = "flash_attention_2"
MOST_REAL = 2**22
"""Elements of the largest tensor that is computed with its values. A mask of S x S may be more, and none decides."""

_aten = torch.ops.aten
_CPU = torch.device("cpu")
_KNOWN: dict[Any, tuple[Any, ...]] = {}
"""By operation and the forms of its arguments: the type of what it returns, and the form of each result."""


class FakeRunner:
    """Runs operations for a meter, inside of a fake tensor mode."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet is _aten._grouped_mm and args[0].dtype is not torch.bfloat16:
            return _grouped_mm_of_any_dtype(func, args, kwargs)
        looks = getattr(func, "is_view", False) or func is _aten._unsafe_view.default
        if looks and not kwargs and type(args[0]) is FakeTensor and args[0].constant is None:
            # Not on the way through ``FakeTensorMode``, which looks for many special cases first.
            with in_kernel_invocation_manager(self._mode):
                out = func(*args)
            if isinstance(out, torch.Tensor):
                return FakeTensor(self._mode, out, _CPU)
            return [FakeTensor(self._mode, each, _CPU) for each in out]
        inputs = tensors_in(args) + tensors_in(list(kwargs.values()))
        if not inputs:
            out = func(*args, **kwargs)
            if not isinstance(out, torch.Tensor) or not _may_decide(packet, out):
                return out
        elif not _have_values(inputs):
            return self._fake(func, args, kwargs)
        with unset_fake_temporarily():
            out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._faked, out)

    def _fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run it without values. ``FakeTensorMode`` is asked once for arguments of the same forms: that takes ten times
        as long as all else of an operation, and layers and tiles repeat each other.
        """
        given = (*args, *kwargs.values())
        try:
            key = func, *kwargs, torch.get_default_dtype(), _form_of(given)
            known = _KNOWN.get(key)
        except TypeError:  # there is more to know of an argument
            return func(*args, **kwargs)
        if known is None:
            out = func(*args, **kwargs)
            results = out if isinstance(out, (tuple, list)) else [out]
            with suppress(TypeError):
                if _form_of(given) == key[-1]:
                    _KNOWN[key] = type(out), *self._forms_of(results, given)
            return out
        kind, *forms = known
        made = [given[form] if isinstance(form, int) else form and self._empty(*form) for form in forms]
        return kind(made) if issubclass(kind, (tuple, list)) else made[0]

    def _forms_of(self, results: Sequence[Any], given: Sequence[Any]) -> Iterator[Any]:
        """The number of the argument that each is, or the form of a tensor of its own; TypeError if one is neither."""
        numbers = {id(each): number for number, each in enumerate(given) if isinstance(each, torch.Tensor)}
        storages = {each.untyped_storage()._cdata for each in tensors_in(given)}
        for result in results:
            form: Any = numbers.get(id(result))
            if form is None and result is not None:
                if type(result) is not FakeTensor:
                    raise TypeError(f"a {type(result).__name__} is not made anew")
                form, own = _form_of(result), result.untyped_storage()
                alone = self._empty(*form).untyped_storage()
                if result.storage_offset() or own._cdata in storages or own.nbytes() != alone.nbytes():
                    raise TypeError("it shares what it lies in")
                storages.add(own._cdata)
            yield form

    def _empty(self, shape: Any, stride: Any, dtype: torch.dtype) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, made, _CPU)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        """Masks of two dimensions are made of floats sometimes; what has more is for computing, not for deciding."""
        if isinstance(tensor, FakeTensor) or tensor.dim() <= 2 or not tensor.is_floating_point():
            return tensor
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _form_of(value: Any) -> Any:
    """What the form of results follows from; TypeError where they may follow from values, or another device."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_form_of, value))
    if not isinstance(value, torch.Tensor):
        return type(value), value
    known = type(value) is torch.Tensor or getattr(value, "constant", value) is None
    if not known or value.device != _CPU or value.layout is not torch.strided:
        raise TypeError(f"a {type(value).__name__} is not known by its form")
    return value.shape, value.stride(), value.dtype


def _have_values(inputs: list[torch.Tensor]) -> bool:
    """Whether all that goes into an operation has values, and what comes out may be worth having them."""
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in inputs):
        return False
    broadcast = zip_longest(*(reversed(tensor.shape) for tensor in inputs), fillvalue=1)
    return math.prod(map(max, broadcast)) <= MOST_REAL


def _may_decide(packet: Any, made: torch.Tensor) -> bool:
    """Whether a model may decide by what an operation makes of numbers alone: integers, single numbers, and masks."""
    if made.device.type != "cpu" or made.numel() > MOST_REAL:
        return False
    is_mask = packet in (_aten.ones, _aten.zeros, _aten.full) and made.dim() <= 2
    return is_mask or made.numel() <= 1 or not made.is_floating_point()


def _grouped_mm_of_any_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The shape check in torch knows bf16 only; CPUs, and CUDA since torch 2.10, take fp32 and fp16 as well."""
    first, second, *rest = args
    dtype = kwargs.pop("out_dtype", None) or first.dtype
    return func(first.to(torch.bfloat16), second.to(torch.bfloat16), *rest, **kwargs).to(dtype)


def trace(
    model: Any,
    batch: Mapping[str, Any],
    *,
    precision: str = "bf16",
    target: str | None = None,
    checkpointing: bool | str | None = None,
    model_class: Any = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    tile_tokens: int | str | None = None,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    keep_fp32: KeepFp32 = "auto",
    kept_blocks: int | str = 0,
    kernels: str | None = None,
    fp16_accumulation: bool = False,
    float8: bool = False,
) -> MemoryTrace:
    """One forward and backward of ``model`` on ``batch``, without weights, without memory for them and without a GPU.

    Args:
        model: a transformers config object, or an ``nn.Module`` (with values, on the meta device or fake), which is
            left as it is. It is traced in training mode.
        batch: keyword arguments of forward. Of tensors only shapes and dtypes count, so they may be on the meta
            device; :func:`gemini.batch_for` makes them for a config.
        precision: the compute dtype, "bf16", "fp16" or "fp32". Params and inputs are cast to it, buffers are not, as
            ``GeminiDDP`` does.
        target: "cpu" or "cuda", whose workspaces the bytes include; by default "cuda" if there is one.
        checkpointing: gradient checkpointing of a transformers model: True (as transformers does it by default),
            "reentrant", "non-reentrant", False, or None, which leaves it as it is.
        model_class: for a config: the class of transformers, if not the one that follows from the config.
        loss: what makes the loss of what forward returns; by default its ``loss``, or itself if it is one number.
        tile_tokens: as in :class:`gemini.GeminiConfig`. "auto" traces the step as it is, with its head in tiles and all
            in tiles, of a size that follows from the batch and the widths of the output head (``tiled`` of the trace;
            with a warning none where that cannot be), and the planner chooses.
        context_parallel: ranks that share each sequence, the size of ``cp`` in their mesh. The batch is the whole one,
            the trace is of the last rank.
        tensor_parallel: ranks that have slices of each layer, the size of ``tp`` in their mesh. The trace is of the
            first one, and its params are slices.
        keep_fp32: as in :class:`gemini.GeminiConfig`.
        kept_blocks: the same; "auto" traces the step of a model that checkpoints with no block kept and with all of
            them (``all_kept`` of the trace), and the planner chooses a number.
        kernels: "liger": the step with Liger's fused norm, SwiGLU, rope, and head with its loss (which need not be
            installed here), of llama, mistral, qwen2 and qwen3; without tiles.
        fp16_accumulation: as in :class:`gemini.GeminiConfig`.
        float8: the same, in compiled blocks (torchao need not be installed here). A model with layers of
            ``torchao.float8`` is traced as these compute without being compiled.

    Returns:
        A trace with ``source`` "ahead". MoE models are traced with the experts implementation they have; those whose
        shapes follow from the values of the router (``"eager"``) cannot be.

    Raises:
        GeminiError: if forward gives no loss, or needs values that fake tensors do not have.
        ValueError: for an unknown precision, target, or kind of checkpointing, a config without a model class, layers
            that ``tensor_parallel`` does not divide, fewer ranks than one, tiles of layers in slices, blocks without
            flags, and a model that ``kernels`` are not for.
        TypeError: for a ``keep_fp32`` that is neither of its words nor a list.
    """
    if precision not in COMPUTE_DTYPES:
        raise ValueError(f"precision must be one of {', '.join(COMPUTE_DTYPES)}, got {precision!r}")
    over = (context_parallel, tensor_parallel)
    if min(over) < 1:
        raise ValueError(f"context_parallel={over[0]}, tensor_parallel={over[1]}: each is at least 1")
    how = (checkpointing, model_class, loss, as_kept(keep_fp32), over)
    if kernels is not None and (tile_tokens is not None or tensor_parallel > 1 or context_parallel > 1):
        raise ValueError(f"kernels={kernels!r} are traced of whole layers without tiles: leave one of them out")
    tiles = "auto" if tile_tokens == "auto" else as_tiles(tile_sizes(tile_tokens))
    if tensor_parallel > 1 and tiles not in (None, "auto"):
        raise ValueError(f"tile_tokens={tiles} with tensor_parallel={tensor_parallel}: leave one of them out")
    check_kept(kept_blocks)
    is_open = kept_blocks == "auto"
    more = (0 if is_open else int(kept_blocks), kernels, fp16_accumulation, float8)
    step = _FakeStep(model, batch, precision, make_target(target), *how, *more)
    found = step.trace(tiles)
    if is_open and found.checkpoint_bytes:  # else no block is computed again
        return _with_all_kept(found, step._replace(kept_blocks=ALL).trace(tiles))
    return found


def _with_all_kept(none: MemoryTrace, every: MemoryTrace) -> MemoryTrace:
    """The step with no block kept, and beside each of its forms that with all of them."""
    tiled = _with_all_kept(none.tiled, every.tiled) if none.tiled and every.tiled else None
    return replace(none, tiled=tiled, all_kept=replace(every, tiled=None))


class _Prepared(NamedTuple):
    """A fake model, its inputs, and what is to be known of them, in a fake tensor mode that is open."""

    model: nn.Module
    inputs: dict[str, Any]
    kept: dict[int, str]
    mode: FakeTensorMode
    sent: Counter[str]  # bytes to other ranks, counted as layers run


class _FakeStep(NamedTuple):
    """The step that :func:`trace` was asked for."""

    model: Any
    batch: Mapping[str, Any]
    precision: str
    target: Target
    checkpointing: bool | str | None
    model_class: Any
    loss: Callable[[Any], torch.Tensor] | None
    keep_fp32: KeepFp32
    over: tuple[int, int]  # ranks with parts of each sequence, ranks with slices of layers
    kept_blocks: int
    kernels: str | None
    fp16_accumulation: bool
    float8: bool

    def trace(self, tiles: int | str | None) -> MemoryTrace:
        """Run it in ``tiles``; "auto": as it is, and in each kind of tiles that the planner may choose, with a warning
        where that cannot be.
        """
        with self.prepared() as prepared:
            if tiles != "auto":
                return self.traced(prepared, tiles)
            shapes = {name: tuple(v.shape) for name, v in prepared.inputs.items() if isinstance(v, torch.Tensor)}
            choices = token_tiles.auto_tokens(prepared.model, count_tokens(shapes, prepared.model))
            whole = self.traced(prepared, None)
        if whole.tensor_parallel > 1:
            return whole
        tiled: MemoryTrace | None = None
        try:
            for tiles in reversed(choices):
                with self.prepared() as prepared:
                    tiled = replace(self.traced(prepared, tiles), tiled=tiled)
        except GeminiError as e:
            warn(f'tile_tokens="auto" has no effect: {e}')
            return whole
        return replace(whole, tiled=tiled)

    @contextmanager
    def prepared(self) -> Iterator[_Prepared]:
        """Make the fake model that this rank has, and its part of the batch."""
        model, mode, (number, slices) = self.model, FakeTensorMode(allow_non_fake_inputs=True), self.over
        # Wherever it is asked for: under no_grad(), or where a model is made on the meta device.
        with torch.inference_mode(False), torch.device("cpu"), generators_kept(), nothing_collected(), mode:
            fake = fake_copy(model, mode) if isinstance(model, nn.Module) else _build(model, self.model_class)
            if not isinstance(self.batch, Mapping):
                raise ValueError(f"a batch has the arguments of forward by name; got a {type(self.batch).__name__}")
            kept = kept_in_fp32(fake, self.precision, self.keep_fp32)
            for param, _ in structure_of(fake).params:
                own_dtype = torch.float32 if id(param) in kept else COMPUTE_DTYPES[self.precision]
                if param.is_floating_point() and param.dtype is not own_dtype:
                    param.data = torch.empty(param.shape, dtype=own_dtype)
            for module in fake.modules():
                _without_package(getattr(module, "config", None))
            if self.float8:
                for layer in float8_layers(structure_of(fake), kept):
                    layer.__class__ = Float8Linear
            fake.train()
            _set_checkpointing(fake, self.checkpointing)
            own, sent = self.batch, Counter[str]()
            if slices > 1:
                imagine_slices(fake, slices, sent)
            if number > 1:
                with unset_fake_temporarily():
                    # A batch is looked at before it is cut: ones for what has no values.
                    own = {
                        k: torch.ones(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) and v.is_meta else v
                        for k, v in self.batch.items()
                    }
                    own = part_of(own, number - 1, number)
            known: dict[int, torch.Tensor] = {}
            yield _Prepared(fake, {name: fake_input(v, mode, known) for name, v in own.items()}, kept, mode, sent)

    def traced(self, prepared: _Prepared, tiles: int | str | None) -> MemoryTrace:
        """Run it, in ``tiles``."""
        fake, inputs, kept, mode, sent = prepared
        number, slices = self.over
        blocks = KeptBlocks(fake, self.kept_blocks) if self.kept_blocks else None
        if blocks is not None:
            blocks.keep(fake)
        if tiles is not None:
            token_tiles.tile_tokens(fake, tiles)
        if number > 1:
            ContextParallel(fake, ImaginedExchange(number, sent), slices).put()
        if self.precision != "fp32":
            inputs = cast_floats(inputs, COMPUTE_DTYPES[self.precision], but=TARGETS)
            cast_where_they_meet(fake, kept, COMPUTE_DTYPES[self.precision], [])
        with with_kernels(fake, self.kernels):
            step = self._run(fake, inputs, mode, sent)
        found = trace_of_step(fake, step, self.precision, kept, target=self.target.name, source=Source.AHEAD)
        found = replace(found, tile_tokens=tiles, context_parallel=number, tensor_parallel=slices, kernels=self.kernels)
        found = replace(found, fp16_accumulation=self.fp16_accumulation)
        return found if blocks is None else replace(found, checkpointing=True, kept_blocks=len(blocks.blocks))

    def _run(self, model: nn.Module, inputs: dict[str, Any], mode: FakeTensorMode, sent: Counter[str]) -> ObservedStep:
        observer = Observer(model, self.target, free_gradients=True, sent=sent)
        with ExitStack() as stack:
            stack.callback(observer.detach)
            observer.attach()
            stack.enter_context(self.target.operations())
            stack.enter_context(observer.make_meter(FakeRunner(mode)))
            phase = "forward"
            try:
                result = loss_of(model, model(**inputs), self.loss)
                if not result.requires_grad:
                    raise GeminiError(
                        f"the loss of {type(model).__name__} depends on no param that requires gradients: there is no "
                        "backward to trace"
                    )
                phase = "backward"
                result.backward()
            except GeminiError:
                raise
            except Exception as e:
                raise _cannot(model, phase, e) from e
        if observer.last is None:
            raise GeminiError(f"no backward of {type(model).__name__} was seen: record a step with gemini.MemoryTracer")
        return observer.last


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Some other object's finalizer may write tensors, and must not find itself among fake ones."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- inputs --------------------------------------------------------------------------------------------------------


def model_class_for(config: Any) -> Any:
    """The class of transformers to train a config with: what ``architectures`` names if it takes labels, else the
    sequence-to-sequence, masked, causal language model or image, audio or sequence classifier; ValueError without one.
    """
    import transformers

    for name in getattr(config, "architectures", None) or ():
        # A config may name what is none: an auto class has no forward, nor has a function.
        forward = getattr(getattr(transformers, name, None), "forward", None)
        if forward is not None and "labels" in inspect.signature(forward).parameters:
            return getattr(transformers, name)
    kinds = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"] if getattr(config, "is_encoder_decoder", False) else []
    kinds += [] if getattr(config, "is_decoder", False) else ["MASKED_LM"]
    kinds += ["CAUSAL_LM", "IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"]
    for kind in kinds:
        mapping = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", None)
        if mapping is not None and type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ValueError(
        f"{type(config).__name__} has no model class with a loss in transformers {transformers.__version__} "
        f"(architectures={getattr(config, 'architectures', None)}): pass model_class="
    )


def batch_for(
    config: Any, batch_size: int = 1, seq_len: int = 1024, *, model_class: Any = None
) -> dict[str, torch.Tensor]:
    """Inputs and labels for one step of the model of ``config``, on the meta device, images and sounds in fp32.

    Args:
        config: a transformers config object.
        batch_size: samples.
        seq_len: positions of each (of audio: samples of sound; without meaning for images, whose size the config has).
        model_class: if not the one that :func:`model_class_for` finds.

    Raises:
        ValueError: for a model whose inputs cannot be guessed from its config, and for no samples or positions.
    """
    if min(batch_size, seq_len) < 1:
        raise ValueError(f"batch_size={batch_size}, seq_len={seq_len}: each is at least 1")
    model_class = model_class or model_class_for(config)
    check_class(model_class)
    name = model_class.__name__
    known = inspect.signature(model_class.forward).parameters

    ids, numbers = (partial(torch.zeros, dtype=dtype, device="meta") for dtype in (torch.long, torch.float32))
    if "pixel_values" in known and "input_ids" not in known:
        return {"pixel_values": numbers(batch_size, *_image_shape(config)), "labels": ids(batch_size)}
    if "input_features" in known:
        length = 2 * getattr(config, "max_source_positions", 1500)
        batch = {"input_features": numbers(batch_size, getattr(config, "num_mel_bins", 80), length)}
    elif "input_values" in known:
        batch = {"input_values": numbers(batch_size, seq_len)}
    elif "input_ids" in known:
        batch = {"input_ids": ids(batch_size, seq_len)}
    else:
        raise ValueError(
            f"what {name} takes is not known here ({', '.join(list(known)[1:6])}): make the batch yourself"
        )
    one_each = name.endswith(("ForSequenceClassification", "ForAudioClassification", "ForImageClassification"))
    batch["labels"] = ids(batch_size) if one_each else ids(batch_size, seq_len)
    return batch


# ---- the model -------------------------------------------------------------------------------------------------------


def _image_shape(config: Any) -> tuple[int, int, int]:
    """Channels, height and width of the images that a model of ``config`` takes; ValueError if it does not say."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None)
    if size is None:
        raise ValueError(f"{type(config).__name__} says no image_size: make the batch yourself (pixel_values, ...)")
    height, width = (size, size) if isinstance(size, int) else (size[0], size[1])
    return getattr(vision, "num_channels", 3), height, width


def _build(config: Any, model_class: Any) -> nn.Module:
    """The model of a config, of fake tensors. Nothing is drawn."""
    model_class = model_class or model_class_for(config)
    check_class(model_class)
    make = getattr(model_class, "from_config", None) or model_class._from_config
    config = copy.deepcopy(config)
    _without_package(config)
    with without_drawing():
        return make(config)


def _without_package(hf_config: Any) -> None:
    """Let a config mean FlashAttention's kernels as torch has them: what can be traced where there is no GPU."""
    parts = [getattr(hf_config, key, None) for key in getattr(hf_config, "sub_configs", None) or ()]
    for part in (hf_config, *parts):
        if part is not None and getattr(part, "_attn_implementation", None) == FLASH:
            # Past the setter, which would ask for the package.
            part._attn_implementation_internal = "sdpa"


def fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of ``model`` whose tensors are fake; what modules share stays shared."""
    for param, names in structure_of(model).params:
        if handle_of(param) is not None:
            raise GeminiError(
                f"param {names[0]!r} is managed by GeminiDDP: trace the model before it is wrapped, or record a step "
                "with gemini.MemoryTracer"
            )
    memo: dict[int, Any] = {}
    try:
        # What stands in attributes too, and in lists and dicts there: what spectral_norm computed, tables of a model.
        beside = (value for module in model.modules() for value in tree_leaves(list(vars(module).values())))
        for tensor in (*model.buffers(), *(value for value in beside if isinstance(value, torch.Tensor))):
            memo[id(tensor)] = _empty_as(tensor.detach(), mode)
        for param, _ in structure_of(model).params:
            memo[id(param)] = nn.Parameter(_empty_as(param.data, mode), requires_grad=param.requires_grad)
            memo[id(param)].__dict__.update(param.__dict__)
            if (scales := getattr(param, "quant_state", None)) is not None:  # fake operations take them as they are
                memo[id(scales)] = scales
        copied = copy.deepcopy(model, memo)
        for own, other in zip(model.modules(), copied.modules(), strict=True):
            rebind_forward(own, other, memo)
        return copied
    except Exception as e:
        raise GeminiError(
            f"{type(model).__name__} cannot be copied onto fake tensors ({type(e).__name__}: {e}): give gemini.trace "
            "its config, or record a step with gemini.MemoryTracer"
        ) from e


def rebind_forward(own: nn.Module, other: nn.Module, memo: Mapping[int, Any]) -> None:
    """Let a copy have the forward by which its module's own was replaced, as TRL does it for a fused head; of one that
    was compiled the Python, and of what wraps its own, as tiles do, that. It works with the copies of what it closes
    over, which the ``memo`` of deepcopy has: of functions deepcopy makes none. Other objects were copied with it.
    """
    forward = _own_method(own.__dict__.get("forward"), own)
    if is_compiled(own):
        other.__dict__[COPY_OF_COMPILED] = True  # that it reads its params together is kept
        if forward is not None and forward is compiled_part(own):
            del other.__dict__["forward"]
            forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    function: Any = getattr(forward, "__func__", None) if getattr(forward, "__self__", None) is own else None
    if isinstance(forward, FunctionType):
        other.__dict__["forward"] = _closed_over(forward, own, memo)
    elif function is type(own).forward:
        other.__dict__.pop("forward", None)
    elif isinstance(function, FunctionType):
        other.__dict__["forward"] = MethodType(_closed_over(function, own, memo), other)


def _own_method(value: Any, own: nn.Module) -> Any:
    """The method of ``own`` that a function wraps, or the value itself."""
    wrapped = getattr(value, "__wrapped__", None)
    return wrapped if getattr(wrapped, "__self__", None) is own else value


def _closed_over(function: FunctionType, own: nn.Module, memo: Mapping[int, Any]) -> FunctionType:
    """The same function over the copies of what it closes over."""
    cells = list[CellType]()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it
            value = _own_method(cell.cell_contents, own)
            if isinstance(value, MethodType) and id(value.__self__) in memo:
                cell = CellType(MethodType(value.__func__, memo[id(value.__self__)]))
            elif id(value) in memo:
                cell = CellType(memo[id(value)])
        cells.append(cell)
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, (*cells,))
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _empty_as(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        if tensor.numel() and 0 in tensor.stride():  # a stand-in that takes no memory
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _set_checkpointing(model: Any, wanted: bool | str | None) -> None:
    if wanted is None:
        return
    kinds = {"reentrant": True, "non-reentrant": False}
    if not isinstance(wanted, bool) and wanted not in kinds:
        raise ValueError(f'checkpointing must be True, False, "reentrant" or "non-reentrant", got {wanted!r}')
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise ValueError(
            f"{type(model).__name__} has no gradient_checkpointing_enable(): checkpointing= is for models of "
            "transformers. Leave it out and let forward do what it does"
        )
    if wanted is False:
        getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    else:  # the first name since transformers 5.20
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(None if wanted is True else {"use_reentrant": kinds[str(wanted)]})


def fake_input(value: Any, mode: FakeTensorMode, known: dict[int, torch.Tensor]) -> Any:
    """A tensor of the batch: integers with their values (ones for those without), others fake."""
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            if value.is_floating_point() or value.numel() > MOST_REAL:
                known[id(value)] = _empty_as(value.detach(), mode)
            else:
                with unset_fake_temporarily():
                    known[id(value)] = torch.ones(value.shape, dtype=value.dtype) if value.is_meta else value.cpu()
        return known[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(fake_input(item, mode, known) for item in value)
    return value


# ---- the loss --------------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, output: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
    result: Any
    if loss is not None:
        result = loss(output)
    elif isinstance(output, torch.Tensor):
        result = output
    elif isinstance(output, dict):  # ModelOutput is one
        result = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        result = output[0]
    else:
        result = getattr(output, "loss", None)
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        return result
    found = ", ".join(str(tuple(tensor.shape)) for tensor in iter_tensors(output)) or "nothing"
    raise GeminiError(
        f"forward of {type(model).__name__} gave no loss (it returned tensors of shape {found}): pass labels in the "
        "batch, choose a model class with a head (model_class=), or pass loss=, a function of what forward returns"
    )


def _cannot(model: nn.Module, phase: str, error: Exception) -> GeminiError:
    op = getattr(error, "func", None)
    cause = f"{op} needs values" if op is not None else f"{type(error).__name__}: {error}"
    return GeminiError(
        f"the {phase} of {type(model).__name__} cannot run on fake tensors ({cause}). A step whose shapes or branches "
        "follow from values can be recorded while it runs: with gemini.MemoryTracer(model) as tracer: ..."
    )
