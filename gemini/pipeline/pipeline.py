"""``gemini.Pipeline``: one model in stages, over the ranks of a mesh's ``pp``, or one after another in one process.

Schedules over ranks are torch's own (``torch.distributed.pipelining``). In one process stages take turns breadth first:
each takes all micro-batches before the next one does, so that weights which do not stay are fetched twice in a step,
not twice for each micro-batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gemini.config import GeminiConfig, config_of
from gemini.errors import GeminiError
from gemini.memory.chunks.chunk import COMPUTE_DTYPES
from gemini.pipeline.course import Course, course_of
from gemini.pipeline.micro_batches import breadth_first
from gemini.pipeline.stages import Numbered, Stage, left_out, micro_batches_of, params_of_stages
from gemini.planning.parallel import balanced
from gemini.planning.plan import Plan
from gemini.ranks.agree import Attempt
from gemini.ranks.group import names_of, place_in, size_of
from gemini.ranks.wire import Tag, Wire, collectives_of, guarded
from gemini.tracing.ahead import batch_for
from gemini.train.context import sequence_batch
from gemini.train.ddp import manage
from gemini.train.gradients.store import sum_tied
from gemini.train.loading.from_pretrained import skeleton_from_pretrained
from gemini.train.loading.skeleton import Skeleton, attention_keyword
from gemini.train.modules.codes import first_coded
from gemini.train.modules.mixed import kept_in_fp32
from gemini.train.slices.alike import compare_batches
from gemini.train.slices.experts import experts_of
from gemini.train.slices.slicing import sliced_in, slices_of
from gemini.train.wrap import Fill

SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "bfs": "ScheduleLoopedBFS",
}
_ONE_STAGE = ("1f1b", "gpipe")


class Pipeline:
    """A managed model whose blocks are divided into pipeline stages.

        pipe = gemini.Pipeline(model, config, mesh=mesh, micro_batches=8, schedule="1f1b")
        optimizer = gemini.HybridAdam(pipe.parameters(), lr=1e-4)
        loss = pipe.step(input_ids=ids, labels=ids)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: the whole model, with the same weights on every rank of ``pp`` and ``tp``. It is changed in place: each
            rank keeps its own stages and drops the rest. Its forward must take ``labels`` and return the mean loss of a
            micro-batch, as ``.loss`` or alone. With :meth:`from_pretrained` no rank ever holds more than its own
            stages.
        config: the settings of :class:`gemini.GeminiDDP`. With several ranks its ``trace`` is not used, and
            ``gradients="retain"`` is "accumulate".
        mesh: a ``DeviceMesh`` with a dimension named ``pp``, and any others. None for one process.
        micro_batches: the number of equal parts into which each batch is divided.
        schedule: "1f1b" or "gpipe" with one stage per rank; "interleaved" or "bfs" (breadth first) with several. In one
            process only "bfs".
        stages: stages per rank. By default 1 for "1f1b" and "gpipe", and 2 for "interleaved" and "bfs"; in one process
            one for each block.
        example: a batch with which to find out how a forward runs through the model. By default it is made from the
            model's config.
        no_sync: with ``dp`` in the mesh, reduce gradients once per step instead of once per micro-batch. Each rank then
            keeps the gradients of its stages whole until its last backward: 4 bytes per param, which plans do not
            count.

    Attributes:
        model: the managed model, with the stages of this rank only.

    Raises:
        ValueError: for an unknown schedule, for sizes that do not fit it, and for a model whose blocks cannot be
            divided into stages. The message gives the reason.
        RankLost: if another rank does not come as far, for example because it was refused.
    """

    def __init__(
        self,
        model: nn.Module | Skeleton,
        config: GeminiConfig | None = None,
        *,
        mesh: DeviceMesh | None = None,
        micro_batches: int,
        schedule: str = "1f1b",
        stages: int | None = None,
        example: Mapping[str, Any] | None = None,
        no_sync: bool = False,
    ):
        fill: Fill | None = model.fill if isinstance(model, Skeleton) else None
        model = cast(nn.Module, model.model) if isinstance(model, Skeleton) else model
        config = config_of(config).resolved()
        if config.gradients == "retain":
            config = replace(config, gradients="accumulate")
        size = 1 if mesh is None else size_of(mesh, "pp")
        _check(schedule, size, micro_batches, stages, config)
        _check_model(model, config, size)
        course = course_of(model, _example_for(model) if example is None else example)
        course.twin.to(COMPUTE_DTYPES[config.precision])
        number = len(course.blocks)
        each = stages or (number if size == 1 else 1 if schedule in _ONE_STAGE else 2)
        if each * size > number:
            raise ValueError(
                f"{each * size} stages ({each} on each of {size} ranks) of {type(model).__name__}, which has {number} "
                "blocks: give stages= a smaller number, or a mesh with a smaller pp"
            )
        self._mesh, self._size, self._schedule, self._micro_batches = mesh, size, schedule, micro_batches
        said = [balanced(course.flops, each * size)]  # by the mesh's first rank: an example may be longer on another
        with guarded("dividing the model into stages"):
            for dim in range(0 if mesh is None else mesh.ndim):
                dist.broadcast_object_list(said, group=cast(DeviceMesh, mesh).get_group(dim), group_src=0)
        (self._ranges,) = said
        self._numbers = range(0 if mesh is None or size == 1 else place_in(mesh, "pp"), each * size, size)
        self._stages = [Stage(model, course, *self._ranges[i]) for i in self._numbers]
        self.model = self._managed(model, config, fill, course)
        self._numbered = [Numbered(stage) for stage in self._stages]
        self._width = course.width
        self._runner: tuple[Any, Any] | None = None
        self._no_sync, self._backwards_left = no_sync, 0

    def _managed(self, model: nn.Module, config: GeminiConfig, fill: Fill | None, course: Course) -> Any:
        """The model, or what of it the stages of this rank have."""
        mesh = self._mesh
        if mesh is None or self._size == 1:
            return manage(model, config, mesh=mesh, fill=fill)
        of_stages = params_of_stages(model, course, self._ranges, self._size)
        # While all of it is here: what is tied to another stage is cut alike.
        whole = slices_of(model, mesh, is_filled=fill is None) or experts_of(model, mesh, is_filled=fill is None)
        config = replace(config, trace=None)  # it is of the whole model
        with left_out(model, self._stages):
            return manage(model, config, mesh=mesh, of_stages=of_stages, whole=whole, fill=fill)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        config: GeminiConfig | None = None,
        *,
        mesh: DeviceMesh | None = None,
        micro_batches: int,
        schedule: str = "1f1b",
        stages: int | None = None,
        example: Mapping[str, Any] | None = None,
        no_sync: bool = False,
        model_class: Any = None,
        attn_implementation: Any = None,
        **kwargs: Any,
    ) -> Pipeline:
        """Load a transformers model into a pipeline. Weights are streamed from the files one param at a time: each rank
        reads those of its own stages into their home tiers.

        Args:
            path, model_class, attn_implementation: as in :func:`gemini.from_pretrained`.
            config, mesh, micro_batches, schedule, stages, example, no_sync: as in :class:`Pipeline`.
            **kwargs: passed to ``from_pretrained`` of the model class.

        Raises:
            ValueError: as :class:`Pipeline` and :func:`gemini.from_pretrained`; and, with several ranks, if the files
                lack weights, since each stage would initialize them in another way.
        """
        skeleton, info = skeleton_from_pretrained(
            path, model_class=model_class, **attention_keyword(attn_implementation), **kwargs
        )
        lacking = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
        if lacking and mesh is not None and size_of(mesh, "pp") > 1:
            raise ValueError(
                f"the files of {path} lack {len(lacking)} of this {type(skeleton.model).__name__}'s weights, for "
                f"example {lacking[0]!r}. They would be initialized at random, by each stage in another way. Load the "
                "model with transformers on every rank, with the same seed, and pass it to gemini.Pipeline"
            )
        how: dict[str, Any] = {"schedule": schedule, "stages": stages, "example": example, "no_sync": no_sync}
        return cls(skeleton, config, mesh=mesh, micro_batches=micro_batches, **how)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The params of this rank's stages, for an optimizer."""
        return self.model.parameters()  # type: ignore[no-any-return]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The params of this rank's stages with their names in the whole model."""
        return self.model.named_parameters()  # type: ignore[no-any-return]

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip gradients by the norm over all stages. See :meth:`GeminiDDP.clip_grad_norm_`."""
        return self.model.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]

    def step(self, **batch: Any) -> torch.Tensor:
        """Run forward and backward of all micro-batches. Call the optimizer's ``step()`` afterwards, as after
        ``loss.backward()``.

        Args:
            **batch: the tensors of a whole batch, samples first. All ranks of ``pp``, ``tp`` and ``cp`` must pass the
                same batch; with ``cp`` each rank takes its part of the sequences itself.

        Returns:
            The mean loss of the micro-batches: one number, the same on all ranks of ``pp``, ``tp`` and ``cp``.

        Raises:
            ValueError: if the batch cannot be divided into ``micro_batches`` equal parts, and as
                :func:`gemini.sequence_batch`.
            RankMismatch: if another rank of ``pp`` refuses its batch, or has one of another shape. In the first step
                also if its values differ.
            RankLost: if another rank does not answer.
        """
        ranks = self.model._gemini_engine.ranks
        parts = list[dict[str, Any]]()
        with Attempt(ValueError) as attempt:
            parts = [sequence_batch(part, self._mesh) for part in micro_batches_of(batch, self._micro_batches)]
        # Ranks that wait for each other's micro-batches in a schedule begin none that some of them cannot.
        compare_batches(ranks.stages, batch, values=self._runner is None, refusal=attempt.refusal)
        self._backwards_left = len(parts) * len(self._stages)
        if self._size > 1:
            loss = self._over_ranks(parts)
        else:

            def own_loss(output: Any, _: int) -> torch.Tensor:
                return self._stages[-1].loss_of(output) / self._micro_batches

            loss = breadth_first(self.model, self._stages, parts, own_loss, self._in_backward).sum()
        if ranks.context.size == 1:
            return loss
        of_parts = ranks.context.swap(Tag.VALUES, loss.float().cpu(), "the loss of the parts of sequences")
        return of_parts.mean().to(loss.device)  # type: ignore[no-any-return]

    def _in_backward(self) -> AbstractContextManager[None]:
        self._backwards_left -= 1
        return self.model.no_sync() if self._no_sync and self._backwards_left else nullcontext()

    def _over_ranks(self, parts: list[dict[str, Any]]) -> torch.Tensor:
        runner = self._runner_for(parts[0])
        losses: list[torch.Tensor] = []
        numbers = torch.arange(len(parts), device="cpu")
        for stage in self._numbered:
            stage.parts = parts
        try:
            with collectives_of("a schedule of torch"):
                # torch divides what it is given into micro-batches; of ours it is told the numbers.
                runner.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        except RuntimeError as e:
            if isinstance(e.__cause__, GeminiError):  # torch wraps what a stage raises in a page of its inputs
                raise e.__cause__ from None
            raise
        finally:
            for stage in self._numbered:
                stage.parts = ()
        engine = self.model._gemini_engine
        wire: Wire = engine.ranks.stages
        sum_tied(engine.params, engine.backward.gradients, wire)
        own = torch.stack([loss.detach().float().cpu() for loss in losses]).sum() if losses else torch.zeros(())
        rows = wire.swap(Tag.VALUES, own, "the loss of a pipeline")
        return rows[(len(self._ranges) - 1) % self._size].to(self.model.device)

    def _runner_for(self, part: Mapping[str, Any]) -> Any:
        """torch's schedule for micro-batches as long as ``part``; made anew where the last one was for others."""
        from torch.distributed import pipelining

        shape = (*_tokens_of(part).shape[:2], self._width)
        if self._runner is not None and self._runner[0] == shape:
            return self._runner[1]
        assert self._mesh is not None
        group = self._mesh.get_group(names_of(self._mesh).index("pp"))
        device = self.model._gemini_engine.store.device.torch_device
        dtype = COMPUTE_DTYPES[self.model._gemini_engine.config.precision]

        def hidden() -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

        in_backward = self._in_backward

        class ManagedStage(pipelining.PipelineStage):
            def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
                with in_backward():
                    return super().backward_one_chunk(*args, **kwargs)

        made = [
            ManagedStage(
                stage,
                number,
                len(self._ranges),
                device,
                input_args=() if stage.stage.is_first else hidden(),
                output_args=torch.empty((), device=device, requires_grad=True) if stage.stage.is_last else hidden(),
                group=group,
            )
            for number, stage in zip(self._numbers, self._numbered, strict=True)
        ]
        runner = getattr(pipelining, SCHEDULES[self._schedule])(
            made[0] if self._schedule in _ONE_STAGE else made,
            self._micro_batches,
            loss_fn=lambda loss, _: loss / self._micro_batches,
            scale_grads=False,
        )
        self._runner = shape, runner
        return runner


def _tokens_of(part: Mapping[str, Any]) -> torch.Tensor:
    """The tensor with samples and tokens first, as hidden states have them; a mask of four dimensions has not."""
    found = (part.get(name) for name in ("input_ids", "inputs_embeds", *part))
    tokens = next((value for value in found if isinstance(value, torch.Tensor) and value.dim() in (2, 3)), None)
    if tokens is None:
        raise ValueError(f"Pipeline over ranks passes on sequences of tokens (input_ids), and got {', '.join(part)}")
    return tokens


def _check(schedule: str, size: int, micro_batches: int, stages: int | None, config: GeminiConfig) -> None:
    if schedule not in tuple(SCHEDULES):
        raise ValueError(
            f"schedule={schedule!r} is not known; use one of {', '.join(SCHEDULES)} (schedules without bubbles compute "
            "gradients of weights apart from those of inputs, which managed params do not allow)"
        )
    if type(micro_batches) is not int or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}: a number of parts, 1 or more")
    if isinstance(config.placement, Plan) and config.placement.problem.gradients == "retain":
        raise ValueError("a Pipeline adds up gradients of micro-batches: make the plan with gradients='accumulate'")
    if stages is not None and (type(stages) is not int or stages < 1):
        raise ValueError(f"stages={stages!r}: a number of stages on each rank, 1 or more")
    if size == 1 and schedule != "bfs":
        raise ValueError(
            f"schedule={schedule!r} needs several ranks: pass a mesh with a dimension pp, or use schedule='bfs', which "
            "runs the stages one after the other in one process"
        )
    is_single = schedule in _ONE_STAGE
    if size > 1 and stages is not None and is_single != (stages == 1):
        how_many = "one stage" if is_single else f"several stages (those of {' and '.join(_ONE_STAGE)} have one)"
        raise ValueError(f"schedule={schedule!r} has {how_many} on each rank, got stages={stages}")
    if size > 1 and schedule == "1f1b" and micro_batches < size:
        raise ValueError(
            f"schedule='1f1b' over {size} ranks takes {size} micro-batches or more, got {micro_batches}: with fewer "
            "use 'gpipe'"
        )
    if size > 1 and schedule == "interleaved" and micro_batches % size:
        raise ValueError(
            f"schedule='interleaved' over {size} ranks takes a multiple of {size} micro-batches, got {micro_batches}"
        )
    if config.precision == "fp16":
        raise ValueError(
            'precision="fp16" in a pipeline: each stage would have a loss scale of its own, and gradients pass from '
            'stage to stage. Use precision="bf16"'
        )
    if config.gradients == "transient":
        raise ValueError(
            'gradients="transient" in a pipeline: gradients of micro-batches are added up before they are used. Use '
            'gradients="accumulate"'
        )


def _check_model(model: Any, config: GeminiConfig, size: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Pipeline(model, config) divides an nn.Module, got {type(model).__name__}")
    if sliced_in(model) is not None:
        raise ValueError(
            f"Pipeline of a {type(model).__name__} that is in slices: give it the whole model, which it cuts over "
            "the tp of its mesh by itself"
        )
    if coded := first_coded(model):
        raise ValueError(
            f"Pipeline of a model with 4-bit codes ({coded!r}): stages are of params in floating point. Use dp, "
            "which divides codes among ranks: GeminiDDP(model, config)"
        )
    kept = kept_in_fp32(model, config.precision, config.keep_fp32) if size > 1 else {}
    for name, param in model.named_parameters():
        if id(param) in kept:
            raise ValueError(
                f"Pipeline over ranks of a model with params that stay in fp32 (the first is {name!r}, "
                f"{kept[id(param)]}): its stages are all in {config.precision}. Cast them with "
                "GeminiConfig(keep_fp32=None), or use dp, which divides them among ranks: GeminiDDP(model, config)"
            )


def _example_for(model: nn.Module) -> dict[str, torch.Tensor]:
    """A small batch by the model's config; ValueError if it has none of transformers."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(
            f"Pipeline of a {type(model).__name__}, which has no transformers config: give it an example= "
            "batch, to see how a forward runs through the model"
        )
    return batch_for(model.config, 1, 16, model_class=type(model))
