"""What an optimizer asks of its model: gradients that are ready, their norm and scale, and the updates themselves."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gemini import kernels
from gemini.errors import GeminiError, warn
from gemini.patches import replaced
from gemini.ranks.agree import agree
from gemini.rules import UpdateRule
from gemini.tiers import Tier
from gemini.train.params.handle import Leftover, ParamHandle, Stepper, note_writes, stepping_in_backward, written_to
from gemini.train.passes.backward import BackwardPass, Recovery
from gemini.train.passes.forward import Parts
from gemini.train.sharding.facts import facts_of_step
from gemini.train.step import alone
from gemini.train.update.tiles import ParamUpdate


@dataclass
class MeasuredNorm:
    """Result of a backward that only measures."""

    norm: float = math.nan
    """The 2-norm of all gradients, before clipping; NaN until the block is over."""


class Stepping:
    """Makes the steps of one model. Called by the training thread alone, and never inside a backward. ``mode``: how
    gradients are kept, as ``GeminiConfig(gradients=)`` says.
    """

    def __init__(self, parts: Parts, rule: UpdateRule, mode: str, backward: BackwardPass, recovery: Recovery):
        store, scaling, updates = parts.store, parts.scaling, parts.updates
        self.rule, self.state, self.company = rule, parts.state, parts.company
        self.scaling, self.updates = scaling, updates
        self._params, self._store, self._mode, self._moves = parts.params, store, mode, store.moves
        self._gradients, self._sink, self._slices = parts.gradients, parts.sink, parts.slices
        self._backward, self._exposure, self._recovery = backward, parts.exposure, recovery
        self.looks_for_optimizers = True  # whether the first step with gradients is still to come
        # Ranks must all skip a step or none, so where they share one the host has to know.
        self._may_stop_there = (
            store.device.tier is Tier.GPU and not self._sink.divides and parts.gradients.norms.knows_only_own
        )

    def warn_of_no_optimizer(self) -> None:
        """Name, after the first step and once per model, params with a gradient that nobody will use."""
        self.looks_for_optimizers = False
        left = [h for h in self._params.handles if h.has_grad and not h.optimizer()]
        if left:
            warn(
                f"{len(left)} of {len(self._params.handles)} params, for example {left[0].name!r}, have a gradient and "
                "no optimizer: nothing updates them, and their gradients take memory and count in clip_grad_norm_(). "
                "Give them to an optimizer, or freeze them with requires_grad_(False). This is said once per model"
            )

    # ---- before the step ----------------------------------------------------------------------------------------

    def check_mode(self, step_in_backward: bool, speculate: bool) -> None:
        """Refuse an optimizer that does not fit how gradients are kept."""
        transient = self._mode == "transient"
        if transient and not step_in_backward:
            raise GeminiError(
                'GeminiConfig(gradients="transient") keeps no gradients for step(): make the optimizer with '
                'HybridAdam(..., step_in_backward=True), or use gradients="retain"'
            )
        if transient and speculate:
            raise GeminiError(
                'GeminiConfig(gradients="transient") keeps no gradients for a step that was guessed wrong, which '
                'speculate=True needs: use gradients="retain" or "accumulate", or leave speculate out'
            )
        if speculate and self._sink.has_replicas:
            raise GeminiError(
                "speculate=True with replicas: their gradients are added up after backward. Leave speculate and "
                "step_in_backward out, or shard the model over all ranks"
            )
        is_fp16 = self.scaling.is_needed
        if step_in_backward and not (transient or speculate) and (self._sink.divides or is_fp16):
            why = "in fp16" if is_fp16 else "with several ranks"
            raise GeminiError(
                f"HybridAdam(step_in_backward=True) with gradients={self._mode!r} {why}: whether gradients are finite "
                "is known only when all are there. Leave step_in_backward out"
                + ("" if is_fp16 else ', or use GeminiConfig(gradients="transient")')
            )

    @alone
    def clip_grad_norm(
        self, max_norm: float, handles: list[ParamHandle] | None, *, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Total 2-norm of the gradients of ``handles`` (None: of all), unscaled, as it was before. Nothing is scaled
        here. A coefficient is noted, for the whole model or beside each of the params, and the update applies it as it
        reads the gradients. Where all of them were summed on a GPU, clipping the whole model leaves both numbers there,
        and the host waits for neither; else it waits here for the sums of squares, once, and ``optimizer.step()`` then
        knows them already.
        """
        self._recovery.forget_interrupted()
        if self._mode == "transient":
            raise GeminiError(
                'clipping needs every gradient before the first update: gradients="transient" cannot be clipped '
                "after it. Run backward twice, first inside `with model.measuring_grad_norm(max_norm)`, or use "
                'GeminiConfig(gradients="retain")'
            )
        if self.state.updated_in_backward:
            raise GeminiError(
                "clipping needs every gradient before the first update, and HybridAdam(step_in_backward=True) has used "
                "them: leave step_in_backward out, or say speculate=True"
            )
        # Replicas add up first: every rank comes here, as it must call clip_grad_norm_ too.
        self._sink.settle()
        if handles is None and not error_if_nonfinite:
            # Where all sums are on the device that keeps them, nobody waits for the norm.
            knows = not (self.state.clipping.was_asked or self._sink.divides or self.scaling.is_scaled)
            if knows and (clip := self._gradients.norms.clip_factor(float(max_norm))):
                self.state.clipping.there, self.state.clipping.was_asked = clip, True
                return clip.norm.float().view(())
        if max_norm != math.inf:  # without a limit, one rank may look at it alone
            self._sink.note_clipping(float(max_norm), handles)
        chosen = self._params.handles if handles is None else handles
        total = self._norm_of(chosen)
        if error_if_nonfinite:
            self._gradients.norms.check_finite(chosen)
        # A norm of inf or NaN clips nothing: the step refuses or skips these gradients.
        if math.isfinite(total):
            coefficient = kernels.clip_coefficient(total, float(max_norm))
            if handles is None:
                self.state.clipping.multiply(coefficient)
            else:
                self._gradients.clip(handles, coefficient)
                self.state.clipping.was_asked = True
        return torch.full((), total, dtype=torch.float32, device=self._store.device.torch_device)

    def _norm_of(self, handles: list[ParamHandle]) -> float:
        """The norm of these gradients, unscaled; the host waits for it."""
        # Gradients that a scaler has unscaled and those that it has not have different units: each its own sum.
        left = self.scaling.left_scaled(handles)
        used = [handle for handle in handles if handle not in left] if left else handles
        total = math.sqrt(self._gradients.norms.total_sum(used)) * self.scaling.unscale_seen(handles)
        if left:
            total = math.hypot(total, math.sqrt(self._gradients.norms.total_sum(left)))
        # What was clipped before is part of the norm: a second call finds the norm after the first.
        self.state.clipping.fetch()
        return total * self.state.clipping.coefficient

    @alone
    def find_nonfinite(self, handles: list[ParamHandle]) -> bool:
        """Tell ``GradScaler.unscale_`` whether these gradients, scaled by a scaler, hold inf or NaN."""
        if not self.scaling.is_scaled:
            raise GeminiError(
                "GradScaler.unscale_() or step() on gradients of a loss that was not scaled: call "
                "scaler.scale(loss).backward()"
            )
        self._gradients.await_sums()
        return not math.isfinite(self._gradients.norms.total_sum(handles))

    @alone
    def settle(self) -> None:
        """Make ready for a look at gradients: no interrupted pass is left, and ranks have what all of them have."""
        self._recovery.forget_interrupted()
        self._sink.settle()

    @contextmanager
    def measuring(self, max_norm: float) -> Iterator[MeasuredNorm]:
        """Let a backward inside leave the norm of its gradients alone; the next one updates, clipped by it."""
        self._recovery.forget_interrupted()
        if self._mode != "transient" or self._sink.divides:
            why = "with several ranks" if self._mode == "transient" else f"with gradients={self._mode!r}"
            raise GeminiError(
                f"measuring_grad_norm() {why}: one backward does, and model.clip_grad_norm_(max_norm) after it"
                + (', with GeminiConfig(gradients="retain")' if self._mode == "transient" else "")
            )
        if self.state.updated_in_backward:
            raise GeminiError(
                "measuring_grad_norm() after a backward that has updated: call optimizer.step() before it"
            )
        handles, measured = self._params.handles, MeasuredNorm()
        try:
            self.state.clipping.in_backward = 1.0
            with replaced(self.state, "measuring", True):
                yield measured
            if not self._sink.has_gradients:
                raise GeminiError("measuring_grad_norm(): no backward gave a gradient inside of it")
            # First: a norm of NaN would make a coefficient of NaN, and the next backward would write it into weights.
            self._gradients.norms.check_finite(handles)
            measured.norm = math.sqrt(self._gradients.norms.total_sum(handles))
            self.state.clipping.in_backward = kernels.clip_coefficient(measured.norm, max_norm)
        finally:
            # The sums of the measured gradients would else count as gradients that wait.
            self._backward.discard()

    @alone
    def discard(self, handles: list[ParamHandle] | None = None, *, to_zero: bool = False) -> None:
        """Forget these gradients, or all; zeros may take their place."""
        self._recovery.forget_interrupted()
        self._backward.discard(handles, leftover=Leftover.ZEROS if to_zero else Leftover.NOTHING)

    @alone
    def skip(self, handles: list[ParamHandle]) -> None:
        """Forget these gradients, in place of a step with them (``GradScaler.step`` has found inf or NaN)."""
        self._recovery.forget_interrupted()
        self._backward.discard(handles, leftover=Leftover.USED)
        if stepping_in_backward:
            self.updates.guesses.note_step(is_plain=False)
        self.end_step()

    # ---- the step -----------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: Stepper) -> None:
        """Begin ``optimizer.step()``: the model is whole, and all ranks are about to make the same step."""
        if self.state.corrupted_by:
            self.state.check_whole()
        self.state.check_there()
        self.state.check_masters("optimizer.step()")
        if self.state.num_open:
            self._recovery.forget_interrupted()
        # Updates inside backward that were finite only as far as the device knows are told of before the step ends.
        if self.state.updated_in_backward:
            self.updates.unseen.look()
        # On all ranks, and before anything changes: one that disagrees raises on every rank.
        self._sink.agree_on_step(optimizer)
        if self._slices.size > 1:
            facts = facts_of_step(self._params.handles, [optimizer], self.scaling, self.state)
            agree(self._slices, "optimizer.step()", lambda: facts)

    def step(self, taking: Mapping[ParamHandle, Mapping[str, Any]]) -> None:
        """Update these params (``takes_step``), each by the hyperparameters of its group, and end the step. Gradients
        that are not finite are refused, and nothing was changed. Where they were summed and all of the update is on a
        GPU, the GPU looks: it then leaves everything as it is, and the host is told before the next backward takes its
        first gradient, or by whoever waits before.
        """
        handles = list(taking)
        if self.scaling.is_scaled:
            self.scaling.check_unscaled(handle for handle in handles if handle.has_grad)
        # All params of these chunks: an update goes over the whole window, and a write beside it would be lost with it.
        indices = {handle.chunk.spec.index for handle in handles}
        written = written_to([handle for index in indices for handle in self._params.by_chunk[index]])
        if written or self._exposure.written:
            self._exposure.refuse(written)
        clip, stop = self._look(handles)
        # Params that take the step without a gradient of their own (`zero_grad(set_to_none=False)`).
        missing = [handle for handle in handles if handle.norm_sums is None]
        if missing:
            self._gradients.land_zeros(missing)
        coefficient = 1.0 if clip else self.state.clipping.coefficient
        # Before the lines below: hyperparameters are computed with the step count and clipping that they reset.
        by_chunk = self._by_chunk(taking, coefficient)
        is_plain = None  # nobody asks where nothing is guessed
        if stepping_in_backward:
            is_plain = not clip and coefficient == 1.0 and all(handle.clip == 1.0 for handle in handles)
        # From here on the step changes the model. What breaks off in between leaves params counted and not updated.
        try:
            note_writes(handles)
            for handle in handles:
                handle.num_steps += 1
                handle.leftover = Leftover.USED
                handle.norm_sums, handle.clip, handle.clip_folded = None, 1.0, 1.0
            # Last in the block: a worker may begin as soon as it has the first update.
            self.updates.submit(by_chunk, stop, clip.factor if clip else None)
            if is_plain is not None:
                self.updates.guesses.note_step(is_plain=is_plain)
        except BaseException as e:  # an interrupt between two chunks breaks the step as well
            self.state.mark_corrupted(e)
            raise
        self.end_step()

    def _look(self, handles: list[ParamHandle]) -> tuple[Any, Any]:
        """Refuse gradients that are not finite. On a GPU that looks itself: the clipping that it has, and the flag that
        stops the update; else the host has looked, and has both as numbers.
        """
        clip, stop = self.state.clipping.there, None
        if self._may_stop_there and not self.scaling.is_scaled:
            for handle in handles:
                handle.refuse_incomplete_gradient()  # the host's own look does this with the sums
            stop = self.updates.unseen.stop_for_step(handles, clip)
        # The host waits for the sums of squares here.
        if stop is None:
            self._gradients.norms.check_finite(handles)
            if clip and handles:
                self.state.clipping.fetch()
                clip = None
        return clip, stop

    def _by_chunk(
        self, taking: Mapping[ParamHandle, Mapping[str, Any]], coefficient: float
    ) -> Mapping[int, list[ParamUpdate]]:
        """Make the updates, by chunk. ``coefficient``: of clipping the whole model, if the device does not have it."""
        scale = coefficient * (self.scaling.unscale if self.scaling.is_scaled else 1.0)
        by_chunk: dict[int, list[ParamUpdate]] = {}
        # One value for all params of a group with as many steps: a rule computes it once for thousands of params.
        known: dict[tuple[int, int, float], Hashable] = {}
        for handle, group in taking.items():
            key = id(group), handle.num_steps, scale * handle.clip
            if key not in known:
                known[key] = self.rule.scalars(group, handle.num_steps + 1, scale * handle.clip)
            by_chunk.setdefault(handle.chunk.spec.index, []).append(ParamUpdate(handle, known[key]))
        return by_chunk

    @alone
    def restored(self) -> None:
        """Drop what belongs to masters and states of before: they are those of a checkpoint now."""
        self.discard()
        self.state.mark_restored()
        self._store.manager.drop(self._store.chunks)

    def end_step(self) -> None:
        """End an optimizer step: what moved since the last one is what the report shows."""
        # Gradients that this step has not used (another optimizer's) keep their clipping; later ones do not get it.
        if self.state.clipping.was_asked:
            self._backward.fold_clipping()
        self.state.clipping.in_backward = 1.0
        self.state.updated_in_backward, self.state.has_stepped = False, True
        self._store.mover.watch.end_step()
        # All ranks come here, whatever they updated: their agreement counts steps.
        self.company.end_step()
        for recording in self._backward.observers.recordings:
            recording.end_step()
        # Last: the next forward's weights are fetched behind what the program does between steps.
        if self._moves:
            self._store.manager.look_ahead(between=True)
