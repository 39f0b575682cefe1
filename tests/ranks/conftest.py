"""Pools of two and four ranks that live for the test session."""

from collections.abc import Callable, Iterator

import pytest

from tests.ranks.pool import Pool, started


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, Pool]]:
    pools: dict[int, Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool_of(_pools: dict[int, Pool]) -> Iterator[Callable[[int], Pool]]:
    """``pool_of(2)``: two ranks that wait for work, started anew if an earlier test ended them.

    They have no process groups of an earlier test.
    """
    used: set[int] = set()

    def get(size: int) -> Pool:
        used.add(size)
        if size not in _pools or not _pools[size].alive:
            if size in _pools:
                _pools[size].close()
            _pools[size] = started(size)
        return _pools[size]

    yield get
    for size in used:
        if _pools[size].alive:
            _pools[size].renew()
