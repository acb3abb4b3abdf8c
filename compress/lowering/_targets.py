"""TPU generations: what the lowering needs to know of each, from targets.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

_OPERANDS = re.compile(r"\.(f32|bf16|s8|s4|f8\w*)\b")
_ROWS = {"f32": 8, "bf16": 16, "s8": 32, "s4": 64, "f8": 32}  # of a vector register of 4 KiB, 128 numbers each
COPY_LATENCY = 0.5e-6  # seconds from a copy's last byte until its wait ends; see docs/lowering.md


def _kind(instruction: str) -> str:
    """What a multiplication multiplies, by its left operand."""
    found = _OPERANDS.search(instruction)
    return "f32" if found is None else found.group(1)[:2] if found.group(1).startswith("f8") else found.group(1)


@dataclass(frozen=True)
class Target:
    """One core of a TPU generation; the sources of the figures are in targets.toml.

    rows: of the left operand that a matrix unit takes in a cycle, by operand. clock in Hz, hbm in bytes a second,
    vmem and vmem_default in bytes. delay: bundles that are issued after a branch. granule: bytes in which copies are
    counted. copy_seconds: from a copy's last byte until its wait ends.
    """

    name: str
    topology: str
    matrix_units: int
    side: int
    rows: Mapping[str, int]
    delay: int
    granule: int
    clock: float
    hbm: float
    vmem: int
    vmem_default: int
    copy_seconds: float = COPY_LATENCY

    @property
    def bytes_per_cycle(self) -> float:
        """Of HBM."""
        return self.hbm / self.clock

    @property
    def copy_latency(self) -> float:
        """In cycles."""
        return self.copy_seconds * self.clock

    def rate(self, instruction: str) -> int:
        """Rows that a matrix unit takes in a cycle under an instruction."""
        return self.rows.get(_kind(instruction), 1)

    def occupancy(self, instruction: str) -> int:
        """Cycles for which one multiplication keeps its unit.

        >>> target("v5e").occupancy("vmatmul.s8.gmra.mxu0"), target("v6e").occupancy("vmatmul.mubr.bf16.gmra.mxu1")
        (16, 8)
        """
        return max(1, _ROWS[_kind(instruction)] // self.rate(instruction))

    def matmul_cycles(self, m: int, k: int, n: int, operand: str) -> float:
        """The fewest cycles in which the matrix units multiply [m, k] by [k, n].

        >>> target("v6e").matmul_cycles(4096, 4096, 4096, "s8")
        131072.0
        """
        return m * k * n / (self.matrix_units * self.side**2 * self.rows[operand])


@cache
def targets() -> dict[str, Target]:
    """All generations, by name."""
    text = (resources.files(__package__) / "targets.toml").read_text(encoding="utf-8")
    return {
        name: Target(
            name,
            row["topology"],
            row["matrix"]["units"],
            row["matrix"]["side"],
            row["rows"],
            row["delay"],
            row["granule"],
            row["clock"] * 1e9,
            row["hbm"] * 1e9,
            int(row["vmem"]["most"] * 2**20),
            int(row["vmem"]["default"] * 2**20),
        )
        for name, row in tomllib.loads(text).items()
    }


def target(name: str) -> Target:
    """A generation by its name, with or without "tpu-" before it.

    >>> target("tpu-v5e").matrix_units
    4

    Raises ValueError with the choices.
    """
    known = targets()
    short = name.removeprefix("tpu-")
    found = known.get(short) or known.get(f"tpu{short}") or known.get(short.replace("7x", "tpu7x"))
    if found is None:
        raise ValueError(f"no target {name!r}: choose {', '.join('tpu-' + n.removeprefix('tpu') for n in known)}")
    return found
