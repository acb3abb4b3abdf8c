"""One column of each row at the least loss within a budget: the multiple-choice knapsack, solved exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Table = Sequence[Sequence[float]]
SPAN = 1e6  # what losses are scaled to add up to at most: the solver stops at a gap of 1e-6


def choose(loss: Table, cost: Table, budget: float) -> list[int]:
    """Of each row the column, so that the sum of losses is the least of all whose costs are within the budget.

    >>> choose([[3, 1], [4, 0]], [[1, 2], [1, 2]], budget=3)
    [0, 1]

    loss, cost: [rows][columns]; an infinite loss rules a column out. The multiple-choice knapsack problem (Sinha and
    Zoltners, Operations Research 27, 1979) as an integer program: minimise sum_ij x_ij loss_ij with sum_j x_ij = 1
    for each i and sum_ij x_ij cost_ij <= budget, x_ij 0 or 1. Costs that are ints are added exactly; a sum of others
    may exceed the budget by a share of 1e-12. Among equal losses the cheaper column is chosen.
    Raises ValueError where the budget is below the least possible cost, which it names.
    """
    kept = [efficient(*row) for row in zip(loss, cost, strict=True)]
    least = total(cost, [columns[-1] for columns in kept])
    if not within(least, budget):
        raise ValueError(f"a budget of {budget:,.10g} is below the least possible, {least:,.10g}")
    chosen = [columns[0] for columns in kept]
    wrong: list[list[int]] = []  # solutions that the solver's tolerance let exceed the budget
    while not within(total(cost, chosen), budget):
        chosen = _solved(loss, cost, kept, budget, wrong)
        if chosen in wrong:
            raise RuntimeError("the integer program gave a solution that was ruled out")
        wrong.append(chosen)
    return chosen


def efficient(loss: Sequence[float], cost: Sequence[float]) -> list[int]:
    """The columns that no other beats in both loss and cost, from the least loss to the least cost.

    >>> efficient([0.1, 0.3, 0.2, 0.1], [8, 3, 8, 9])
    [0, 1]
    """
    usable = [j for j in range(len(loss)) if loss[j] < math.inf]
    if not usable:
        raise ValueError("a row has no column that may be chosen")
    found: list[int] = []
    for j in sorted(usable, key=lambda j: (loss[j], cost[j], j)):
        if not found or cost[j] < cost[found[-1]]:
            found.append(j)
    return found


def total(table: Table, chosen: Sequence[int]) -> float:
    """The sum of the chosen entries, exact."""
    terms = [row[j] for row, j in zip(table, chosen, strict=True)]
    return sum(terms) if all(isinstance(term, int) for term in terms) else math.fsum(terms)


def within(cost: float, budget: float) -> bool:
    """`within(3, 3)`: floats may exceed by rounding errors, ints may not."""
    return cost <= budget or (not isinstance(cost, int) and cost <= budget + 1e-12 * abs(budget))


def _solved(
    loss: Table, cost: Table, kept: Sequence[Sequence[int]], budget: float, wrong: Sequence[Sequence[int]]
) -> list[int]:
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows = [i for i, columns in enumerate(kept) for _ in columns]
    columns = [j for some in kept for j in some]
    # from the least loss and the least cost of each row, so that the sums are no larger than they must be
    losses = np.array([loss[i][j] - loss[i][kept[i][0]] for i, j in zip(rows, columns)])
    costs = [cost[i][j] - cost[i][kept[i][-1]] for i, j in zip(rows, columns)]
    span = math.fsum(loss[i][some[-1]] - loss[i][some[0]] for i, some in enumerate(kept))
    spare = budget - total(cost, [some[-1] for some in kept])
    if all(isinstance(c, int) for c in costs):
        # in units that all differences share; half of one keeps tolerances out of the comparison
        unit: float = math.gcd(*costs)  # type: ignore[arg-type]
        spare = spare // unit + 0.5
    else:
        unit = max(costs) / 1e3
        spare = spare / unit
    sparse = (np.ones(len(rows)), (rows, range(len(rows))))
    constraints = [
        LinearConstraint(csr_array(sparse, shape=(len(kept), len(rows))), 1, 1),
        LinearConstraint(csr_array([[c / unit for c in costs]]), -np.inf, spare),
    ]
    for solution in wrong:
        mark = [float(solution[i] == j) for i, j in zip(rows, columns)]
        constraints.append(LinearConstraint(csr_array([mark]), -np.inf, len(kept) - 1))
    result = milp(
        losses * (SPAN / span),
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": 0.0},
    )
    if result.status != 0:
        raise RuntimeError(f"the integer program of {len(kept)} rows was not solved: {result.message}")
    return [columns[k] for k in np.flatnonzero(result.x > 0.5)]
