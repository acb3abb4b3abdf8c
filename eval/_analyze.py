"""What formats would do to a checkpoint, tensor by tensor, in bounded memory."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ..numerics import Block, ErrorReport, ErrorStats, Format, best_format, format
from ..numerics.analysis._stream import stats_over
from ._tensors import Spec, Tensors, open_tensors

KEEP = 3  # formats measured on the whole of each tensor when the best one is searched
KEEP_ONE = 12  # and of the only one
COLUMNS = (
    "bits_per_element",
    "count",
    "nonfinite",
    "lost",
    "sqnr_db",
    "mse",
    "mean_error",
    "max_abs_error",
    "max_relative_error",
    "clipped_share",
    "underflow_share",
    "subnormal_share",
    "cosine",
)


@dataclass(frozen=True)
class TensorErrors:
    """A tensor and what each format does to it, in the order asked; ``ranking``: the best ones under the bits."""

    spec: Spec
    stats: tuple[ErrorStats, ...]
    ranking: ErrorReport | None = None

    @property
    def best(self) -> ErrorStats | None:
        """The best of the ranking."""
        return None if self.ranking is None else self.ranking.best

    @property
    def first(self) -> float:
        """SQNR of the format that the table is ordered by."""
        return (self.stats[0] if self.stats else self.best).sqnr_db  # type: ignore[union-attr]


@dataclass(frozen=True)
class Analysis:
    """What `analyze` found: ``tensors`` worst first by the first format, ``skipped`` in words."""

    source: str
    formats: tuple[Format, ...]
    under: float | None
    tensors: tuple[TensorErrors, ...]
    skipped: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return sum(t.spec.count for t in self.tensors)

    def totals(self) -> list[tuple[str, ErrorStats, list[float]]]:
        """For each format (and the best of each tensor) its name, the sum of all tensors, and the SQNRs of each."""
        rows = [(str(fmt), [t.stats[i] for t in self.tensors]) for i, fmt in enumerate(self.formats)]
        if self.under is not None:
            rows.append((f"best <= {self.under:g}", [t.best for t in self.tensors if t.best is not None]))
        found = []
        for name, stats in rows:
            if stats:
                one = stats[0].format
                whole = sum((replace(s, format=one) for s in stats), ErrorStats(one))
                found.append((name, whole, [s.sqnr_db for s in stats]))
        return found

    def csv(self) -> str:
        """Every figure of every tensor and format, as comma-separated values."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["tensor", "shape", "dtype", "format", "chosen", *COLUMNS])
        for t in self.tensors:
            rows = [("asked", s) for s in t.stats] + ([("best", t.best)] if t.best else [])
            for chosen, s in rows:
                shape = "x".join(map(str, t.spec.shape))
                figures = [getattr(s, name) for name in COLUMNS]
                table.writerow([t.spec.name, shape, t.spec.dtype, str(s.format), chosen, *figures])
        return text.getvalue()


def analyze(
    source: Any,
    formats: Sequence[Format | str] = (),
    *,
    tensors: Sequence[str] = (),
    under: float | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Analysis:
    """What rounding each tensor of a source to each of some formats does to it.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/w.npy", np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    ...     found = analyze(f"{folder}/w.npy", ["mxfp4", "nvfp4"])
    >>> [(name, round(whole.sqnr_db, 1)) for name, whole, _ in found.totals()]
    [('mxfp4', 18.8), ('nvfp4', 20.5)]

    source: a `Tensors`, or what `open_tensors` takes. ``tensors``: patterns for their names, as in a recipe's
    targets; without any, all of two axes or more. ``under``: find for each tensor the best format of at most so
    many bits too (see `best_format`). Blocks lie along the axis that a matmul sums over. A tensor is read a few
    rows at a time, but whole where ``under`` is given, or a format's scale is one a channel of the first axis.
    ``progress``: called with numbers done, numbers in all, and the tensor's name.

    Raises ValueError where there are neither formats nor ``under``, and where a pattern matches nothing.
    """
    opened = source if isinstance(source, Tensors) else open_tensors(source)
    read = [format(f) for f in formats]
    if not read and under is None:
        raise ValueError("name formats to compare, or give the bits to stay under")
    if under is not None and not 1 <= under <= 32:
        raise ValueError(f"under {under:g} bits: give a number from 1 to 32")
    chosen = opened.select(tuple(tensors))
    total, done = sum(spec.count for spec in chosen), 0
    found = []
    for spec in chosen:

        def step(count: int, name: str = spec.name) -> None:
            nonlocal done
            done += count
            if progress is not None and count:
                progress(min(done, total), total, name)

        keep = KEEP if len(chosen) > 1 else KEEP_ONE
        share = 1.0 if under is None else len(read) / (len(read) + keep)
        before = done
        stats: tuple[ErrorStats, ...] = ()
        along = [_along(fmt, opened.axis(spec), spec) for fmt in read]
        if along:
            stats = stats_over(
                lambda rows, name=spec.name: opened.read(name, rows),  # type: ignore[misc]
                spec.shape,
                along,
                progress=lambda count, share=share: step(round(share * count)),  # type: ignore[misc]
            )
        ranking = None
        if under is not None:
            ranking = best_format(opened.read(spec.name, slice(0, spec.shape[0])), under, keep=keep)
        step(before + spec.count - done)
        found.append(TensorErrors(spec, tuple(replace(s, format=f) for s, f in zip(stats, read)), ranking))
    found.sort(key=lambda t: (math.isnan(t.first), t.first, t.spec.name))
    return Analysis(opened.source, tuple(read), under, tuple(found), _skipped(opened, chosen))


def _along(fmt: Format, axis: int, spec: Spec) -> Format:
    """A block format with its blocks along the tensor's own axis, unless it names another than the last."""
    return replace(fmt, axis=axis) if isinstance(fmt, Block) and fmt.axis == -1 and len(spec.shape) > 1 else fmt


def _skipped(opened: Tensors, chosen: Sequence[Spec]) -> tuple[str, ...]:
    names = {spec.name for spec in chosen}
    rest = [spec for spec in opened.specs if spec.name not in names]
    kinds = {
        "of other than floats": [s for s in rest if not s.floats],
        "of one axis": [s for s in rest if s.floats and s.count and len(s.shape) < 2],
        "empty": [s for s in rest if s.floats and not s.count],
        "not asked for": [s for s in rest if s.floats and s.count and len(s.shape) > 1],
    }
    return tuple(f"{len(found)} {words}" for words, found in kinds.items() if found)


def middle(values: Sequence[float]) -> float:
    """The median, NaN where there is none."""
    known = [v for v in values if not math.isnan(v)]
    return median(known) if known else math.nan
