"""``GeminiDDP``: the face of a managed model.

``GeminiDDP(model, config)`` returns the *same* module, its class changed in place to one that is both ``GeminiDDP`` and
the original, with the original's name (as FSDP2 does): ``model.config``, ``generate``, ``save_pretrained`` and the
names of params stay. What cannot be meant on a managed model (deepcopy, pickle, ``.half()``, wrapping twice) is refused
here with the remedy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from gemini.config import GeminiConfig, config_of
from gemini.errors import GeminiError, human_bytes
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.patches import register, replaced
from gemini.planning.trace import MemoryTrace
from gemini.train import wrap
from gemini.train.adapters import faces_of, refuse_unsupported, refused
from gemini.train.checkpoint import export
from gemini.train.engine import Engine, engine_of
from gemini.train.modules.changing import compile_blocks, refuse_compiled_whole, refuse_injected
from gemini.train.modules.mixed import move_buffers, warn_of_fp16
from gemini.train.modules.reading import Structure
from gemini.train.optimizers.optimizer import refuse_stock_optimizers
from gemini.train.params.handle import ParamHandle, handle_of
from gemini.train.params.state_dict import load_model_state, model_state
from gemini.train.passes.parking import Block
from gemini.train.passes.stepping import MeasuredNorm
from gemini.train.report import MemoryReport, Recording, make_report
from gemini.train.setup.wrappable import refuse_unwrappable
from gemini.train.step import alone, run_alone

T = TypeVar("T")


class GeminiDDP(nn.Module):
    """Manage params, gradients and optimizer states of ``model`` in chunks on GPU, CPU and NVMe. Returns ``model``
    itself.

    Args:
        model: any ``nn.Module`` with dense floating-point params. It is changed in place.
        config: the settings. By default the model computes in bf16, and each budget is 80 % of the free memory.
        process_group: the ranks among which chunks are divided (as in ZeRO-3). By default all processes that torchrun
            has started. All ranks start from the weights of rank 0.
        mesh: instead of ``process_group`` a ``DeviceMesh``. Its dimensions are named:

            - ``dp``: data parallel. Chunks are divided among these ranks.
            - ``dp_replicate``: replicas of the model. Their gradients are added up.
            - ``cp``: context parallel. Sequences are divided among these ranks (:func:`gemini.sequence_batch`), and
              chunks.
            - ``tp``: tensor parallel. Each rank keeps a slice of every matrix in the model's ``tp_plan``. Pass the
              whole model; for another plan slice it with :func:`gemini.slice_tensors` first.
            - ``ep``: expert parallel. Each rank keeps some experts of every layer. Pass the whole model.
            - ``pp``: pipeline stages. Use :class:`gemini.Pipeline` instead, or pass the stage of this rank.

            The dimensions of a mesh without names are ``dp``, or ``dp_replicate`` and ``dp``.

    Raises:
        RankMismatch: if the ranks differ in model, config or versions.
        BudgetExceeded: if the model does not fit. The message has the missing bytes and the cheapest change.
        StorageError: if the spill file cannot be created.
        ValueError, TypeError: if the model has no params, is wrapped already, or has params that cannot be managed.
    """

    _gemini_original: type[nn.Module]
    _gemini_engine: Engine

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not GeminiDDP:
            # type(model)(...) and type(model).from_pretrained(...) mean a new, ordinary model of the original class.
            return cls._gemini_original(*args, **kwargs)
        if unknown := kwargs.keys() - {"model", "config", "process_group", "mesh"}:
            raise TypeError(
                f"GeminiDDP() got an unexpected keyword argument {', '.join(map(repr, sorted(unknown)))}: settings are "
                "fields of the config, GeminiDDP(model, gemini.GeminiConfig(...))"
            )
        # It returns `model` itself, whose class is managed by then, so Python calls its `__init__`: which does nothing.
        return _wrap(*args, **kwargs)

    def __init__(self, model: nn.Module | None = None, config: GeminiConfig | None = None, **ranks: Any) -> None:
        # Python calls this on the module that __new__ returned; it was initialized long ago.
        pass

    def __repr__(self) -> str:
        engine = self.__dict__.get("_gemini_engine")
        if engine is None:  # what is printed while it is made or taken apart
            return super().__repr__()
        ledger = engine.store.ledger
        # The ledger is asked, not the devices: printing a model must not wait for anything.
        tiers = ", ".join(
            f"{tier.value} {human_bytes(ledger.used(tier))} of {human_bytes(ledger.budget(tier))}"
            for tier in ledger.tiers
        )
        return f"managed by Gemini in {engine.config.precision} ({tiers}): {super().__repr__()}"

    # ---- training -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward. Out of memory it is run once more, with the same bits, if nothing but its result has changed."""
        again, batch = self._gemini_engine.again, (args, kwargs)
        beginning = again.begin(self, batch)
        try:
            return self._gemini_call(*args, **kwargs)
        except torch.OutOfMemoryError as e:
            beginning = again.if_unchanged(beginning, batch, e)
            if beginning is None:
                raise
            said = str(e)
        # Out of the block: with the error its frames go, and the activations that they hold.
        again.repeat(beginning, said)
        return self._gemini_call(*args, **kwargs)

    def _gemini_call(self, *args: Any, **kwargs: Any) -> Any:
        """Whatever an interrupt has left open in a forward ends here: hooks do not run after one, and a
        ``torch.no_grad()`` of the model's may not have.
        """
        # Noted outside of the call: hooks of torch do not run after a KeyboardInterrupt.
        before, engine = torch.is_grad_enabled(), self._gemini_engine
        depth = engine.forward.calls.depth
        occupancy = engine.state.occupancy
        is_first = threading.get_ident() not in occupancy.inside
        try:
            occupancy.enter()
            return super().__call__(*args, **kwargs)
        except BaseException:
            torch._C._set_grad_enabled(before)
            engine.forward.unwind(depth)
            raise
        finally:
            if is_first:
                occupancy.leave()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside this block backward adds up gradients; an optimizer with ``step_in_backward=True`` updates nothing.

        With several ranks each rank keeps the gradients of all params (fp32, 4 bytes per param) until the next backward
        outside, which reduces them. Without ``no_sync`` every backward reduces its gradients, and each rank keeps its
        share: far less memory, more communication, the same sums within rounding.
        """
        engine = engine_of(self)
        # Ranks keep their gradients whole inside; the state is what updates inside backward ask.
        with engine.backward.sink.without_reducing(), replaced(engine.state, "accumulating", True):
            yield

    def micro_batch(self, call: Callable[[], T]) -> T:
        """Run ``call``, which is the forward and the backward of one micro-batch, and return what it returns. If it
        runs out of GPU memory, gathered weights give up room, and it is run once more from the random numbers of
        before::

            loss = model.micro_batch(lambda: backward(model(**batch).loss / 4))

        Gradients have the same bits as if it had gone well at once; what was added of them is not added again. So
        ``call`` must do the same twice: change no input, no buffer, and nothing outside. Without it a forward is run
        again by itself if that is safe, and a backward is not. A warning says so. With several ranks, and on the CPU,
        it just runs.

        Raises:
            torch.OutOfMemoryError: from the second time. It says whether gradients of this step are whole.
        """
        return engine_of(self).again.micro_batch(call)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        *,
        params: nn.Parameter | Iterable[nn.Parameter] | None = None,
    ) -> torch.Tensor:
        """Clip the gradients of all params to a total 2-norm of ``max_norm``, after the last backward of a step.

        Gradients are multiplied by ``max_norm / (norm + 1e-6)`` if this is below 1, as in torch; the update does it in
        fp32 when it reads them. ``params``: clip only these (or this one), for example those of one optimizer.

        Returns:
            The norm before clipping: one fp32 number on ``model.device``. Reading its value waits for the GPU.

        Raises:
            ValueError: for another norm than the 2-norm, a negative ``max_norm``, or params of another model.
            NonFiniteGradient: with ``error_if_nonfinite``, before anything is changed.
            GeminiError: for a model that was sliced by hand, where the norm of the whole is not known.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type}: gradients are clipped by their 2-norm only")
        if not max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, got {max_norm}")
        ranks = engine_of(self).ranks
        if ranks.slice_ and not engine_of(self).backward.gradients.norms.knows_all:
            raise GeminiError(
                f"clip_grad_norm_ of a model that was sliced by hand (this rank has {ranks.slice_}): Gemini does not "
                "know which params are slices and which are whole on every rank, so it cannot compute their norm. "
                "Leave it out, or slice the model with gemini.slice_tensors"
            )
        # A param that nobody manages would be left out of the norm.
        refuse_injected(engine_of(self).state, self, is_root=True)
        given = [params] if isinstance(params, torch.Tensor) else params  # one alone, as torch takes it
        handles = None if given is None else [self._own(param, "clip_grad_norm_") for param in given]
        return engine_of(self).stepping.clip_grad_norm(max_norm, handles, error_if_nonfinite=error_if_nonfinite)

    def measuring_grad_norm(self, max_norm: float) -> contextlib.AbstractContextManager[MeasuredNorm]:
        """Clip gradients with ``gradients="transient"``, which keeps none: run backward twice, as LOMO does.

        The backward inside the block only measures the norm. The one after it updates the params, with the same bits as
        ``clip_grad_norm_(max_norm)`` where gradients are kept::

            loss = model(**batch).loss
            with model.measuring_grad_norm(1.0) as measured:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            print(measured.norm)

        To save the memory of ``retain_graph``, run forward a second time instead, with the same random numbers.

        Raises:
            ValueError: for a negative ``max_norm``.
            GeminiError: with other ``gradients``, with several ranks, and if no backward ran inside the block.
            NonFiniteGradient: at the end of the block, if a gradient contains inf or NaN. No weight was changed.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must not be negative, got {max_norm}")
        return engine_of(self).stepping.measuring(float(max_norm))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all params. ``set_to_none=False`` sets them to zero instead
        (:meth:`gemini.HybridOptimizer.zero_grad`).
        """
        engine_of(self).stepping.discard(to_zero=not set_to_none)

    def compile(self, **options: Any) -> None:  # type: ignore[override]
        """Compile each repeated block in place: ``block.compile(**options)``, with the options of ``torch.compile``.

        All weights of a compiled block are gathered together. Compiled blocks round differently from ordinary ones, but
        give the same bits wherever chunks are placed. The model as a whole cannot be compiled.

        Raises:
            GeminiError: without repeated blocks, or under context parallel.
            BudgetExceeded: from the next forward, without enough memory to gather a block.
        """
        if engine_of(self).ranks.context.size > 1:
            raise GeminiError(
                "compile() of a model under context parallel: ranks meet inside its attention, where nothing can be "
                "compiled. Leave it out"
            )
        compile_blocks(self, **options)

    # ---- looking and writing ------------------------------------------------------------------------------------

    def gathered(
        self, params: Iterable[nn.Parameter] | nn.Parameter | None = None, write: bool = False
    ) -> AbstractContextManager[None]:
        """Inside this block ``params`` (one, several, or by default all) are ordinary tensors with their full weights.

        With ``write=True`` autograd is off inside (as ``torch.no_grad()`` does it), and values that were changed are
        written back to the exact fp32 masters at its end. If the block raises an exception, nothing is written.

        Raises:
            BudgetExceeded: if the tier that computes has no room for all of them at once. Pass fewer.
            ValueError: for params of another model.
        """
        engine = engine_of(self)
        # Windows that an interrupted forward has pinned would take the room that is needed here.
        run_alone(engine.state, engine.recovery.forget_interrupted)
        if params is None:
            handles = engine.params.handles
        else:
            handles = [self._own(p) for p in ([params] if isinstance(params, torch.Tensor) else params)]
        return engine.forward.gathered(handles, write=write)

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """Inside this block the model is not on the GPU: all of its budget there is given back, for an inference engine
        that generates in between. At its end everything is where it was, with the same bits.

        Updates in flight end first. Weights, states and gradients that live on the GPU wait in host memory as far as
        the cpu budget has room, else on the drive. Params are read and written by name as ever (``full_param``,
        ``state_dict``, :func:`gemini.weights_for`); a forward, a backward, ``gathered()`` and ``optimizer.step()`` are
        refused. With several ranks all of them park together. A block inside another one has no effect.

        Raises:
            BudgetExceeded: if there is no room below the GPU: nothing has moved. At the end of the block, if others
                hold the memory: the model stays parked, and ``with model.parked(): pass`` tries again.
            GeminiError: if a view of the weights, or a graph whose backward is to come, holds memory of the GPU.
        """
        engine, block = engine_of(self), Block()
        try:
            run_alone(engine.state, wrap.park, engine, block)
            yield
        finally:
            run_alone(engine.state, engine.parking.leave, block)

    @alone
    def full_param(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of one param on the CPU, in the compute dtype; ``dtype=torch.float32`` gives the exact master.
        ``KeyError`` for an unknown name.

        Of a model in slices (``tp``) it is the whole param, and all ranks of ``tp`` must call this together; so for
        :meth:`full_grad` and :meth:`state_dict`.
        """
        engine = engine_of(self)
        return engine.by_names.read_whole(engine.by_names[name], dtype)

    @alone
    def full_grad(self, name: str) -> torch.Tensor | None:
        """A copy of one param's gradient on the CPU, as backward computed it, or None. ``KeyError`` for an unknown
        name.

        Call it before ``optimizer.step()``, which consumes the gradients of the optimizer's params. Clipping does not
        change the copy, since it takes effect in the step.
        """
        engine = engine_of(self)
        handle = engine.by_names[name]
        grad = engine.backward.read_grad(handle)
        return None if grad is None else engine.by_names.joined(handle, grad)

    @alone
    def memory_report(self) -> MemoryReport:
        """Bytes of each tier, and what moved and waited in the last step. ``print`` shows a table."""
        engine = engine_of(self)
        # Figures of a model at rest: what is in flight would be counted in neither of its places.
        engine.drain()
        return make_report(engine)

    def recording(self, *, trace: MemoryTrace | None = None) -> AbstractContextManager[Recording]:
        """Record whole training steps: what took how long, and what each tier held::

            with model.recording() as recording:
                train_one_step()
            print(recording.timeline)

        Results keep their bits. On a GPU recorded steps are slower. Each rank records only itself.

        Args:
            trace: of this model and batch, for the floating point operations of a step, which are 0 without it.

        Raises:
            GeminiError: if the model is being recorded already.
            PlanMismatch: for a trace of another model.
        """
        return Recording(engine_of(self), self, trace).opened(self)

    # ---- saving and loading -------------------------------------------------------------------------------------

    @alone
    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """All weights and buffers, as copies on the CPU under their original names, in the compute dtype.

        ``dtype=torch.float32`` gives the exact masters. ``keep_vars`` is not supported.
        """
        if args:
            destination, prefix, keep_vars = (*args, "", False)[:3]
        if keep_vars:
            raise GeminiError("state_dict(keep_vars=True): managed params hold no values; use keep_vars=False")
        engine = engine_of(self)
        # An update in flight may still fail, which the check after it sees.
        engine.drain()
        engine.state.check_whole()
        return model_state(super(), destination, prefix, lambda handle: engine.by_names.read_whole(handle, dtype))

    @alone
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole weights by their original names. fp32 values become the masters without rounding.

        Raises:
            RuntimeError: for missing or unexpected keys (with ``strict``) and wrong shapes, as ``nn.Module`` does.
                Nothing was changed then.
        """
        if assign:
            raise GeminiError("load_state_dict(assign=True): params live in chunks and are written, not replaced")
        engine = engine_of(self)
        # Params that an interrupted forward has left ordinary would be written past the guard.
        engine.recovery.forget_interrupted()
        return load_model_state(self, engine.by_names, state_dict, strict)

    @alone
    def save_pretrained(self, save_directory: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        """Save a Hugging Face model folder (safetensors), as in transformers, one file after another from where weights
        are.

        Args:
            dtype: None for the compute dtype; ``torch.float32`` writes the exact masters, and sets it in the config.

        Raises:
            ValueError: for another dtype, or for ``dtype`` together with ``state_dict``.
            StorageError: if the folder cannot be written.
        """
        engine = engine_of(self)
        engine.drain()
        engine.state.check_whole()
        # Before any file: slices that were cut by hand would be written over each other.
        engine.ranks.refuse_one_folder("save_pretrained", os.path.abspath(save_directory))
        return export.save_pretrained(engine, self, super(), save_directory, args, kwargs, dtype)

    # ---- refused ------------------------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        engine = engine_of(self)
        # `fn` is asked what it would do with one number: weights are not there to be moved.
        probe = torch.empty((), dtype=COMPUTE_DTYPES[engine.config.precision], device=engine.store.device.torch_device)
        moved = fn(probe)
        if moved.dtype == probe.dtype and moved.device == probe.device:
            move_buffers(self, fn, engine.params.in_fp32)
            return self
        raise GeminiError(
            f"this model is managed by Gemini: its params are {probe.dtype} on {probe.device} and cannot be moved to "
            f"{moved.dtype} on {moved.device}. Say it when wrapping: GeminiConfig(precision=..., device=...)"
        )

    __deepcopy__ = refused(
        GeminiError(
            "a managed model cannot be deep-copied: copy it before GeminiDDP(model), or load model.state_dict() into a "
            "fresh model"
        )
    )
    __reduce_ex__ = refused(
        GeminiError(
            "a managed model cannot be pickled (torch.save(model), copy.copy(model)): use model.save_pretrained(dir), "
            "torch.save(model.state_dict(), file) or gemini.save_checkpoint(dir, model, optimizer)"
        )
    )
    share_memory = refused(
        GeminiError("share_memory() on a managed model: share a plain model's memory, and load state_dict() into it")
    )
    resize_token_embeddings = refused(
        GeminiError("resize_token_embeddings on a managed model: resize the embeddings before GeminiDDP(model)")
    )
    # DistributedDataParallel asks for this before it touches any param; torch.jit for every name that there is.
    _ddp_params_and_buffers_to_ignore = property(
        refused(
            GeminiError(
                "neither DistributedDataParallel nor torch.jit takes a managed model, whose weights come and go: "
                "GeminiDDP is in the place of the first; for the other, load model.state_dict() into a plain model"
            )
        )
    )
    _replicate_for_data_parallel = refused(
        GeminiError("DataParallel cannot replicate a managed model: run one process per GPU with torchrun")
    )

    def _own(self, param: Any, caller: str = "gathered()") -> ParamHandle:
        handle = handle_of(param)
        # A param of another managed model has a handle too.
        if handle is None or handle.owner() is not engine_of(self):
            raise ValueError(f"{caller} was given a tensor that is not a managed param of this model")
        return handle


# ---- the class of a managed model ------------------------------------------------------------------------------------


def managed_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the class that is both ``original`` and ``GeminiDDP``; one per original, with its name."""
    return _make_class(original)  # type: ignore[arg-type]


@cache
def _make_class(original: type[nn.Module]) -> type[nn.Module]:
    namespace: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_gemini_original": original,
    }
    # GeminiDDP has these for models of transformers; others must answer hasattr() as they did.
    if not hasattr(original, "save_pretrained"):
        namespace["save_pretrained"] = refused(
            AttributeError(
                f"{original.__name__} is not a transformers model: use torch.save(model.state_dict(), file) or "
                "gemini.save_checkpoint(dir, model, optimizer)"
            )
        )
    if not hasattr(original, "resize_token_embeddings"):
        namespace["resize_token_embeddings"] = property(refused(AttributeError("resize_token_embeddings")))
    if not hasattr(original, "device"):
        namespace["device"] = _OfEngine()
    first = (*faces_of(original), GeminiDDP)
    laid_out_as: type | None = original
    while laid_out_as not in (nn.Module, None):
        laid_out_as = laid_out_as.__base__
    if laid_out_as is nn.Module:
        return type(original.__name__, (*first, original), namespace)
    # Python changes the class of an object to one of the same layout only, and a class has that of its first base. A
    # class whose own first base is not nn.Module (ABC, Generic[T], a mixin with __slots__) has a layout of its own: it
    # comes first among the bases, and behind ours in the order in which methods are looked for.
    theirs = original.__mro__
    first_ours = {"mro": lambda cls: [*(kind for kind in type.mro(cls) if kind not in theirs), *theirs]}
    kind: Any = type(f"Managed{type(original).__name__}", (type(original),), first_ours)
    return kind(original.__name__, (original, *first), namespace)


class _OfEngine:
    """``model.device``, where batches go, for models that have none. One that a model sets itself stays its own."""

    def __get__(self, model: Any, owner: type) -> Any:
        return self if model is None else model.__dict__["_gemini_engine"].store.device.torch_device


# ---- wrapping --------------------------------------------------------------------------------------------------------


def _wrap(model: Any, config: GeminiConfig | None = None, *, process_group: Any = None, mesh: Any = None) -> nn.Module:
    config = config_of(config)
    if not isinstance(model, nn.Module):
        raise TypeError(f"GeminiDDP(model, config) wraps an nn.Module, got {type(model).__name__}")
    if isinstance(model, GeminiDDP):
        raise ValueError(
            f"this {type(model).__name__} is managed already: GeminiDDP(model) wraps a model once. To wrap it "
            "otherwise make it an ordinary one first: gemini.release(model)"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TypeError(f"wrap the bare model (model.module): GeminiDDP takes the place of {type(model).__name__}")
    # Walked once, for all checks and for wrapping; refused before anything of the model is changed.
    structure = Structure(model)
    if any(isinstance(module, GeminiDDP) for _, module in structure.modules):
        raise ValueError("a part of this model is managed already: wrap the outermost model, once")
    refuse_compiled_whole(structure)
    refuse_unsupported(structure)
    refuse_unwrappable(structure, managed_class)
    if config.precision is None:
        warn_of_fp16(structure)
    return manage(model, config, process_group=process_group, mesh=mesh, structure=structure)


def manage(model: nn.Module, config: GeminiConfig, **how: Any) -> nn.Module:
    """Make ``model`` a GeminiDDP model (:func:`gemini.train.wrap.manage`)."""
    return wrap.manage(model, config, managed_class=managed_class, **how)


register("torch.optim.optimizer.register_optimizer_step_pre_hook", refuse_stock_optimizers)
