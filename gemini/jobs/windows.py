"""Shuffled training windows over a row of tokens: an order that is computed, not stored, a position of two numbers.

The row is cut into windows of equal length; each epoch visits all of them once, in an order drawn from the seed and the
epoch by a keyed permutation of the window numbers. So the n-th window is a function of (seed, epoch, n): nothing grows
with the corpus, and to resume is to set a number. Python's and numpy's shuffles promise no such thing across versions.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from typing import Any

from gemini.jobs.errors import JobError
from gemini.jobs.tokens import Tokens

_ROUNDS = 4


def permute(index: int, size: int, key: bytes) -> int:
    """The image of ``index`` under a permutation of ``range(size)`` that ``key`` chooses.

    A balanced Feistel network over the next power of four; results outside the range are fed in again until one falls
    inside ("cycle walking"), which takes fewer than four tries on average.
    """
    assert 0 <= index < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(_ROUNDS):
            mixed = hashlib.blake2b(b"%d:%d" % (round_number, right), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        index = left << half_bits | right
        if index < size:
            return index


class WindowStream:
    """An endless stream of windows of ``window_tokens`` ids, and ``num_held_out`` more that it never yields.

    The held-out windows lie evenly across the row. What does not fill the last window is left out.
    """

    def __init__(
        self, tokens: Tokens, window_tokens: int, *, seed: int, num_held_out: int = 0, identity: str = ""
    ) -> None:
        self._tokens = tokens
        self._window_tokens = window_tokens
        self._seed = seed
        num_windows = tokens.num_tokens // window_tokens
        self.num_windows = num_windows - num_held_out
        if self.num_windows < 1:
            needed = window_tokens * (num_held_out + 1)
            raise JobError(
                f"The text has {tokens.num_tokens} tokens; windows of --seq-len {window_tokens} need at least "
                f"{needed}. Give more text, or a shorter --seq-len."
            )
        self._held_out = [(2 * i + 1) * num_windows // (2 * num_held_out) for i in range(num_held_out)]
        self._others_before = [number - i for i, number in enumerate(self._held_out)]
        self._identity = {"files": identity, "seq_len": window_tokens, "seed": seed, "held_out": num_held_out}
        self.epoch = 0
        self.index = 0

    def next_batch(self, batch_size: int, *, part: int = 0, parts: int = 1) -> list[list[int]]:
        """The next ``batch_size`` windows, going on into the next epoch where this one ends.

        Several processes deal the text out: of the next ``parts * batch_size`` windows each takes its ``part``, and all
        of them then stand where one process with the whole batch would.
        """
        self._skip(part * batch_size)
        windows = [self._next_window() for _ in range(batch_size)]
        self._skip((parts - part - 1) * batch_size)
        return windows

    def held_out(self) -> list[list[int]]:
        """The windows that training never sees."""
        return [self._window(number) for number in self._held_out]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in: plain values for a checkpoint."""
        return {**self._identity, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. Refused if the text or its cut is another: the position would mean nothing."""
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise JobError(
                    f"The checkpoint stands in the middle of other data: its {_LABELS[name]} is {state.get(name)!r}, "
                    f"here it is {mine!r}. Resume with the same --data, --glob, --seq-len and --seed, or start anew in "
                    "another --out."
                )
        self.epoch, self.index = int(state["epoch"]), int(state["index"])

    def _next_window(self) -> list[int]:
        if self.index == self.num_windows:
            self.epoch, self.index = self.epoch + 1, 0
        key = b"%d:%d" % (self._seed, self.epoch)
        rank = permute(self.index, self.num_windows, key)
        self.index += 1
        return self._window(self._skip_held_out(rank))

    def _skip(self, count: int) -> None:
        """Go on as ``count`` windows would, without reading them."""
        while count > self.num_windows - self.index:
            count -= self.num_windows - self.index
            self.epoch, self.index = self.epoch + 1, 0
        self.index += count

    def _skip_held_out(self, rank: int) -> int:
        """The number of the ``rank``-th window that is not held out.

        Before held-out window h_i there are h_i - i others, a row that never falls: add the held-out ones passed.
        """
        return rank + bisect.bisect_right(self._others_before, rank)

    def _window(self, number: int) -> list[int]:
        return self._tokens.read(number * self._window_tokens, self._window_tokens).tolist()


_LABELS = {
    "files": "list of files (names and sizes)",
    "seq_len": "sequence length",
    "seed": "seed",
    "held_out": "number of held-out windows",
}
