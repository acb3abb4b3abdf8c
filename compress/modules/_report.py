"""What was done to a module: a table, and the codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...numerics import Packed, Quantized, pack_quantized
from .._plan import Plan
from ._fold import Fold


@dataclass(frozen=True)
class Result:
    """What became of one parameter.

    ``codes``: of its numbers, as a matrix (see `Layer`); None where it was only pruned. ``input_scale``: of static
    inputs, float32 [1]. ``relative_error``: ||W - V|| / ||W||. ``zeros``: how many weights are zero. ``facts``: what
    the methods tell: "vectors" seen, "output_loss" (the share of the output's squares that is lost), "fallback".
    """

    codes: Quantized | torch.Tensor | None
    input_scale: torch.Tensor | None
    relative_error: float
    zeros: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What `compress_module` did: a row of the plan for each parameter, results by the name of the parameter."""

    plan: Plan
    results: Mapping[str, Result]
    folds: tuple[Fold, ...] = ()

    @property
    def codes(self) -> dict[str, Quantized | torch.Tensor]:
        """The codes of each quantized parameter."""
        return {name: result.codes for name, result in self.results.items() if result.codes is not None}

    def packed(self) -> dict[str, Packed]:
        """The codes byte for byte, see `halfulp.numerics.pack`."""
        formats = {row.name: row.weights for row in self.plan.rows}
        return {name: pack_quantized(codes, formats[name]) for name, codes in self.codes.items()}  # type: ignore[arg-type]

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all parameters before, and after with codes packed; zeros take the room of any other number."""
        packed = self.packed()
        before = sum(row.spec.nbytes for row in self.plan.rows)
        return before, sum(packed[r.name].nbytes if r.name in packed else r.spec.nbytes for r in self.plan.rows)

    def __str__(self) -> str:
        """The plan's table with the relative error of each weight, and the bytes."""
        lines = [("tensor", "shape", "becomes", "error", "why")]
        for row in self.plan.rows:
            result = self.results.get(row.name)
            inputs = f", inputs {row.activations}{' static' * row.static}" if row.activations is not None else ""
            told = [] if result is None else [str(result.facts[k]) for k in ("fallback", "held") if k in result.facts]
            why = "; ".join([note for note in (row.note or row.reason,) if note] + told)
            error = "" if result is None else f"{result.relative_error:.3g}"
            lines.append((row.name, " x ".join(map(str, row.spec.shape)), row.action + inputs, error, why))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        text = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[4]]).rstrip() for line in lines]
        before, after = self.nbytes
        text += [f"note: {note}" for note in self.plan.notes]
        return "\n".join([*text, f"{before} bytes of parameters before, {after} with codes packed"])
