"""Paging as a game on integers: random instances, the rules, and the optimum by brute force."""

import heapq
import random
from itertools import combinations

from gemini.planning.plan import Moves
from gemini.planning.trace import Access


def sequence(*needs: tuple[int, ...]) -> list[Access]:
    return [Access(moment, needed) for moment, needed in enumerate(needs)]


def one_by_one(order: list[int]) -> list[Access]:
    return sequence(*((index,) for index in order))


def fetched_bytes(moves: tuple[Moves, ...], sizes: dict[int, int]) -> int:
    return sum(sizes[i] for m in moves for i in m.fetch)


def walk(moves: tuple[Moves, ...], accesses: list[Access], sizes: dict[int, int], room: int) -> None:
    """The moves are legal: what is fetched was away, what goes was there, all that is needed is there, in the room."""
    there: set[int] = set()
    for access, (evict, fetch) in zip(accesses, moves, strict=True):
        assert set(evict) <= there, "nothing goes that is not there"
        there -= set(evict)
        assert not set(fetch) & there, "nothing is fetched twice"
        there |= set(fetch)
        assert set(access.chunks) <= there
        assert sum(sizes[i] for i in there) <= room


def least_bytes(accesses: list[Access], sizes: dict[int, int], room: int) -> int:
    """The optimum: the shortest path over (moment, resident subset), by Dijkstra's algorithm."""
    everything = list(sizes)
    start: tuple[int, frozenset[int]] = (0, frozenset())
    best = {start: 0}
    queue = [(0, 0, 0, frozenset[int]())]
    ticket = 0
    while queue:
        cost, _, moment, there = heapq.heappop(queue)
        if moment == len(accesses):
            return cost
        if best.get((moment, there), cost) < cost:
            continue
        needed = frozenset(accesses[moment].chunks)
        price = cost + sum(sizes[i] for i in needed - there)
        others = [i for i in everything if i in there and i not in needed]
        left = room - sum(sizes[i] for i in needed)
        for count in range(len(others) + 1):
            for staying in combinations(others, count):
                if sum(sizes[i] for i in staying) > left:
                    continue
                state = (moment + 1, needed | frozenset(staying))
                if price < best.get(state, 2**62):
                    best[state] = price
                    ticket += 1
                    heapq.heappush(queue, (price, ticket, *state))
    raise AssertionError("no way through")


def random_instance(rng: random.Random, *, equal: bool) -> tuple[list[Access], dict[int, int], int]:
    num = rng.randint(2, 8)
    sizes = {i: 8 if equal else rng.randint(1, 20) for i in range(num)}
    kind = rng.choice(("palindrome", "random", "sets"))
    if kind == "palindrome":
        order = [*range(num), *reversed(range(num))]
        accesses = one_by_one(order * rng.randint(1, 2))
    elif kind == "random":
        accesses = one_by_one([rng.randrange(num) for _ in range(rng.randint(4, 20))])
    else:
        pairs = [tuple(sorted(rng.sample(range(num), rng.randint(1, 2)))) for _ in range(rng.randint(4, 14))]
        accesses = sequence(*pairs)
    least = max(sum(sizes[i] for i in access.chunks) for access in accesses)
    room = rng.randint(least, max(least, int(sum(sizes.values()) * 0.9)))
    return accesses, sizes, room
