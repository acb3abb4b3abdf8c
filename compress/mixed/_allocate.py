"""One format for each group of layers, at the least loss that a budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .._plan import matcher
from ._knapsack import choose, efficient, total, within
from ._sensitivity import Group, Sensitivity

Cost = Callable[[Group, str], float]


@dataclass(frozen=True)
class Share:
    """What a format got: tensors, weights, bytes, and the sum of its groups' losses."""

    format: str
    tensors: int
    weights: int
    bytes: int
    loss: float


@dataclass(frozen=True)
class Allocation:
    """A format for each group, by the group's name; see `allocate`.

    ``loss``: the sum of the groups' KL, in nats per token. It is what the model loses where losses add up, which they
    do the better the smaller they are. ``cost`` and ``budget``: bytes, or the unit of the costs given. ``bits``: for
    each weight, scales and all. ``shares``: by format, in the order of the sensitivities' formats.
    """

    formats: Mapping[str, str]
    loss: float
    cost: float
    budget: float
    bits: float
    shares: tuple[Share, ...]

    def __str__(self) -> str:
        head = ("format", "tensors", "weights", "bits", "KL")
        body = [
            (s.format, str(s.tensors), f"{s.weights:,}", f"{8 * s.bytes / s.weights:.4g}", f"{s.loss:.3g}")
            for s in self.shares
        ]
        total = sum(s.tensors for s in self.shares), sum(s.weights for s in self.shares)
        body.append(("all", str(total[0]), f"{total[1]:,}", f"{self.bits:.4g}", f"{self.loss:.3g}"))
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [head, *body])
        return "\n".join("  ".join(line) for line in lines)


def allocate(
    sensitivity: Sensitivity,
    *,
    budget_bits: float | None = None,
    budget_bytes: int | None = None,
    cost: Cost | None = None,
    budget: float | None = None,
    at_least: Mapping[str, float] | None = None,
    fixed: Mapping[str, str] | None = None,
) -> Allocation:
    """A format for each group, at the least sum of KL within a budget.

    >>> from halfulp.compress.mixed import Group, Option, Sensitivity, allocate
    >>> def group(name, kl):
    ...     options = (Option("int4:g64", 34, (kl,)), Option("int8:g64", 66, (0.0,)))
    ...     return Group(name, name, 0, (name,), 1, 64, "", options)
    >>> found = Sensitivity("m", "t", (1,), "ragged", ("int4:g64", "int8:g64"), (group("up", 0.1), group("down", 0.3)))
    >>> dict(allocate(found, budget_bits=6.25).formats)
    {'up': 'int4:g64', 'down': 'int8:g64'}

    One budget: ``budget_bits``, the average over the weights of all groups, scales and all; ``budget_bytes``, of their
    codes, scales and zero points; or ``budget`` for the sum of ``cost(group, format)``, whatever its unit: seconds,
    joules. Groups that runtimes fuse share a format, and their costs and losses are added.
    at_least: by pattern (see `quantize`) for names of groups, the least bits per weight that they may have.
    fixed: by pattern, the format that they have.

    Raises ValueError for no budget or several, a pattern that matches no group, choices that contradict each other,
    and a budget below the least possible, which is named.
    """
    limit, of, unit = _budget(sensitivity, budget_bits, budget_bytes, cost, budget)
    units = _units(sensitivity.groups)
    allowed = _allowed(sensitivity, units, at_least or {}, fixed or {})
    formats = sensitivity.formats
    loss, costs = [], []
    for groups, some in zip(units, allowed):
        sums = [math.fsum(sensitivity.kl(g, f) for g in groups) for f in formats]
        loss.append([value if f in some else math.inf for f, value in zip(formats, sums)])
        costs.append([_cost(groups, f, of) for f in formats])
    least = total(costs, [efficient(*row)[-1] for row in zip(loss, costs)])
    if not within(least, limit):
        given, scale = (limit, 1.0) if budget_bits is None else (budget_bits, 8 / sensitivity.weights)
        raise ValueError(
            f"a budget of {given:,.10g} {unit} is below the least possible, {least * scale:,.6g}: raise it, or "
            "measure cheaper formats too"
        )
    chosen = choose(loss, costs, limit)
    picked = {g.name: formats[j] for groups, j in zip(units, chosen) for g in groups}
    return _allocation(sensitivity, picked, total(costs, chosen), limit)


def frontier(
    sensitivity: Sensitivity,
    budgets: Sequence[float] | int = 16,
    *,
    at_least: Mapping[str, float] | None = None,
    fixed: Mapping[str, str] | None = None,
) -> tuple[Allocation, ...]:
    """The least loss at each of several budgets, in bits per weight.

    budgets: the budgets, or how many of them, spread evenly from the least possible to what the best formats take.
    Raises ValueError as `allocate` does.
    """
    if isinstance(budgets, int):
        if budgets < 2:
            raise ValueError(f"budgets={budgets}: give at least 2, or the budgets themselves")
        units = _units(sensitivity.groups)
        allowed = _allowed(sensitivity, units, at_least or {}, fixed or {})
        ends = []
        for how in (min, max):
            best = (how(sum(g.option(f).bytes for g in groups) for f in some) for groups, some in zip(units, allowed))
            ends.append(Fraction(8 * sum(best), sensitivity.weights))
        steps = [ends[0] + (ends[1] - ends[0]) * i / (budgets - 1) for i in range(budgets)]
        limits = dict.fromkeys(math.floor(bits * sensitivity.weights / 8) for bits in steps)
        return tuple(allocate(sensitivity, budget_bytes=limit, at_least=at_least, fixed=fixed) for limit in limits)
    return tuple(allocate(sensitivity, budget_bits=bits, at_least=at_least, fixed=fixed) for bits in budgets)


def _bytes(sensitivity: Sensitivity, bits: float) -> int:
    if not 0 < bits < math.inf:
        raise ValueError(f"a budget of {bits!r} bits per weight: give a positive number")
    # the decimal that was written, so that 4.3 bits are 43/10
    return math.floor(Fraction(str(bits)) * sensitivity.weights / 8)


def _budget(
    sensitivity: Sensitivity, bits: float | None, size: int | None, cost: Cost | None, budget: float | None
) -> tuple[float, Cost, str]:
    given = [name for name, v in (("budget_bits", bits), ("budget_bytes", size), ("budget", budget)) if v is not None]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'no budget'} given: give one of budget_bits, budget_bytes, budget")
    if (cost is None) != (budget is None):
        raise ValueError("cost and budget belong together: give both, or budget_bits or budget_bytes alone")
    if cost is not None and budget is not None:
        return budget, cost, "in the unit of the costs"
    limit = _bytes(sensitivity, bits) if bits is not None else size
    assert limit is not None
    return limit, lambda group, format: group.option(format).bytes, "bits per weight" if bits is not None else "bytes"


def _units(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that share a format."""
    found: dict[Hashable, list[Group]] = {}
    for group in groups:
        found.setdefault(("fused", group.fused) if group.fused else ("group", group.name), []).append(group)
    return list(found.values())


def _allowed(
    sensitivity: Sensitivity,
    units: Sequence[Sequence[Group]],
    at_least: Mapping[str, float],
    fixed: Mapping[str, str],
) -> list[list[str]]:
    """The formats that each unit may have."""
    for pattern, name in fixed.items():
        if name not in sensitivity.formats:
            raise ValueError(f"fixed {pattern!r} is {name!r}, which was not measured: {', '.join(sensitivity.formats)}")
    rules: list[tuple[str, Callable[[Group, str], bool]]] = [
        *((p, lambda group, f, least=least: sensitivity.bits(group, f) >= least) for p, least in at_least.items()),
        *((p, lambda group, f, name=name: f == name) for p, name in fixed.items()),
    ]
    used: set[str] = set()
    allowed = []
    for groups in units:
        some = list(sensitivity.formats)
        met: list[str] = []
        for pattern, holds in rules:
            expression = matcher(pattern)
            for group in groups:
                if expression.fullmatch(group.name):
                    used.add(pattern)
                    met.append(pattern)
                    some = [f for f in some if holds(group, f)]
        if not some:
            names, asked = ", ".join(g.name for g in groups), ", ".join(map(repr, dict.fromkeys(met)))
            raise ValueError(f"{names}: no format of {', '.join(sensitivity.formats)} meets {asked}")
        allowed.append(some)
    if unused := [pattern for pattern, _ in rules if pattern not in used]:
        near = ", ".join(g.name for g in sensitivity.groups[:4])
        raise ValueError(f"pattern {unused[0]!r} matches no group; groups are {near}, ...")
    return allowed


def _cost(groups: Sequence[Group], format: str, of: Cost) -> float:
    """Of all groups of a unit together."""
    values = [[of(group, format)] for group in groups]
    for group, (value,) in zip(groups, values):
        if not math.isfinite(value):
            raise ValueError(f"the cost of {group.name} in {format} is {value!r}: expected a finite number")
    return total(values, [0] * len(values))


def _allocation(sensitivity: Sensitivity, picked: Mapping[str, str], cost: float, budget: float) -> Allocation:
    shares = []
    for name in sensitivity.formats:
        some = [group for group in sensitivity.groups if picked[group.name] == name]
        if some:
            shares.append(
                Share(
                    name,
                    sum(g.tensors for g in some),
                    sum(g.weights for g in some),
                    sum(g.option(name).bytes for g in some),
                    math.fsum(sensitivity.kl(g, name) for g in some),
                )
            )
    bits = 8 * sum(s.bytes for s in shares) / sensitivity.weights
    return Allocation(dict(picked), math.fsum(s.loss for s in shares), cost, budget, bits, tuple(shares))
