"""Mixed precision as a transform: each group of layers in the format that an allocation gives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from .._plan import Plan, Row, select
from .._transforms import Quantize, Weight, gptq, quantize
from ..calibrate._seen import Seen
from ._allocate import Allocation, Cost, allocate
from ._sensitivity import KEEP, Sensitivity

By = Literal["gptq", "nearest"]


@dataclass(frozen=True)
class Mixed:
    """Steps of `quantize` or `gptq`, one for each format, whose targets have nothing in common; see `mixed`.

    ``groups``: of what was measured the name, its patterns, and how many tensors and weights it has.
    """

    steps: tuple[Quantize, ...]
    allocation: Allocation
    groups: tuple[tuple[str, tuple[str, ...], int, int], ...]

    @property
    def calibrates(self) -> bool:
        """Does any format's step?"""
        return any(step.calibrates for step in self.steps)

    def plan(self, plan: Plan) -> Plan:
        """Mark the rows of each step. Raises ValueError for a model that is not the one that was measured."""
        for name, patterns, tensors, weights in self.groups:
            rows = select(plan, _exact(patterns))
            found = len(rows), sum(prod(row.spec.shape) for row in rows)
            if found != (tensors, weights):
                raise ValueError(
                    f"{name} has {found[0]} tensors of {found[1]:,} weights here, and was measured with {tensors} of "
                    f"{weights:,}: measure the sensitivity of this model"
                )
        for step in self.steps:
            plan = step.plan(plan)
        return replace(plan, notes=(*plan.notes, *self.notes))

    def apply(self, weight: Weight, row: Row, seen: Seen | None = None) -> Weight:
        """Round a tensor as its row says."""
        for step in self.steps:
            weight = step.apply(weight, row, seen)
        return weight

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the bits went."""
        a = self.allocation
        return (
            f"mixed precision: {a.bits:.4g} bits per weight, sum of the layers' own KL {a.loss:.3g} nats per token",
            *(f"mixed precision: {line}" for line in str(a).splitlines()),
        )


def mixed(
    sensitivity: Sensitivity | str | Path,
    *,
    budget_bits: float | None = None,
    budget_bytes: int | None = None,
    cost: Cost | None = None,
    budget: float | None = None,
    at_least: Mapping[str, float] | None = None,
    fixed: Mapping[str, str] | None = None,
    by: By = "gptq",
    **options: Any,
) -> Mixed:
    """Each group of layers in the format that loses least within a budget, by what each was measured to lose alone.

    >>> from halfulp.compress.mixed import Group, Option, Sensitivity
    >>> options = (Option("int4:g64", 34, (0.1,)), Option("int8:g64", 66, (0.0,)))
    >>> group = Group("fc", "fc", None, ("fc",), 1, 64, "", options)
    >>> found = Sensitivity("a model", "a text", (10,), "ragged", ("int4:g64", "int8:g64"), (group,))
    >>> [str(step.weights) for step in mixed(found, budget_bits=5, by="nearest").steps]
    ['int4:g64']

    sensitivity: what `halfulp.eval.sensitivity` gives, or its JSON file. The budget, at_least and fixed: see
    `allocate`. by: "gptq", which needs a calibration, or "nearest". options: any of `gptq` or `quantize`, such as
    ``activations`` or ``damp``, but for formats, targets and what is done with short blocks, which were measured.

    Raises ValueError as `allocate` and the steps do.
    """
    if by not in ("gptq", "nearest"):
        raise ValueError(f"by={by!r}: choose 'gptq' or 'nearest'")
    taken = [name for name in ("weights", "targets", "ignore", "ragged") if name in options]
    if taken:
        raise ValueError(f"{', '.join(taken)}: the sensitivity says so; leave it out here")
    found = sensitivity if isinstance(sensitivity, Sensitivity) else Sensitivity.read(sensitivity)
    limits: dict[str, Any] = {"budget_bits": budget_bits, "budget_bytes": budget_bytes, "cost": cost, "budget": budget}
    allocation = allocate(found, **limits, at_least=at_least, fixed=fixed)
    make = gptq if by == "gptq" else quantize
    steps: list[Quantize] = []
    for share in allocation.shares:
        if share.format != KEEP:
            groups = [group for group in found.groups if allocation.formats[group.name] == share.format]
            patterns = [pattern for group in groups for pattern in group.patterns]
            # one cache for all steps
            more = {k: v for k, v in options.items() if k != "kv" or not steps}
            steps.append(make(share.format, targets=_exact(patterns), ragged=found.ragged, **more))  # type: ignore[arg-type]
    groups_of = tuple((g.name, g.patterns, g.tensors, g.weights) for g in found.groups)
    return Mixed(tuple(steps), allocation, groups_of)


def _exact(patterns: Any) -> tuple[str, ...]:
    return tuple(f"re:{pattern}" for pattern in patterns)
