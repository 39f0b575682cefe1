"""The optimizers by name: each is :class:`gemini.HybridOptimizer` with its rule, for managed and plain params.

A model of managed params is wrapped for the rule: ``GeminiConfig(optimizer=gemini.optim.LionRule())``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gemini.optim.elementwise import AdanRule, LionRule, PlainSGDRule, SGDRule
from gemini.optim.matrices import AdaLomoRule, MuonRule
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer

AdamW = HybridAdam


class SGD(HybridOptimizer):
    """SGD as ``torch.optim.SGD``: with ``momentum`` by :class:`SGDRule` (8 bytes per param), without by
    :class:`PlainSGDRule` (4 bytes).

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate.
        momentum: factor of the buffer.
        dampening: what is left out of every gradient but the first before it is added to the buffer.
        weight_decay: the L2 coefficient.
        nesterov: step along the gradient and the buffer together.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = SGDRule.defaults["lr"],
        momentum: float = SGDRule.defaults["momentum"],
        dampening: float = SGDRule.defaults["dampening"],
        weight_decay: float = SGDRule.defaults["weight_decay"],
        nesterov: bool = SGDRule.defaults["nesterov"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            SGDRule() if momentum else PlainSGDRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )


class Lion(HybridOptimizer):
    """:class:`LionRule`: 8 bytes per param.

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate: every element moves by it.
        betas: of the interpolation whose sign is the step, and of the average that is kept.
        weight_decay: decoupled decay.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = LionRule.defaults["lr"],
        betas: tuple[float, float] = LionRule.defaults["betas"],
        weight_decay: float = LionRule.defaults["weight_decay"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params, LionRule(), step_in_backward=step_in_backward, lr=lr, betas=betas, weight_decay=weight_decay
        )


class LOMO(HybridOptimizer):
    """Plain SGD inside backward (Lv et al., 2023, arXiv:2306.09782): :class:`PlainSGDRule`, 4 bytes per param and no
    gradients kept, with ``GeminiConfig(optimizer=gemini.optim.PlainSGDRule(), gradients="transient")``.

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate.
        weight_decay: the L2 coefficient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = PlainSGDRule.defaults["lr"],
        weight_decay: float = PlainSGDRule.defaults["weight_decay"],
    ):
        super().__init__(params, PlainSGDRule(), step_in_backward=True, lr=lr, weight_decay=weight_decay)


class AdaLomo(HybridOptimizer):
    """:class:`AdaLomoRule`: 4 bytes per param, and no gradients kept with ``step_in_backward=True`` and
    ``GeminiConfig(gradients="transient")``.

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate, of a param's own length.
        decay_rate: the average of squares has the factor 1 - t**decay_rate at step t.
        eps: added to squares, and the least length of a param that counts.
        clip_threshold: the root mean square of a step before lr, at most.
        weight_decay: decoupled decay, of the length of the param as its step is.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = AdaLomoRule.defaults["lr"],
        decay_rate: float = AdaLomoRule.defaults["decay_rate"],
        eps: tuple[float, float] = AdaLomoRule.defaults["eps"],
        clip_threshold: float = AdaLomoRule.defaults["clip_threshold"],
        weight_decay: float = AdaLomoRule.defaults["weight_decay"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            AdaLomoRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            decay_rate=decay_rate,
            eps=eps,
            clip_threshold=clip_threshold,
            weight_decay=weight_decay,
        )


class Muon(HybridOptimizer):
    """:class:`MuonRule`: 12 bytes per param.

    Args:
        params: as of :class:`gemini.HybridOptimizer`: matrices, and in groups with ``adamw=True`` the rest
            (:func:`muon_groups`).
        lr: learning rate, of AdamW's groups too where they say no other.
        weight_decay: decoupled decay, of both.
        momentum: factor of the momentum.
        nesterov: step along the gradient and the momentum together.
        ns_steps: Newton-Schulz iterations.
        adjust_lr: how the step of a matrix is scaled: "original" by the root of its height over its width if it is
            tall, "match_rms_adamw" so that it is as long as AdamW's, whose learning rates then serve.
        betas: AdamW's averages.
        eps: added to AdamW's denominator.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = MuonRule.defaults["lr"],
        weight_decay: float = MuonRule.defaults["weight_decay"],
        momentum: float = MuonRule.defaults["momentum"],
        nesterov: bool = MuonRule.defaults["nesterov"],
        ns_steps: int = MuonRule.defaults["ns_steps"],
        adjust_lr: str = MuonRule.defaults["adjust_lr"],
        betas: tuple[float, float] = MuonRule.defaults["betas"],
        eps: float = MuonRule.defaults["eps"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            MuonRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr=adjust_lr,
            betas=betas,
            eps=eps,
        )


def muon_groups(model: nn.Module, **adamw: Any) -> list[dict[str, Any]]:
    """The trained params of a model in two groups, as Muon's authors advise: hidden matrices, and what AdamW updates:
    embeddings, the head, and all that is no matrix.

    Args:
        model: the head is what its ``get_output_embeddings()`` gives, if it has one.
        adamw: hyperparameters of the second group (``lr=3e-4``).
    """
    ends = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    ends.add(id(getattr(head, "weight", None)))
    trained = [param for param in model.parameters() if param.requires_grad]
    hidden = [param for param in trained if param.dim() == 2 and id(param) not in ends]
    others = [param for param in trained if all(param is not one for one in hidden)]
    groups = [{"params": hidden}, {"params": others, "adamw": True, **adamw}]
    return [group for group in groups if group["params"]]


class Adan(HybridOptimizer):
    """:class:`AdanRule`: 20 bytes per param.

    Args:
        params: as of :class:`gemini.HybridOptimizer`.
        lr: learning rate.
        betas: of the averages of gradients, of their differences, and of squares.
        eps: added to the denominator.
        weight_decay: decay by a proximal step.
        no_prox: decay as in AdamW instead.
        step_in_backward: as of :class:`gemini.HybridOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = AdanRule.defaults["lr"],
        betas: tuple[float, float, float] = AdanRule.defaults["betas"],
        eps: float = AdanRule.defaults["eps"],
        weight_decay: float = AdanRule.defaults["weight_decay"],
        no_prox: bool = AdanRule.defaults["no_prox"],
        *,
        step_in_backward: bool = False,
    ):
        super().__init__(
            params,
            AdanRule(),
            step_in_backward=step_in_backward,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            no_prox=no_prox,
        )
