"""The output head and its loss, a few tokens at a time: logits of a whole sequence that never exist.

While a model computes a loss, its output layer returns :class:`Logits` in their place: the hidden states, and what the
model does with each token's logits on the way to its loss (a cast, a scale, a soft cap, a bias), noted down. So it does
not matter who computes the loss; what is not known to work token by token is refused by the name of the operation.

The gradient of a sum or a mean of cross entropies is known in forward, but for one number: the gradient of the result
itself. So a tile's logits are made once, and all gradients at once of them, as if the loss that the model returns were
to get the gradient 1; backward multiplies by what it gets instead. What cannot be made so (losses of single tokens,
fp16, whose loss scale is not known in forward) is computed under ``torch.utils.checkpoint``, and once more in backward.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from gemini.errors import GeminiError, warn
from gemini.patches import replaced
from gemini.train.observers import iter_tensors
from gemini.train.params.guard import METADATA

TILE = object()
"""Stands for a tile of logits among the arguments of a step."""


def split_rows(rows: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """``rows`` (tokens first) in parts of at most ``tokens``, of nearly equal size: none has one row alone."""
    parts = max(-(-rows.shape[0] // tokens), 1)
    least, more = divmod(rows.shape[0], parts)
    # Not tensor_split, which slices: in backward each slice makes a gradient of all rows, nearly all of it zeros.
    return rows.split([least + (part < more) for part in range(parts)])


class LogitStep(NamedTuple):
    """Something that a model does with each logit by itself. Where it takes logits, ``args`` has :data:`TILE`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, tile: torch.Tensor) -> Any:
        return self.func(*(tile if value is TILE else value for value in self.args), **self.kwargs)


class TiledLoss(NamedTuple):
    """A cross entropy of logits that are made ``tokens`` at a time."""

    tokens: int
    steps: tuple[LogitStep, ...]  # what is done with a tile of logits (tokens x vocabulary), in order
    dtype: torch.dtype  # of the losses of tokens
    target: torch.Tensor  # the class of each token
    ignore_index: int
    reduction: str
    divisor: Any = 1  # by which the model is going to divide a sum

    def whole(self, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute it of ``hidden`` (tokens x hidden units), logits of a tile by ``head``, and once more in backward."""

        def losses_of(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self._losses(head(part), target)

        # Every tile is a region of its own: its logits live for the time of one tile, in forward and in backward.
        parts = self._parts(hidden)
        return self._reduced(torch.cat([checkpoint(losses_of, *part, use_reentrant=False) for part in parts]))

    def can_be_made_at_once(self, hidden: torch.Tensor, layer: nn.Linear) -> bool:
        """Whether :meth:`at_once` gives the same loss and all gradients that :meth:`whole` gives."""
        learned = [each for each in (hidden, layer.weight, layer.bias) if each is not None]
        return (
            self.reduction in ("mean", "sum")
            and any(each.requires_grad for each in learned)
            and {each.dtype for each in learned} in ({torch.bfloat16}, {torch.float32}, {torch.float64})
            and not torch.is_autocast_enabled(hidden.device.type)
            # Nor does anything else than the logits get a gradient by a step.
            and not any(isinstance(v, torch.Tensor) and v.requires_grad for step in self.steps for v in step.args)
        )

    def at_once(self, hidden: torch.Tensor, layer: nn.Linear, again: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Compute it of ``hidden`` with its gradients. The weight of ``layer`` is there, and need not be later.
        ``again``: :meth:`whole` of the same, for a second derivative.
        """
        return _AtOnce.apply(self, again, hidden, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]

    def _parts(self, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = split_rows(hidden, self.tokens)
        return list(zip(parts, self.target.split([part.shape[0] for part in parts]), strict=True))

    def _losses(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            logits = step(logits)
        return functional.cross_entropy(logits, target, ignore_index=self.ignore_index, reduction="none")

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        if self.reduction == "none":
            return losses
        # As a cross entropy over one class: the sum over tokens is torch's own, in its order.
        rated = torch.where(self.target == self.ignore_index, self.ignore_index, 0)
        return functional.nll_loss(-losses[:, None], rated, ignore_index=self.ignore_index, reduction=self.reduction)

    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient of the result, where the model's loss gets 1, and that of each token's loss then."""
        with torch.enable_grad():
            losses = torch.zeros(self.target.shape, dtype=self.dtype, device=self.target.device, requires_grad=True)
            result = self._reduced(losses)
            expected = torch.ones_like(result, requires_grad=False)
            if self.reduction == "sum":
                expected = (expected / self.divisor).to(result.dtype)
            return expected, torch.autograd.grad(result, losses, expected)[0]


class _AtOnce(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: TiledLoss, again: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.loss, ctx.again = loss, again
        ctx.save_for_backward(hidden, weight, bias)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[2:]
        ctx.expected, of_losses = loss._expected()
        losses = torch.empty_like(of_losses)
        made: list[torch.Tensor | None] = [torch.empty_like(hidden) if of_hidden else None, None, None]
        start = 0
        for part, target in loss._parts(hidden.detach()):
            stop = start + part.shape[0]
            with torch.enable_grad():
                logits = functional.linear(
                    part.detach().requires_grad_(), weight.detach(), None if bias is None else bias.detach()
                )
                # Not the logits themselves: what the steps do not need of them goes before the gradient comes.
                edge = get_gradient_edge(logits)
                own = loss._losses(logits, target)
                del logits
            losses[start:stop] = own.detach()
            (grad,) = torch.autograd.grad(own, [edge], of_losses[start:stop])
            del own, edge
            if made[0] is not None:
                torch.mm(grad, weight, out=made[0][start:stop])
            if of_weight:
                # The product adds to the sum itself: no tile has a gradient of its own, as large as the weight.
                made[1] = grad.t() @ part if made[1] is None else made[1].addmm_(grad.t(), part)
            if of_bias:
                made[2] = grad.sum(0) if made[2] is None else made[2].add_(grad.sum(0))
            del grad
            start = stop
        ctx.made = made
        return loss._reduced(losses)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled() or ctx.made is None:
            return None, None, *_AtOnce._differentiable(ctx, given)
        # Exactly 1 for what was expected, also if that is infinite; never looked at, which would wait for a GPU.
        factor = torch.where(given == ctx.expected, 1.0, given / ctx.expected)
        made, is_kept = ctx.made, torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        if is_kept:
            made = [None if grad is None else grad.clone() for grad in made]
        else:
            # Given away: the loss may be kept for long, and its graph with it.
            ctx.made = None
        for grad in made:
            # A few rows at a time, in the precision of the loss: a product in bf16 would round the factor first.
            for rows in () if grad is None else grad.split(ctx.loss.tokens):
                rows.copy_(rows.to(factor.dtype) * factor)
        return None, None, *made

    @staticmethod
    def _differentiable(ctx: Any, given: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients as functions of what they follow from: as the loss in tiles gives them otherwise."""
        # Of a graph that was let go of, this raises torch's own error.
        inputs = ctx.saved_tensors
        with torch.enable_grad():
            wanted = [each for each, is_needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if is_needed]
            found = iter(torch.autograd.grad(ctx.again(inputs[0]), wanted, given, create_graph=True))
        return [next(found) if is_needed else None for is_needed in ctx.needs_input_grad[2:]]


# ---- logits that are not there -------------------------------------------------------------------------------------


_CASTS = frozenset({"float", "double", "half", "bfloat16", "to", "type"})
_ELEMENTWISE = _CASTS | {"tanh", "mul", "multiply", "div", "divide", "true_divide", "add", "sub", "neg", "clamp"}
"""Operations that change each logit by itself, by the names of torch's functions and methods."""

_IN_PLACE = {"mul_": torch.mul, "div_": torch.div, "add_": torch.add, "sub_": torch.sub}
"""Those of them that change logits where they are (``logits *= 2``)."""

_SETTINGS = (numbers.Number, str, torch.dtype, torch.device, type(None))
"""What may stand beside logits in their arguments."""

_OF_ROWS = frozenset({"view", "reshape", "flatten", "contiguous"})
"""Operations that arrange tokens anew and leave each token's logits together."""


class Logits(torch.Tensor):
    """A stand-in for the logits of some hidden states: a tensor without values, which notes what is done with it."""

    head: Head
    hidden: torch.Tensor
    steps: tuple[LogitStep, ...]  # as of :class:`TiledLoss`
    has_views: bool  # whether there are others of the same logits, which a step in place would change as well

    @staticmethod
    def of(head: Head, hidden: torch.Tensor, dtype: torch.dtype, steps: tuple[LogitStep, ...] = ()) -> Logits:
        shape = (*hidden.shape[:-1], head.layer.out_features)
        made: Logits = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Logits, shape, dtype=dtype, device=hidden.device
        )
        made.head, made.hidden, made.steps, made.has_views = head, hidden, steps, False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        own = next(value for value in iter_tensors((args, kwargs)) if isinstance(value, Logits))
        name = getattr(func, "__name__", str(func))
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is functional.cross_entropy:
            return own._cross_entropy(*args, **kwargs)
        if func is torch.Tensor.__getitem__:
            return own._part(args[1])
        if name in _OF_ROWS and args:
            return own if name == "contiguous" else own._rows(func, args, kwargs)
        if name in _IN_PLACE and args[0] is own and not own.has_views:
            made = own._then(_IN_PLACE[name], args, kwargs)
            if made.dtype is own.dtype:
                own.steps = made.steps
                return own
        if name in _ELEMENTWISE:
            return own._then(func, args, kwargs)
        own._refuse(name)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]  # torch makes no stand-in without it; nothing comes there

    # ---- what the model does with them -------------------------------------------------------------------------------

    def _with(self, hidden: torch.Tensor) -> Logits:
        view = Logits.of(self.head, hidden, self.dtype, self.steps)
        self.has_views = view.has_views = True
        return view

    def _part(self, index: Any) -> Logits:
        found = index if isinstance(index, tuple) else (index,)
        dots = [i for i, at in enumerate(found) if at is Ellipsis]
        masks = [at.dim() for at in found if isinstance(at, torch.Tensor) and at.dtype is torch.bool]
        taken = sum(masks) + sum(at is not None for at in found) - len(masks) - len(dots)
        names_last = found[dots[0] + 1 :] if dots else taken >= self.dim()
        if names_last and not (isinstance(found[-1], slice) and found[-1] == slice(None)):
            self._refuse("a part of the vocabulary")
        return self._with(self.hidden[index])

    def _rows(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
        """Arrange the same tokens anew, as torch says."""
        with _disable_current_modes():  # a trace would take these logits for some that are there
            made = func(torch.empty(self.shape, dtype=self.dtype, device="meta"), *args[1:], **kwargs)
        if made.dtype is not self.dtype or made.shape[-1:] != self.shape[-1:]:
            self._refuse(f"{func.__name__} of logits {tuple(self.shape)} to {tuple(made.shape)}")
        return self._with(self.hidden.reshape(*made.shape[:-1], self.hidden.shape[-1]))

    def _then(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Logits:
        """Note one more step, a function of each logit by itself."""
        vocabulary, dtype = self.shape[-1], self.dtype
        name = getattr(func, "__name__", str(func))
        kept: list[Any] = []
        for value in args:
            if value is self:
                kept.append(TILE)
            elif isinstance(value, torch.Tensor) and type(value) is not Logits and value.numel() in (1, vocabulary):
                is_each = value.numel() == vocabulary and value.shape[-1] == vocabulary
                kept.append(value.reshape(vocabulary if is_each else (1,) * min(value.dim(), 1)))
            elif isinstance(value, _SETTINGS):
                kept.append(value)
            else:
                self._refuse(name)
        if not all(isinstance(value, _SETTINGS) for value in kwargs.values()):
            self._refuse(name)
        step = LogitStep(func, tuple(kept), kwargs)
        # Run once on no tokens: it tells the dtype, and refuses now and not in backward what changes the shape.
        sample = step(torch.empty(0, vocabulary, dtype=dtype, device=self.device))
        if not isinstance(sample, torch.Tensor) or sample.shape != (0, vocabulary):
            self._refuse(name)
        if sample.dtype is dtype and name in _CASTS:
            return self  # as in torch
        return Logits.of(self.head, self.hidden, sample.dtype, (*self.steps, step))

    def _cross_entropy(
        self,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Add up, or average, the losses of all tokens, as torch does of whole logits."""
        if input is not self or weight is not None or label_smoothing or size_average is not None or reduce is not None:
            self._refuse("a cross entropy with weights or label smoothing")
        hidden = self.hidden
        if hidden.dim() != 2 or target.shape != hidden.shape[:1] or target.is_floating_point():
            self._refuse(f"a cross entropy of logits {tuple(self.shape)} and targets {tuple(target.shape)}")
        loss = TiledLoss(self.head.tokens, self.steps, self.dtype, target, ignore_index, reduction)
        return self.head.loss_of(hidden, loss)

    def _refuse(self, what: str) -> NoReturn:
        raise GeminiError(
            f"{self.head.label} may mix the logits of different tokens ({what}), so "
            "head and loss cannot be computed in tiles. Leave tile_tokens out"
        )


class Head:
    """The output layer of ``model``, which computes in tiles of ``tokens`` while the model computes a loss."""

    def __init__(self, model: Any, layer: nn.Linear, tokens: int):
        self.model, self.layer, self.tokens = model, layer, tokens
        self.label = f"tile_tokens={tokens}: {type(model).__name__}"
        self._promises = False
        self._has_warned = False
        self._asked: TiledLoss | None = None  # the loss that the next call of the layer is to give in place of logits
        self._divisor: Any = 1

    def loss_of(self, hidden: torch.Tensor, loss: TiledLoss) -> torch.Tensor:
        """The loss of the logits of ``hidden`` (tokens x hidden units)."""
        loss = loss._replace(divisor=self._divisor)
        has_hooks = bool(self.layer._backward_hooks or self.layer._backward_pre_hooks)
        if has_hooks or not loss.can_be_made_at_once(hidden, self.layer):
            return loss.whole(hidden, self.whole)
        with replaced(self, "_asked", loss):
            # One call of the layer for all tiles: its weight is gathered once, and not again in backward.
            return self._call(hidden)

    def whole(self, hidden: torch.Tensor) -> torch.Tensor:
        # The layer gives real logits inside: called by a tile, now and again in backward.
        with replaced(self, "_promises", False):
            return self._call(hidden)

    def _call(self, hidden: torch.Tensor) -> torch.Tensor:
        """Call the layer as a module, so that our hooks gather what it reads. Those of others have run: on what it was
        given, and on what stands for its logits, where what they do is a step.
        """
        hooks = (self.layer._forward_pre_hooks, self.layer._forward_hooks)
        theirs = [{key: hook for key, hook in own.items() if not _is_ours(hook)} for own in hooks]
        before = [own.copy() for own in hooks] if any(theirs) else []
        try:
            for own, foreign in zip(hooks, theirs, strict=True):
                for key in foreign:
                    del own[key]
            return self.layer(hidden)  # type: ignore[no-any-return]
        finally:
            for own, order in zip(hooks, before, strict=False):
                own.clear()
                own.update(order)

    def layer_forward(self, hidden: torch.Tensor) -> Any:
        asked, self._asked = self._asked, None
        if asked:
            return asked.at_once(hidden, self.layer, functools.partial(asked.whole, head=self.whole))
        return Logits.of(self, hidden, hidden.dtype) if self._promises else type(self.layer).forward(self.layer, hidden)

    def model_forward(self) -> Callable[..., Any]:
        whole = type(self.model).forward.__get__(self.model)
        signature = inspect.signature(whole)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            # Only a training forward with labels computes a loss; any other is for its logits.
            trains = self.model.training and torch.is_grad_enabled()
            if not trains or given.get("labels") is None:
                # A stage before the last has another module in the place of the head.
                if trains and not self._has_warned and self.model.get_output_embeddings() is self.layer:
                    self._has_warned = True
                    warn(
                        f"{self.label} is called without labels, for whole logits, so no tile of its head is computed: "
                        "label smoothing of the Trainer, compute_loss_func and other losses from outside of the model "
                        "need them. Leave them out, or the head's tiles. This is said once per model"
                    )
                return whole(*args, **kwargs)
            # A loss function of transformers divides a sum by a number of labels, maybe those of many batches.
            value = given.get("num_items_in_batch", given.get("kwargs", {}).get("num_items_in_batch"))
            is_number = isinstance(value, numbers.Number) or (isinstance(value, torch.Tensor) and value.dim() == 0)
            self._divisor = value if is_number else 1
            # Not on errors either: the layer would go on giving stand-ins to whoever calls it.
            with replaced(self, "_promises", True):
                return _without_logits(whole(*args, **kwargs))

        return forward


def _is_ours(hook: Any) -> bool:
    """By module: ours only gather what the layer reads, and cast what it is given."""
    return str(getattr(hook, "__module__", "")).startswith("gemini.")


def _without_logits(output: Any) -> Any:
    """Take out of an output what stands in the place of logits: there are none."""
    if isinstance(output, dict):
        for name in [name for name, value in output.items() if isinstance(value, Logits)]:
            output[name] = None
        return output
    if isinstance(output, tuple):
        return tuple(None if isinstance(value, Logits) else value for value in output)
    return output


def find_head(model: nn.Module, tokens: int) -> Head | None:
    """Find the head of the outermost module with an output layer that computes a loss (also inside of an adapter)."""
    for module in model.modules():
        ask: Any = getattr(module, "get_output_embeddings", None)
        if ask is None or "labels" not in inspect.signature(type(module).forward).parameters:
            continue
        try:
            layer = ask()
        except (AttributeError, NotImplementedError):
            continue
        if type(layer) is nn.Linear and "forward" not in layer.__dict__ and "forward" not in module.__dict__:
            return Head(module, layer, tokens)
    return None
