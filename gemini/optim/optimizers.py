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
    """SGD, as ``torch.optim.SGD``. With ``momentum`` it has :class:`SGDRule` (8 bytes per param), without it
    :class:`PlainSGDRule` (4 bytes).

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
        lr: learning rate.
        momentum: the momentum factor.
        dampening: gradients are multiplied by ``1 - dampening`` before they are added to the momentum buffer, except
            the first one.
        weight_decay: the L2 coefficient.
        nesterov: use Nesterov momentum.
        step_in_backward: as in :class:`gemini.HybridOptimizer`.
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
    """Lion: :class:`LionRule`, 8 bytes per param.

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
        lr: learning rate. Every element moves by it.
        betas: the weights of the interpolation whose sign is the step, and of the momentum.
        weight_decay: decoupled weight decay.
        step_in_backward: as in :class:`gemini.HybridOptimizer`.
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
    """SGD that updates params during backward (Lv et al., 2023, arXiv:2306.09782): :class:`PlainSGDRule`, 4 bytes per
    param. With ``GeminiConfig(optimizer=gemini.optim.PlainSGDRule(), gradients="transient")`` no gradients are kept.

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
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
    """AdaLomo: :class:`AdaLomoRule`, 4 bytes per param. With ``step_in_backward=True`` and
    ``GeminiConfig(gradients="transient")`` no gradients are kept.

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
        lr: learning rate, relative to the root mean square of the param.
        decay_rate: at step t, the average of squared gradients decays by 1 - t**decay_rate.
        eps: the first is added to squared gradients; the second is the smallest root mean square of a param.
        clip_threshold: the largest root mean square of a step, before it is multiplied by ``lr``.
        weight_decay: decoupled weight decay, relative to the root mean square of the param as well.
        step_in_backward: as in :class:`gemini.HybridOptimizer`.
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
    """Two param groups for Muon, as its authors advise: the hidden matrices, which Muon updates, and the rest
    (embeddings, the head, vectors), which AdamW updates. Frozen params are in neither.

    Args:
        model: the model. Its head is what ``get_output_embeddings()`` returns, if it has this method.
        adamw: hyperparameters of the second group, such as ``lr=3e-4``.
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
    """Adan: :class:`AdanRule`, 20 bytes per param.

    Args:
        params: as in :class:`gemini.HybridOptimizer`.
        lr: learning rate.
        betas: decay rates of the averages of gradients, of their differences, and of squares.
        eps: added to the denominator.
        weight_decay: weight decay, as a proximal step.
        no_prox: use decoupled weight decay instead, as in AdamW.
        step_in_backward: as in :class:`gemini.HybridOptimizer`.
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
