"""Token tiles: parts of a model that work token by token, computed a few tokens at a time, so that what they keep and
return for a whole sequence never exists at once.

What costs most of a long sequence beside the inputs of blocks are MLPs (or experts), whose inner width is several times
the hidden one, the head with its loss (:mod:`gemini.train.modules.tiled_logits`), and norms, whose backward has six
copies of its input in fp32. All are computed under ``torch.utils.checkpoint``, a tile at a time: forward keeps their
inputs, and backward computes one tile again after the other. The weights of an MLP are gathered once for all its tiles.

Losses keep their bits as long as a matrix product of fewer rows has the same ones, which the products of torch do but
for one or two rows and, of some shapes, several threads; gradients of params are the same sums in another order.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.errors import GeminiError
from gemini.patches import Overrides, replaced
from gemini.planning.trace import LEAST_TILE, tile_sizes, tile_tokens_for
from gemini.train.modules.float8 import is_float8
from gemini.train.modules.reading import READ_AS_A_WHOLE
from gemini.train.modules.tiled_logits import find_head, split_rows

_CHECKED_TOKENS = 8
_OF_EXPERTS = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of the experts of transformers' MoE blocks: tokens, which experts each goes to, and how much."""

_PARTS = {
    "head": "output head with a loss (an nn.Linear, no adapter on it)",
    "mlp": "MLPs and no experts of transformers",
}


class TokenTiles(Overrides):
    """The parts of one model that compute in tiles. ``tokens``: in a tile, counted over all sequences of a batch
    together; of each part, as ``tile_tokens=`` says it.
    """

    def __init__(self, model: nn.Module, tokens: int | str | None):
        super().__init__()
        self.tokens, sizes = tokens, tile_sizes(tokens)
        self.of_mlp = sizes.get("mlp", 0)
        modules = list(model.named_modules()) if self.of_mlp else []
        self.mlps = [(path, module) for path, module in modules if _is_mlp(path, module) or _is_experts(module)]
        inside = {part for _, mlp in self.mlps for part in mlp.modules()}
        self.norms = [(path, module) for path, module in modules if _is_norm(module) and module not in inside]
        self.head = find_head(model, sizes["head"]) if "head" in sizes else None
        self._can_be_cut: dict[type[nn.Module], bool] = {}
        # Of each thread, the module whose tiles are being computed in its forward.
        self._inside = threading.local()

    def put(self) -> None:
        """Make the parts compute in tiles, until :meth:`take_away`."""
        for part, found in {"head": self.head, "mlp": self.mlps}.items():
            if isinstance(self.tokens, str) and not found and f"{part}=" in self.tokens:
                raise GeminiError(
                    f"tile_tokens={self.tokens!r}: this model has no {_PARTS[part]} that could be computed in tiles. "
                    f"Leave {part}= out"
                )
        if not self.mlps and not self.head:
            raise GeminiError(
                f"tile_tokens={self.tokens}: this model has neither an MLP (a module called mlp, feed_forward, ffn or "
                "fc of Linear layers, activations, norms and dropout alone), nor experts of transformers, nor an "
                "output head with a loss, which are what is computed in tiles of tokens. Leave tile_tokens out"
            )
        for path, mlp in self.mlps:
            self._put(mlp, "forward", self._tiled(path, mlp))
            # Before the model is walked: its weights are gathered once for all tiles, and not once for each.
            self._put(mlp, READ_AS_A_WHOLE, True)
        for path, norm in self.norms:
            self._put(norm, "forward", self._tiled(path, norm))
        if self.head:
            self._put(self.head.layer, "forward", self.head.layer_forward)
            self._put(self.head.model, "forward", self.head.model_forward())

    def _tiled(self, path: str, mlp: nn.Module) -> Callable[..., Any]:
        whole = type(mlp).forward.__get__(mlp)

        def of_tile(*tile: torch.Tensor) -> Any:
            # Again in backward, where nobody has called the module: who hangs on it has to be told.
            return whole(*tile) if getattr(self._inside, "module", None) is mlp else mlp(*tile)

        @functools.wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # What cannot be cut is computed as a whole, with the same result.
            rows = _rows(args) if not kwargs else None
            if not rows:
                return whole(*args, **kwargs)
            parts = [split_rows(each, self.of_mlp) for each in rows]
            if len(parts[0]) == 1 or not self._can_cut(path, mlp, whole, rows):
                return whole(*args)
            # Put back on errors too: a module left here would never be called by `of_tile` again, so never gathered.
            with replaced(self._inside, "module", mlp):
                if torch.is_grad_enabled():
                    done = _checkpointed(of_tile, rows, parts)
                else:
                    done = [whole(*_tile(tile)) for tile in zip(*parts, strict=True)]
            joined = torch.cat(done, -2)
            return joined.view(*args[0].shape[:-1], joined.shape[-1])

        return forward

    def _can_cut(self, path: str, mlp: nn.Module, whole: Callable[..., Any], given: tuple[torch.Tensor, ...]) -> bool:
        """Whether what comes out is one tensor, a row for each token, which is that token's own: asked once of each
        class, of a few tokens with and without others around them.
        """
        kind = type(mlp)
        if kind in self._can_be_cut:
            return self._can_be_cut[kind]
        # Of the first batch, however short: a checkpointed block is computed again in backward as it was in forward.
        rows, first = [each.detach() for each in given], min(_CHECKED_TOKENS, given[0].shape[0] // 3)
        last = 2 * first
        with torch.no_grad(), ExitStack() as stack:
            for module in mlp.modules():  # without dropout
                stack.enter_context(replaced(module, "training", False))
            alone = whole(*_tile(tuple(each[first:last] for each in rows)))
            among = whole(*_tile(tuple(each[: 3 * first] for each in rows)))
        can_be_cut = isinstance(alone, torch.Tensor) and alone.shape[-2] == last - first
        if can_be_cut and type(given[0]) is torch.Tensor:  # others have no values: a step is traced
            both = torch.stack((alone, among[..., first:last, :])).float()
            if not both.any():  # of weights that begin at zero all tokens have the same: it is asked again
                return can_be_cut
            largest = both.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
            least = 1e-3 * max(largest, torch.finfo(alone.dtype).tiny)
            # NaN is a result as well: of a padded row, or where fp16 has overflowed.
            if not torch.allclose(both[0], both[1], rtol=1e-2, atol=least, equal_nan=True):
                raise GeminiError(
                    f"tile_tokens={self.tokens!r}: {path!r} ({kind.__name__}) gives a token another result when it is "
                    "computed without its neighbours, so it cannot be computed in tiles. Leave tile_tokens out"
                )
        # Not before: a program that catches the error and goes on is told again.
        self._can_be_cut[kind] = can_be_cut
        return can_be_cut


class _KeptForBackward(torch.autograd.Function):
    """Keeps tensors for backward, by the hooks that are open: the node of what it returns has them."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        # The anchor needs a gradient: where nothing does there is no node.
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _checkpointed(
    of_tile: Callable[..., Any], rows: tuple[torch.Tensor, ...], parts: list[tuple[torch.Tensor, ...]]
) -> list[Any]:
    """Compute ``rows`` in tiles, each a region of its own: one is recomputed, used and freed before the next. All rows
    are kept before the first tile is computed, and tiles keep nothing. So a checkpointed block that ends with them ends
    where they begin when it is computed again, for the last tensor that it has to keep is there.
    """
    node: Any = _KeptForBackward.apply(torch.empty(0, requires_grad=True), *rows).grad_fn  # type: ignore[no-untyped-call]
    sizes = [part.shape[0] for part in parts[0]]
    needs_grad = [each.requires_grad for each in rows]
    # Given away one by one, at first those of the rows: what a region keeps is there until backward.
    left = dict(enumerate(zip(*parts, strict=True)))

    def region(at: int, device: torch.Tensor) -> Any:
        if at not in left:
            # Asked once for all tiles of a backward: a checkpointed block gives nothing away twice.
            kept = zip(*(each.detach().split(sizes) for each in node.saved_tensors), strict=True)
            for number, tile in enumerate(kept):
                own = zip(tile, needs_grad, strict=True)
                left[number] = tuple(part.detach().requires_grad_(needs) for part, needs in own)
        return of_tile(*_tile(left.pop(at)))

    # An empty tensor tells checkpointing whose random numbers to repeat; past a block's hooks, which would count it.
    device = rows[0].new_empty(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return [checkpoint(region, at, device, use_reentrant=False) for at in range(len(sizes))]


def _rows(args: tuple[Any, ...]) -> tuple[torch.Tensor, ...] | None:
    """Arrange what a part was given with tokens first; None for what cannot be cut by tokens."""
    if not args or not all(isinstance(each, torch.Tensor) for each in args):
        return None
    if len(args) == 1 and args[0].dim() in (2, 3):
        return (args[0].reshape(-1, args[0].shape[-1]),)
    tokens = args[0].shape[:1]
    return args if len(args) == 3 and all(each.dim() == 2 and each.shape[:1] == tokens for each in args) else None


def _tile(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Arrange a tile as the part takes it: an MLP one sequence, experts tokens."""
    return (rows[0][None],) if len(rows) == 1 else rows


def _is_mlp(path: str, module: nn.Module) -> bool:
    """Whether it is an MLP that works token by token, as far as its parts tell: the first batch tells for sure."""
    if path.rpartition(".")[2] not in ("mlp", "feed_forward", "ffn", "fc"):
        return False
    leaves = [leaf for leaf in module.modules() if leaf is not module and not list(leaf.children())]
    # transformers' Conv1D is a transposed Linear. Of float8 the scales are of all tokens.
    products = [leaf for leaf in leaves if isinstance(leaf, nn.Linear) or type(leaf).__name__ == "Conv1D"]
    products = [leaf for leaf in products if not is_float8(leaf)]
    return (
        len(products) > 1
        and "forward" not in module.__dict__
        and all(
            leaf in products
            or isinstance(leaf, nn.Dropout)
            or not list(leaf.parameters())
            or "Norm" in type(leaf).__name__
            for leaf in leaves
        )
    )


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a norm of each token's last dimension: torch's, or an RMSNorm of the model's own of one input."""
    if "forward" in module.__dict__:
        return False
    forward = type(module).forward
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) and len(module.normalized_shape) == 1
    return type(module).__name__.endswith("RMSNorm") and len(inspect.signature(forward).parameters) == 2


def _is_experts(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or not type(module).__name__.endswith("Experts"):
        return False
    return tuple(inspect.signature(type(module).forward).parameters)[1:] == _OF_EXPERTS


def tile_tokens(model: nn.Module, tokens: int | str | None) -> TokenTiles:
    """Let the MLPs, experts and norms of ``model`` and its head with its loss be computed in tiles, as ``tile_tokens=``
    says it. In training with ``labels`` the model's output has no logits then (they are None); in evaluation it has.
    """
    tiles = TokenTiles(model, tokens)
    tiles.put()
    return tiles


def auto_tokens(model: nn.Module, tokens: int) -> list[int | str]:
    """Tiles of ``tile_tokens="auto"`` for a batch of ``tokens``, to try in turn: the head alone, then all there is."""
    tiles = TokenTiles(model, LEAST_TILE)
    head = tiles.head
    size = tile_tokens_for(tokens, *((head.layer.out_features, head.layer.in_features) if head else (0, 1)))
    found: list[int | str] = [f"head={size}"] if head else []
    return [*found, size] if tiles.mlps else found
