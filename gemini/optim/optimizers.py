"""The optimizers by name: each is :class:`gemini.HybridOptimizer` with its rule, for managed and plain params.

A model of managed params is wrapped for the rule: ``GeminiConfig(optimizer=gemini.optim.LionRule())``. Signature and
documentation of an optimizer are made of the hyperparameters of its rule; one that can do more has a class here.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, ClassVar

import torch
from torch import nn

from gemini.errors import GeminiError
from gemini.optim.elementwise import PlainSGDRule, SGDRule, SophiaGRule, SophiaHRule
from gemini.optim.matrices import MuonRule
from gemini.planning.rules import RULES, rule_named
from gemini.rules import Hyper, UpdateRule
from gemini.train.optimizers.optimizer import HybridAdam, HybridOptimizer
from gemini.train.params.handle import handle_of, params_of

AdamW = HybridAdam


class RuleOptimizer(HybridOptimizer):
    """An optimizer of one rule, which takes that rule's hyperparameters: what its classes are made of."""

    _rule: ClassVar[UpdateRule]

    def __init_subclass__(cls, rule: UpdateRule | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if rule is None:
            return
        shown = {name: hyper for name, hyper in rule.hypers.items() if hyper.words}
        of_rule, num_bytes = type(rule), 4 + sum(spec.block_bytes for spec in rule.spec.planes)
        about = f"Its rule is :class:`~{of_rule.__module__}.{of_rule.__name__}`, of {num_bytes} bytes per param."
        words = {"params": "as in :class:`gemini.HybridOptimizer`.", **{name: h.words for name, h in shown.items()}}
        words["step_in_backward"] = "as in :class:`gemini.HybridOptimizer`."
        summary = cls.__doc__ or f"{inspect.cleandoc(of_rule.__doc__ or '')}\n\n{about}"
        arguments = "\n".join(
            textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
            for name, text in words.items()
        )
        cls.__doc__ = f"{inspect.cleandoc(summary)}\n\nArgs:\n{arguments}\n"
        cls.__init__, cls._rule = _init_with(shown), rule  # type: ignore[method-assign]

    def _rule_for(self, hypers: Mapping[str, Any]) -> UpdateRule:
        """The rule for these hyperparameters."""
        return self._rule


def _init_with(hypers: Mapping[str, Hyper]) -> Any:
    """A constructor whose signature has the hyperparameters."""
    kinds = inspect.Parameter
    signature = inspect.Signature(
        [
            kinds("self", kinds.POSITIONAL_OR_KEYWORD),
            kinds("params", kinds.POSITIONAL_OR_KEYWORD, annotation=Any),
            *(kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=hyper.default) for name, hyper in hypers.items()),
            kinds("step_in_backward", kinds.KEYWORD_ONLY, default=False, annotation=bool),
        ]
    )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as e:
            raise TypeError(f"{type(self).__name__}: {e}") from None
        bound.apply_defaults()
        given = {name: bound.arguments[name] for name in hypers}
        used = bound.arguments["step_in_backward"]
        HybridOptimizer.__init__(self, bound.arguments["params"], self._rule_for(given), step_in_backward=used, **given)

    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def optimizer_named(name: str) -> type[HybridOptimizer]:
    """The class of the registry that is called so: one of this module, or made of its rule."""
    if name not in globals():
        entry = next(key for key, entry in RULES.items() if entry.optimizer == name)
        globals()[name] = type(name, (RuleOptimizer,), {"__module__": "gemini.optim"}, rule=rule_named(entry))
    return globals()[name]  # type: ignore[no-any-return]


class SGD(RuleOptimizer, rule=SGDRule()):
    """SGD, as ``torch.optim.SGD``. With ``momentum`` it has :class:`~gemini.optim.elementwise.SGDRule` (8 bytes per
    param), without it :class:`~gemini.optim.elementwise.PlainSGDRule` (4 bytes).
    """

    def _rule_for(self, hypers: Mapping[str, Any]) -> UpdateRule:
        return SGDRule() if hypers["momentum"] else PlainSGDRule()


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


def muon_groups(model: nn.Module, **adamw: Any) -> list[dict[str, Any]]:
    """Two param groups for Muon, as its authors advise: the hidden matrices, which Muon updates, and the rest
    (embeddings, the head, vectors), which AdamW updates. Frozen params are in neither.

    Args:
        model: the model. Its head is what ``get_output_embeddings()`` returns, if it has this method.
        adamw: hyperparameters of the second group, such as ``lr=3e-4``.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = MuonRule().grouped(model, [{"params": trained}])
    return [{**group, **adamw} if group["adamw"] else group for group in groups]


class _Sophia(RuleOptimizer):
    @contextmanager
    def _estimating(self, call: str) -> Iterator[None]:
        """Take updates inside as estimates. Raises GeminiError where gradients of a training step are there."""
        for param in params_of(self):
            handle = handle_of(param)
            if param.grad is not None if handle is None else handle.has_grad:
                raise GeminiError(
                    f"{call}() begins while gradients of a training step are there, which would go into the "
                    "estimate: call step() and zero_grad() before it"
                )
        for group in self.param_groups:
            group["estimates_hessian"] = True
        try:
            yield
            self.step()
        finally:
            for group in self.param_groups:
                group["estimates_hessian"] = False
            self.zero_grad()


class HessianProbe:
    """Hutchinson's estimate of the Hessian's diagonal, made of two backwards: products with a random vector.

    The first backward is recorded (``create_graph``). Of every gradient only its product with the vector is kept, a
    number that can be differentiated again, so that no gradients wait; the gradients of the sum of these numbers are
    the Hessian times the vector, and arrive as those of any backward. The vector is drawn anew for each param, from a
    normal distribution, out of the number of the estimate and that of the param: every rank and placement has the same.
    """

    def __init__(self, number: int, params: list[nn.Parameter]):
        self._number = number
        # By identity, in the order of the optimizer: all ranks draw the same vectors.
        self._places = {id(param): place for place, param in enumerate(params)}
        self._products: list[torch.Tensor] | None = []  # None when the second backward has begun

    def take(self, param: nn.Parameter, grad: torch.Tensor) -> torch.Tensor | None:
        """The part to keep of a gradient that has arrived: the estimate, in the second backward; else nothing."""
        place = self._places.get(id(param))
        if place is None:  # of a param of another optimizer
            return None
        vector = self.vector(place, grad)
        if self._products is None:
            return (grad.float() * vector).to(grad.dtype)
        if grad.requires_grad:
            # In fp32, and with its graph: the second backward goes through it.
            self._products.append((grad.float() * vector).sum())
        return None

    def take_plain(self, params: list[nn.Parameter]) -> None:
        """The same for params whose gradients stay with them."""
        for param in params:
            if param.grad is not None:
                param.grad = self.take(param, param.grad)

    def product(self) -> torch.Tensor:
        """The gradient times the vector. What arrives from now on is the Hessian times the vector. Raises GeminiError
        if the gradient of no param depends on any.
        """
        # From here on gradients are those of the second backward.
        products, self._products = self._products, None
        if not products:
            raise GeminiError(
                "no gradient of this loss depends on a param of this optimizer: its Hessian is zero. Give a loss that "
                "the model has computed, with gradients enabled"
            )
        device = products[0].device
        return torch.stack([product.to(device) for product in products]).sum()

    def vector(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """The random vector for the param at ``place`` among those of the optimizer, in the shape of ``like``."""
        seed = int.from_bytes(blake2b(f"{self._number} {place}".encode(), digest_size=8).digest(), "big")
        # On the CPU: generators of devices give other numbers, and each kind its own.
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


class SophiaG(_Sophia, rule=SophiaGRule()):
    @contextmanager
    def estimating_hessian(self) -> Iterator[None]:
        """Gradients of this block go into the estimate of the Hessian, at its end; weights and momentum stay.

        To be used about every tenth step, between steps, with the loss on labels that the model draws itself::

            logits = model(input_ids=ids).logits.float()
            labels = torch.distributions.Categorical(logits=logits).sample()
            with optimizer.estimating_hessian():
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

        An estimate counts as an update of its params: "step" in their states is of both. Gradients are gone afterwards.

        Raises:
            GeminiError: where gradients of a training step are still there; and what :meth:`step` raises.
        """
        with self._estimating("estimating_hessian"):
            yield


class SophiaH(_Sophia, rule=SophiaHRule()):
    def estimate_hessian(self, loss: torch.Tensor) -> None:
        """Make an estimate of the Hessian of ``loss`` (a scalar) and average it in; weights and momentum stay.

        To be called about every tenth step, between steps, with the loss of a batch, or of a part of one: it is
        differentiated twice, which needs the room of another graph beside that of a step, and operations that torch
        can differentiate twice (not its fast attention kernels: ``attn_implementation="eager"``)::

            optimizer.estimate_hessian(model(input_ids=ids, labels=ids).loss)

        An estimate counts as an update of its params: "step" in their states is of both. Params whose gradient depends
        on no param keep theirs.

        Raises:
            GeminiError: where gradients of a training step are still there, in fp16, and for a loss that cannot be
                differentiated twice (with context parallel, attention over gathered keys and values cannot); and what
                :meth:`step` raises.
        """
        params = params_of(self)
        owner = self.owner()
        if owner is not None and owner.config.precision == "fp16":
            raise GeminiError(
                "estimate_hessian() differentiates twice, and no scale of fp16 fits both: use bf16 or fp32"
            )
        with self._estimating("estimate_hessian"):
            # By the updates that params have had, which are in their states: it goes on from a checkpoint.
            number = max((int(self.state[param].get("step", 0)) for param in params), default=0)
            probe = HessianProbe(number, params)
            if owner is not None:
                owner.backward.probe = probe
            try:
                self._differentiate_twice(loss, probe, [param for param in params if handle_of(param) is None])
            finally:
                if owner is not None:
                    owner.backward.probe = None

    def _differentiate_twice(self, loss: torch.Tensor, probe: HessianProbe, plain: list[nn.Parameter]) -> None:
        try:
            with warnings.catch_warnings():  # of a cycle between params and gradients, which is not kept
                warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
                torch.autograd.backward(loss, create_graph=True)
            probe.take_plain(plain)
            probe.product().backward()
            probe.take_plain(plain)
        except RuntimeError as e:
            if isinstance(e, GeminiError) or not re.search("derivative|differentiate twice", str(e)):
                raise
            raise GeminiError(
                "estimate_hessian() differentiates the loss twice, which an operation of the model does not allow: "
                "load the model with attn_implementation='eager', or write that operation with others. torch says: "
                f"{e}"
            ) from e
