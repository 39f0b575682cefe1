"""Integer programs: which of many decisions to make, and how often, so that they cost least within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = tuple[Mapping[int, float], float]
"""A constraint: what each column adds, and the most that the sum may be."""


def solve(
    costs: Sequence[float], rows: Sequence[Row], most: Sequence[int], *, least: float = 0.0, gap: float, nodes: int
) -> dict[int, int] | None:
    """Find how often to take which of the first columns, each as often as ``most`` says at most, so that the costs of
    all are least, to the relative ``gap``; None if nothing was found. Those behind are numbers of ``least`` or more.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    entries = [(row, column, value) for row, (values, _) in enumerate(rows) for column, value in values.items()]
    where_row, where_column, values = zip(*entries, strict=True)
    whole, numbers = len(most), len(costs) - len(most)
    # The number of nodes is limited and not the time: what is chosen must not depend on how busy the machine is.
    solution = milp(
        costs,
        constraints=LinearConstraint(
            csr_matrix((values, (where_row, where_column)), shape=(len(rows), len(costs))),
            ub=[limit for _, limit in rows],
        ),
        integrality=[1] * whole + [0] * numbers,
        bounds=Bounds([0.0] * whole + [least] * numbers, [*map(float, most)] + [float("inf")] * numbers),
        options={"mip_rel_gap": gap, "node_limit": nodes},
    )
    return None if solution.x is None else {column: round(n) for column, n in enumerate(solution.x[:whole]) if n > 0.5}
