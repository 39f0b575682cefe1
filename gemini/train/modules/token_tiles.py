"""Token tiles: parts of a model that work token by token, computed a few tokens at a time, so that what they keep and
return for a whole sequence never exists at once.

Two parts of a language model take most of what a long sequence costs beside the inputs of its blocks: the MLPs, whose
inner width is several times the hidden one, and the head with its loss, whose logits are as wide as the vocabulary.
Both are computed under ``torch.utils.checkpoint``, a tile at a time: forward keeps their inputs, backward computes one
tile again after the other, and autograd adds up what the tiles give their params, so a param's gradient is there once.

Losses keep their bits as long as a matrix product of fewer rows has the same ones, which the products of torch do but
for one or two rows; gradients of params are the same sums in another order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gemini.errors import GeminiError

_LOSSES = ("ForCausalLMLoss", "ForMaskedLMLoss")
"""The losses of transformers that are a cross entropy of every token: shifted by one, and not."""
_CHECKED_TOKENS = 8


class TokenTiles:
    """What was tiled in one model.

    Args:
        tokens: of a tile, all sequences of a batch together.
    """

    def __init__(self, model: nn.Module, tokens: int):
        self.tokens = tokens
        self.mlps = [(path, module) for path, module in model.named_modules() if _is_mlp(path, module)]
        self.head = _find_head(model)
        self._replaced: list[nn.Module] = []
        self._can_be_cut: dict[type[nn.Module], bool] = {}

    def put(self) -> None:
        """Make the parts compute in tiles, until :meth:`take_away`.

        Raises:
            GeminiError: if there is no part that could; nothing was changed.
        """
        if not self.mlps and self.head is None:
            raise GeminiError(
                f"tile_tokens={self.tokens}: this model has neither an MLP (a module called mlp, feed_forward, ffn or "
                "fc of Linear layers, activations, norms and dropout alone) nor an output head with a loss of "
                "transformers, which are what is computed in tiles of tokens. Leave tile_tokens out"
            )
        for path, mlp in self.mlps:
            self._replace(mlp, self._tiled_mlp(path, mlp))
        if self.head is not None:
            self._replace(self.head.layer, self.head.pass_on)
            self._replace(self.head.model, self.head.tiled_forward(self.tokens))

    def take_away(self) -> None:
        """Every module has the forward of its class again."""
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward
        self._replaced.append(module)

    def _tiled_mlp(self, path: str, mlp: nn.Module) -> Callable[..., Any]:
        whole = type(mlp).forward.__get__(mlp)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else None
            if len(args) != 1 or kwargs or not isinstance(x, torch.Tensor) or x.dim() not in (2, 3):
                return whole(*args, **kwargs)
            parts = _parts(x.reshape(-1, x.shape[-1]), self.tokens)
            if len(parts) == 1 or not self._can_cut(path, mlp, whole, x):
                return whole(x)
            if torch.is_grad_enabled():
                done = [checkpoint(whole, part[None], use_reentrant=False) for part in parts]
            else:
                done = [whole(part[None]) for part in parts]
            joined = torch.cat(done, 1)
            return joined.view(*x.shape[:-1], joined.shape[-1])

        return forward

    def _can_cut(self, path: str, mlp: nn.Module, whole: Callable[..., Any], x: torch.Tensor) -> bool:
        """Whether what comes out is one tensor, a row for each token, which is that token's own: asked once of each
        class, of a few tokens with and without others around them.

        Raises:
            GeminiError: naming the module, where a token's result depends on others.
        """
        kind, rows = type(mlp), x.detach().reshape(-1, x.shape[-1])
        if kind in self._can_be_cut or rows.shape[0] < 3 * _CHECKED_TOKENS:
            return self._can_be_cut.get(kind, False)
        first, last = _CHECKED_TOKENS, 2 * _CHECKED_TOKENS
        training = [module for module in mlp.modules() if module.training]
        try:
            for module in training:  # without dropout
                module.training = False
            with torch.no_grad():
                alone, among = whole(rows[None, first:last]), whole(rows[None, : 3 * first])
        finally:
            for module in training:
                module.training = True
        self._can_be_cut[kind] = isinstance(alone, torch.Tensor) and alone.shape[:-1] == (1, last - first)
        if self._can_be_cut[kind] and type(x) is torch.Tensor:  # others have no values, where a step is traced
            among = among[:, first:last]
            if not torch.allclose(alone.float(), among.float(), rtol=1e-2, atol=1e-3):
                raise GeminiError(
                    f"tile_tokens={self.tokens}: {path!r} ({kind.__name__}) gives a token another result when it is "
                    "computed without those around it, so it cannot be computed in tiles. Leave tile_tokens out"
                )
        return self._can_be_cut[kind]


def _is_mlp(path: str, module: nn.Module) -> bool:
    """An MLP that works token by token, as far as its parts tell: :meth:`TokenTiles._check` looks at its results."""
    if path.rpartition(".")[2] not in ("mlp", "feed_forward", "ffn", "fc"):
        return False
    leaves = [leaf for leaf in module.modules() if leaf is not module and not list(leaf.children())]
    # transformers' Conv1D is a transposed Linear.
    products = [leaf for leaf in leaves if isinstance(leaf, nn.Linear) or type(leaf).__name__ == "Conv1D"]
    return len(products) > 1 and "forward" not in module.__dict__ and all(
        leaf in products or isinstance(leaf, nn.Dropout) or not list(leaf.parameters()) or "Norm" in type(leaf).__name__
        for leaf in leaves
    )  # fmt: skip


def _parts(rows: torch.Tensor, tokens: int) -> tuple[torch.Tensor, ...]:
    """``rows`` (tokens x width) in parts of at most ``tokens``, of nearly equal size: none has one row alone."""
    return torch.tensor_split(rows, max(-(-rows.shape[0] // tokens), 1))


# ---- the head and its loss -------------------------------------------------------------------------------------------


class _Head:
    """The output head of a model of transformers, and the loss of what it gives.

    While the model computes a loss its head passes hidden states on, and the loss function, which is handed them in
    place of logits, computes both in tiles. A model that does something else with its logits is found out: what it
    hands to the loss is another tensor then.
    """

    def __init__(self, model: Any, layer: nn.Module):
        self.model, self.layer = model, layer
        self._passes_on = False
        self._hidden: torch.Tensor | None = None
        self._tokens = 0
        self._was_computed = False

    def pass_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """The forward of the output layer."""
        if not self._passes_on:
            return type(self.layer).forward(self.layer, hidden)  # type: ignore[no-any-return]
        if self._hidden is not None:
            raise GeminiError(
                f"{self._why()} calls its output head more than once for a loss, which cannot be computed in tiles. "
                "Leave tile_tokens out"
            )
        self._hidden = hidden
        return hidden

    def tiled_forward(self, tokens: int) -> Callable[..., Any]:
        self._tokens = tokens
        whole = type(self.model).forward.__get__(self.model)
        signature = inspect.signature(whole)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            if not self.model.training or not torch.is_grad_enabled() or given.get("labels") is None:
                return whole(*args, **kwargs)
            own = self.model.__dict__.get("_loss_function")
            self._passes_on, self._hidden, self._was_computed = True, None, False
            self.model._loss_function = functools.partial(self._loss, self.model.loss_function)
            try:
                output = whole(*args, **kwargs)
            except GeminiError:
                raise
            except Exception as e:
                if self._hidden is None or self._was_computed:
                    raise
                raise self._refusal() from e
            finally:
                hidden, self._hidden, self._passes_on = self._hidden, None, False
                del self.model._loss_function
                if own is not None:
                    self.model._loss_function = own
            if hidden is not None and not self._was_computed:
                raise self._refusal()
            return self._without_logits(output, hidden)

        return forward

    def _without_logits(self, output: Any, hidden: torch.Tensor | None) -> Any:
        """There are none: what stands in their place is taken out."""
        if hidden is None:
            return output
        if isinstance(output, dict):
            for name in [name for name, value in output.items() if value is hidden]:
                output[name] = None
            return output
        if isinstance(output, tuple):
            return tuple(None if value is hidden else value for value in output)
        return output

    def _loss(
        self, original: Callable[..., Any], logits: Any = None, labels: Any = None, vocab_size: Any = None,
        num_items_in_batch: Any = None, ignore_index: int = -100, shift_labels: Any = None, **other: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The sum or mean of the cross entropies of all tokens, as transformers' own function makes it of logits."""
        name = getattr(original, "__name__", type(original).__name__)
        if name not in _LOSSES or not getattr(original, "__module__", "").startswith("transformers."):
            raise GeminiError(
                f"{self._why()} has the loss {name}; head and loss are computed in tiles with "
                f"{' and '.join(_LOSSES)} of transformers. Leave tile_tokens out"
            )
        if logits is not self._hidden or self._hidden is None:
            raise GeminiError(
                f"{self._why()} changes its logits before it hands them to the loss, so head and loss cannot be "
                "computed in tiles. Leave tile_tokens out"
            )
        self._was_computed = True
        if name == "ForCausalLMLoss":
            if shift_labels is None:
                shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
            labels = shift_labels
        hidden = self._hidden.reshape(-1, self._hidden.shape[-1])
        targets = labels.reshape(-1).to(hidden.device)
        parts = _parts(hidden, self._tokens)
        rows = [part.shape[0] for part in parts]
        losses = [
            checkpoint(self._losses_of, part, target, ignore_index, use_reentrant=False)
            for part, target in zip(parts, targets.split(rows), strict=True)
        ]
        # As a cross entropy over one class: the sum over tokens is torch's own, in its order.
        rated = torch.where(targets == ignore_index, ignore_index, 0)
        reduction = "mean" if num_items_in_batch is None else "sum"
        total = functional.nll_loss(-torch.cat(losses)[:, None], rated, ignore_index=ignore_index, reduction=reduction)
        if num_items_in_batch is None:
            return total
        return total / (
            num_items_in_batch.to(total.device) if torch.is_tensor(num_items_in_batch) else num_items_in_batch
        )

    def _losses_of(self, hidden: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """Of some tokens, each alone, in fp32; 0 for those that are ignored."""
        passed_on, self._passes_on = self._passes_on, False
        try:
            logits = self.layer(hidden)
        finally:
            self._passes_on = passed_on
        return functional.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction="none")

    def _refusal(self) -> GeminiError:
        return GeminiError(
            f"{self._why()} does not make its loss by self.loss_function(logits=..., labels=...) of what its output "
            "head gives, so head and loss cannot be computed in tiles. Leave tile_tokens out"
        )

    def _why(self) -> str:
        return f"tile_tokens={self._tokens}: {type(self.model).__name__}"


def _find_head(model: nn.Module) -> _Head | None:
    """The head of the outermost module that has one, if its losses are transformers' (also inside of an adapter)."""
    for module in model.modules():
        ask: Any = getattr(module, "get_output_embeddings", None)
        if ask is None or not hasattr(type(module), "loss_function"):
            continue
        try:
            layer = ask()
        except (AttributeError, NotImplementedError):
            continue
        if type(layer) is nn.Linear and "forward" not in layer.__dict__ and "forward" not in module.__dict__:
            return _Head(module, layer)
    return None


def tile_tokens(model: nn.Module, tokens: int) -> TokenTiles:
    """Let the MLPs of ``model`` and its head with its loss be computed ``tokens`` tokens at a time.

    In training with ``labels`` the model's output has no logits then (they are None); in evaluation it has.

    Raises:
        GeminiError: if no part of it can be, or with the first forward, for one that cannot; named each time.
    """
    tiles = TokenTiles(model, tokens)
    tiles.put()
    return tiles
