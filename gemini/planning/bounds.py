"""How long a step takes at least, told from its hops without playing them: what ``--fastest`` looks at first."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from gemini.planning.schedules import Work


def least_of(work: Work, *, is_serial: bool) -> float:
    """Seconds that no step is below: all that there is to do, if it is ``is_serial``; else what the busiest queue and
    the busiest resource have to do; and, where updates wait for the norm, those of all chunks that are read up to some
    moment, with the computing behind it. What comes back of saved activations is left out: it may not have left.
    """
    plan, n = work.plan, work.plan.accumulate
    exchanged = [work.exchange(moment) for moment in range(len(work.computing))]
    chain = [
        hop.cost.seconds + sum(e.cost.seconds for e in own) for hop, own in zip(work.computing, exchanged, strict=True)
    ]
    hops = [(n, hop) for hop in (*work.computing, *(hop for own in exchanged for hop in own))]
    hops += [(n, hop) for moment in range(len(chain)) for hop in work.carry(moment, back=False)]
    for times, moves, adding in ((1, plan.moves, False), (n - 1, plan.moves_of(1), True)):
        hops += [(times, hop) for own in moves for index in own.fetch for hop in work.fetch(index) if times]
        landings = work.landings(adding=adding) if times else ()
        hops += [(times, hop) for own in landings for landing in own for hop in landing.hops]
    first_use = {i: at for at, access in reversed([*enumerate(plan.accesses)]) for i in access.chunks}
    updates: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for index, chunk in enumerate(plan.layout.chunks):
        for hop in work.update(index).hops if chunk.trainable else ():
            hops.append((1, hop))
            of_queue, at = updates[hop.queue], first_use.get(index, len(chain))
            of_queue[at] = of_queue.get(at, 0.0) + hop.cost.seconds
    queues, resources = defaultdict[str, float](float), defaultdict[str, float](float)
    for times, hop in hops:
        queues[hop.queue] += times * hop.cost.seconds
        for resource, load in hop.cost.loads.items():
            resources[resource] += times * hop.cost.seconds * load
    if is_serial:
        return sum(queues.values())
    whole, least = n * sum(chain), max(*queues.values(), *resources.values(), n * sum(chain))
    if plan.problem.gradients == "transient":
        return least
    before = [0.0, *accumulate(chain)]
    for seconds in updates.values():
        moments = sorted(moment for moment in seconds if moment < len(chain))
        until = accumulate(seconds[moment] for moment in moments)
        least = max([least, *(u + whole - before[moment] for moment, u in zip(moments, until, strict=True))])
    return least
