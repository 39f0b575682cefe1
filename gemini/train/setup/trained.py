"""Which params are trained: what a param lacks whose ``requires_grad`` is set after the model was wrapped."""

from __future__ import annotations

from gemini.config import GeminiConfig
from gemini.errors import BudgetExceeded, GeminiError, human_bytes
from gemini.memory.chunks.chunk import Chunk, make_plane
from gemini.memory.store import ChunkStore
from gemini.planning.planes import RuleSpec, factor_bytes, plane_specs, precision_of
from gemini.tiers import Tier
from gemini.train.activations.store import ActivationStore
from gemini.train.params.factors import make_factors
from gemini.train.params.handle import ParamSet
from gemini.train.params.owner import GradHook


class TrainedParams:
    """Those of one model.

    Args:
        grad_hook: makes what takes the gradients of a param.
    """

    def __init__(
        self, params: ParamSet, store: ChunkStore, activations: ActivationStore, config: GeminiConfig, rule: RuleSpec,
        grad_hook: GradHook,
    ):  # fmt: skip
        self._params, self._store, self._activations = params, store, activations
        self._precision, self._gradients, self._rule = config.precision, config.gradients, rule
        self._grad_hook = grad_hook

    def follow(self) -> None:
        """After a flip of ``requires_grad``: a param that became trained gets its hook, its chunk what it lacks.

        Raises:
            BudgetExceeded: if no tier has room for that.
            GeminiError: in fp16, where a frozen param has no master.
        """
        self._activations.drain()
        for handle in self._params.handles:
            handle.trained = handle.param.requires_grad
            if handle.trained and handle.hook is None:
                self._make_trainable(handle.chunk)
                handle.hook = handle.param.register_post_accumulate_grad_hook(self._grad_hook(handle))

    def _make_trainable(self, chunk: Chunk) -> None:
        """Give a frozen chunk the planes of a trained one, on the fastest tier below the GPU with room for all."""
        if chunk.trained:
            return
        store, numel = self._store, chunk.weights.numel
        rule = self._rule.of(chunk.spec.exact)
        precision = precision_of(chunk.spec, self._precision)
        specs = plane_specs(precision, self._gradients, rule, trainable=True)
        missing = {kind: spec for kind, spec in specs.items() if kind not in chunk.planes}
        if precision == "fp16":
            raise GeminiError(
                f"{chunk.name} was frozen when the model was wrapped: in fp16 it has no fp32 master to train. "
                "Set requires_grad before wrapping, or use precision='bf16'"
            )
        if self._rule.whole and chunk.spec.numel > store.mover.tile:
            raise GeminiError(
                f"{chunk.name} was frozen when the model was wrapped, and the rule {self._rule.name!r} passes whole "
                "params through staging, which has no room for it: set requires_grad before wrapping"
            )
        num_bytes = sum(spec.page_bytes(numel) for spec in missing.values())
        below = [tier for tier in store.ledger.tiers if tier is not Tier.GPU]
        if rule.in_memory:
            below = [tier for tier in below if not tier.in_files]
        tier = next((t for t in below if store.ledger.make_room(t, num_bytes)), None)
        if tier is None:
            raise BudgetExceeded(
                f"{chunk.name} became trained after wrapping and needs {human_bytes(num_bytes)} for gradients and "
                "optimizer states, which no tier has: set requires_grad before wrapping, or raise a budget"
            )
        planes = {}
        for kind, spec in missing.items():
            with store.ledger.reserving(tier, spec.page_bytes(numel), kind):
                planes[kind] = make_plane(spec, numel, tier, store.device, store.spill)
        for handle in self._params.by_chunk[chunk.spec.index]:
            num_bytes = factor_bytes(self._rule.factors, tuple(handle.param.shape))
            store.ledger.reserve(Tier.CPU, num_bytes, "factors")
            handle.factors = make_factors(self._rule, handle.param.shape)
        chunk.change_planes(planes)
        chunk.trained = True
