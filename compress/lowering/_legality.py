"""Which operands a TPU's matrix units take, and at what cost: a table made by compiling, and questions to it."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import version

from ...numerics import Format
from ...numerics import format as read_format
from ._compile import Compiled, Job, compile_jobs
from ._execute import execute
from ._targets import Target, target, targets
from ._tile import SIDE, STEPS

# formats by the name of the jax dtype that holds them
DTYPES = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8", "int4": "int4", "int2": "int2",
    "float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "float8_e4m3b11fnuz": "e4m3b11fnuz",
    "float4_e2m1fn": "e2m1",
}  # fmt: skip
_PAIRS = (
    ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8"), ("int8", "int4"), ("int8", "int2"),
    ("int4", "int4"), ("int2", "int2"), ("e4m3fn", "e4m3fn"), ("e5m2", "e5m2"), ("e4m3fn", "e5m2"),
    ("e4m3b11fnuz", "e4m3b11fnuz"), ("e4m3fn", "e2m1"), ("e2m1", "e2m1"), ("bf16", "int8"), ("bf16", "int4"),
    ("bf16", "int2"), ("bf16", "e4m3fn"), ("bf16", "e5m2"), ("bf16", "e2m1"),
)  # fmt: skip


def dtype_of(fmt: Format | str) -> str:
    """The jax dtype that holds a scalar format's numbers.

    >>> dtype_of("e4m3fn")
    'float8_e4m3fn'

    Raises ValueError for formats that no dtype holds, with those that one does.
    """
    wanted = read_format(fmt)
    for dtype, name in DTYPES.items():
        if read_format(name) == wanted:
            return dtype
    raise ValueError(f"{wanted} is no operand of a TPU kernel: choose {', '.join(DTYPES.values())}")


@dataclass(frozen=True)
class Way:
    """One way to multiply a pair of formats on a target, as the compiler took it.

    way: "direct", or the format that both operands are converted to in the kernel. instruction: of the matrix unit,
    without what is particular to a call. cycles: of a 512 x 512 x 512 tile with copies free, some 100 to 200 of which
    are the grid's step; error: why not.
    """

    way: str
    instruction: str | None = None
    cycles: float | None = None
    error: str | None = None

    @property
    def in_integers(self) -> bool:
        """Are products summed in int32? Else in float32, where sums of int8 products are exact up to 1,024 of them."""
        return self.instruction is not None and self.instruction.endswith((".s8", ".s4"))


def ways(x: str, w: str) -> tuple[str, ...]:
    """The ways that are tried for a pair of format names: as they are, and under each wider format that holds both."""
    wider = ["bf16"] if "fp32" not in (x, w) and "fp16" not in (x, w) else []
    if x.startswith("int") and w.startswith("int"):
        wider.append("int8")
    if {x, w} <= {"e2m1", "e4m3fn"}:
        wider.append("e4m3fn")
    return ("direct", *(other for other in wider if {other} != {x, w}))


def generate(names: Iterable[str] | None = None, pairs: Iterable[tuple[str, str]] = _PAIRS) -> str:
    """The table as TOML, by compiling every way to multiply every pair for every target; some minutes."""
    lines = [f"# Made by `python -m halfulp.compress.lowering`, with libtpu {version('libtpu')}; not by hand.", ""]
    for name in names or targets():
        jobs = [job_of(target(name), x, w, way) for x, w in pairs for way in ways(x, w)]
        for compiled in compile_jobs(jobs):
            found = measured(compiled)
            x, w, way = compiled.job.name.split("-")
            lines += [f"[{name}.{x}.{w}.{way}]", *_fields(found), ""]
    return "\n".join(lines)


def _fields(found: Way) -> list[str]:
    if found.error is not None:
        return [f"error = {_quoted(found.error)}"]
    return [f'instruction = "{found.instruction}"', f"cycles = {found.cycles:g}"]


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def job_of(on: Target, x: str, w: str, way: str) -> Job:
    """The job that compiles a way to multiply a pair."""
    arguments = {"x": dtype_of(x), "w": dtype_of(w), "way": way if way == "direct" else dtype_of(way)}
    return Job(f"{x}-{w}-{way}", "halfulp.compress.lowering._tile:tile", on, arguments)


def measured(compiled: Compiled) -> Way:
    """What a compilation of `_tile.tile` says."""
    way = compiled.job.name.split("-")[2]
    if compiled.error is not None:
        return Way(way, error=_reason(compiled.error))
    program = next(program for name, program in compiled.programs.items() if name.startswith("tile"))
    schedule = execute(program, replace(compiled.job.target, hbm=math.inf, copy_seconds=0.0))
    kinds = {_instruction(name) for name in schedule.matmuls}
    return Way(way, " ".join(sorted(kinds)), schedule.cycles / STEPS)


def _instruction(name: str) -> str:
    """Without the registers that it works on."""
    return re.split(r"\.(?:gmra|vlgmr|dwg|msr[ab]|mrb)", re.sub(r"\.(?:mubr|msk)\b", "", name))[0]


def _reason(error: str) -> str:
    """The compiler's complaint in a line."""
    plain = " ".join(error.split()).split(" The MLIR operation")[0].split(" See http")[0]
    plain = plain.rpartition("Mosaic failed to compile TPU kernel: ")[2].removeprefix("MosaicError: INTERNAL: ")
    # what a fatal line of a log begins with: day, time, process, place
    return re.sub(r"F\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] ", "", plain)[:160]


@cache
def table() -> dict[str, dict[tuple[str, str], tuple[Way, ...]]]:
    """The table that comes with the package: by target, by the formats of x and w, the ways that were tried."""
    text = (resources.files(__package__) / "legality.toml").read_text(encoding="utf-8")
    return {
        name: {
            (x, w): tuple(Way(way, **fields) for way, fields in found.items())
            for x, others in rows.items()
            for w, found in others.items()
        }
        for name, rows in tomllib.loads(text).items()
    }


def operands(x: Format | str, w: Format | str, on: Target | str) -> Way:
    """The cheapest way to multiply two formats on a target, by the table.

    >>> operands("int8", "int8", "tpu-v5e").in_integers, operands("int8", "int8", "tpu-7x").in_integers
    (True, False)
    >>> operands("int8", "int4", "tpu-v5e").way
    'int8'

    Raises ValueError for a pair that is not in the table, or that the target refuses in every way, with what it takes.
    """
    on = target(on) if isinstance(on, str) else on
    names = tuple(DTYPES[dtype_of(fmt)] for fmt in (x, w))
    known = table()[on.name]
    found = known.get((names[0], names[1]))
    if found is None:
        pairs = ", ".join(f"{a} x {b}" for a, b in known)
        raise ValueError(f"{names[0]} x {names[1]} is no pair of the table; it has {pairs}")
    legal = [way for way in found if way.cycles is not None]
    if not legal:
        why = found[0].error
        better = [f"{a} x {b}" for (a, b), others in known.items() if any(o.cycles is not None for o in others)]
        raise ValueError(
            f"{names[0]} x {names[1]} does not compile for {on.name} ({why}); it takes {', '.join(better)}"
        )
    return min(legal, key=lambda way: way.cycles or math.inf)


def ideal_cycles(on: Target, instruction: str) -> float:
    """The fewest cycles of a tile under an instruction."""
    return SIDE**3 / (on.matrix_units * on.side**2 * on.rate(instruction))
