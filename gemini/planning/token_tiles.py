"""What ``tile_tokens=`` says: which parts of a model are computed how many tokens at a time, and what "auto" takes."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_TILE = 256
"""Tokens that ``tile_tokens="auto"`` takes at least: products of fewer rows read weights more than they compute."""

TILES = (16, 128)
"""Tiles of a batch that it takes at least and at most."""


PARTS = {"head": "the head", "mlp": "MLPs"}
"""What is computed in tiles: the output head with its loss; MLPs, experts and norms."""


def tile_sizes(tile_tokens: int | str | None) -> dict[str, int]:
    """Tokens of a tile by part (:data:`PARTS`), as ``tile_tokens=`` says them: 1024 for all, "head=1024" for the head
    alone, "head=1024,mlp=4096" for both apart. A part that is not there is not tiled.

    Raises:
        ValueError: for anything else.
    """
    if tile_tokens is None:
        return {}
    if isinstance(tile_tokens, str):
        said = [each.partition("=")[::2] for each in tile_tokens.replace(" ", "").split(",")]
        sizes = {part: int(size) if size.isdecimal() else 0 for part, size in said}
        is_right = len(sizes) == len(said) and sizes.keys() <= PARTS.keys()
    else:
        is_right, sizes = type(tile_tokens) is int, dict.fromkeys(PARTS, tile_tokens)
    if not is_right or min(sizes.values()) < 2:
        raise ValueError(
            f'"auto" or a number of tokens, 2 or more, or one by part ("head=1024,mlp=4096"), got {tile_tokens!r}'
        )
    return sizes


def as_tiles(sizes: Mapping[str, int]) -> int | str | None:
    """What :func:`tile_sizes` reads, the same for the same sizes."""
    if len(sizes) == len(PARTS) and len(set(sizes.values())) == 1:
        return next(iter(sizes.values()))
    return ",".join(f"{part}={sizes[part]}" for part in PARTS if part in sizes) or None


def tile_words(tile_tokens: int | str | None) -> str:
    """The same for people."""
    if isinstance(tile_tokens, int):
        return f"{tile_tokens:,} tokens"
    return " and ".join(f"{size:,} tokens of {PARTS[part]}" for part, size in tile_sizes(tile_tokens).items())


def tile_tokens_for(tokens: int, vocabulary: int, hidden: int) -> int:
    """Tokens of a tile for a batch of ``tokens``: so that the logits of one tile with what their loss makes of them
    (12 bytes each) take less than half of what a block keeps of the whole batch (some 32 bytes per token and hidden
    unit). Their number does not depend on the batch, so what is left beside tiles grows with it alone.
    """
    least, most = TILES
    wanted = min(max(least, -(-12 * vocabulary // (16 * hidden))), most)
    tiles = 1 << (wanted - 1).bit_length()
    return max(LEAST_TILE, -(-tokens // tiles))
