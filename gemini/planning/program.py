"""Integer programs: which of many decisions to make, so that they cost least within limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Row = tuple[Mapping[int, float], float]
"""A constraint: what each column adds, and the most that the sum may be."""


def solve(
    costs: Sequence[float], rows: Sequence[Row], whole: int, *, least: float = 0.0, gap: float, nodes: int
) -> set[int] | None:
    """Find the columns to take, of the first ``whole`` ones, so that the costs of all are least, to the relative
    ``gap``; None if nothing was found. Columns behind them are numbers of ``least`` or more.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    entries = [(row, column, value) for row, (values, _) in enumerate(rows) for column, value in values.items()]
    where_row, where_column, values = zip(*entries, strict=True)
    numbers = len(costs) - whole
    # The number of nodes is limited and not the time: what is chosen must not depend on how busy the machine is.
    solution = milp(
        costs,
        constraints=LinearConstraint(
            csr_matrix((values, (where_row, where_column)), shape=(len(rows), len(costs))),
            ub=[limit for _, limit in rows],
        ),
        integrality=[1] * whole + [0] * numbers,
        bounds=Bounds([0.0] * whole + [least] * numbers, [1.0] * whole + [float("inf")] * numbers),
        options={"mip_rel_gap": gap, "node_limit": nodes},
    )
    return None if solution.x is None else {column for column in range(whole) if solution.x[column] > 0.5}
