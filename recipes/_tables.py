"""An analysis as text: the worst tensors, and the figures of all of them by format."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence

from ..eval._analyze import Analysis, TensorErrors, middle
from ..eval._plots import shorten
from ..numerics.analysis._errors import ErrorReport, decibels, percent

NAME, NARROW = 26, 14  # what a column of names should have, and what it must have
LEGEND = (
    "SQNR: 10 log10(sum of x^2 / sum of error^2), one bit more is worth about 6 dB. Relative error: the norm of "
    "the error over the norm of x. Shares are of all finite numbers. Clipped: beyond the range, in a block the "
    "range at its scale. To zero: not zero before. Subnormal: after rounding."
)


def analysis_lines(analysis: Analysis, rows: int = 20, width: int = 80) -> list[str]:
    """The table that `halfulp analyze` prints, ``rows`` tensors at most (0: all of them)."""
    totals = analysis.totals()
    names = [name for name, *_ in totals]
    several = len(analysis.tensors) > 1
    told = f"{analysis.source}: {len(analysis.tensors)} tensor{'s' * several}, {analysis.count:,} numbers"
    left = f"; left out: {', '.join(analysis.skipped)}" if analysis.skipped else ""
    lines = textwrap.wrap(told + left, width, subsequent_indent="  ", break_on_hyphens=False)
    if several:
        lines += ["", f"SQNR in dB, the worst {names[0]} first", *_tensor_lines(analysis, names, rows, width)]
    elif (ranking := analysis.tensors[0].ranking) is not None:
        lines += ["", f"the best of at most {analysis.under:g} bits a number", *_ranking_lines(ranking)]
    return [*lines, "", *_total_lines(analysis, width), "", *textwrap.wrap(LEGEND, min(width, 100))]


def _ranking_lines(ranking: ErrorReport) -> list[str]:
    head = ("format", "bits", "SQNR", "clipped", "to zero")
    body = [
        (
            shorten(str(row.format), 36),
            f"{row.bits_per_element:.4g}",
            decibels(row.sqnr_db),
            percent(row.clipped_share),
            percent(row.underflow_share),
        )
        for row in ranking
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in [head, *body]]
    return ["  ".join(line) for line in lines]


def _tensor_lines(analysis: Analysis, names: Sequence[str], rows: int, width: int) -> list[str]:
    """Name, numbers, an SQNR for each format, and the best format's name; where there is too little room, without
    the numbers, and with names shortened."""
    shown = analysis.tensors[: rows or None]
    heads = [*names[: len(analysis.formats)], *(["best"] if analysis.under is not None else [])]
    cells = [_cells(t) for t in shown]
    columns = [[head, *(line[i] for line in cells)] for i, head in enumerate(heads)]
    counts = ["numbers", *(f"{t.spec.count:,}" for t in shown)]
    room = width - sum(2 + max(map(len, column)) for column in columns)
    last: list[str] = []
    if analysis.under is not None:
        last = [f"under {analysis.under:g} bits", *(str(t.best.format) if t.best else "" for t in shown)]
        most = max(NARROW, min(max(map(len, last)), room - NAME - 2))
        last = [shorten(text, most) for text in last]
        room -= 2 + max(map(len, last))
    full = [t.spec.name for t in shown]
    if room - 2 - max(map(len, counts)) >= min(NAME, max(map(len, full))):
        columns.insert(0, counts)
        room -= 2 + max(map(len, counts))
    first = ["tensor", *(shorten(name, max(room, NARROW)) for name in full)]
    parts = [_justified(first, str.ljust), *(_justified(c, str.rjust) for c in columns)]
    parts += [_justified(last, str.ljust)] if last else []
    lines = ["  ".join(line).rstrip() for line in zip(*parts)]
    more = len(analysis.tensors) - len(shown)
    return lines + ([f"and {more} more: --rows 0 prints all of them, -o FILE.csv writes all figures"] if more else [])


def _justified(texts: Sequence[str], how: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, texts))
    return [how(text, width) for text in texts]


def _cells(t: TensorErrors) -> list[str]:
    return [decibels(s.sqnr_db) for s in t.stats] + ([decibels(t.best.sqnr_db)] if t.best else [])


def _total_lines(analysis: Analysis, width: int) -> list[str]:
    """Figures in rows and formats in columns, as many side by side as the width allows."""
    columns = []
    for name, whole, each in analysis.totals():
        column = {
            "": name,
            "bits a number": f"{whole.bits_per_element:.4g}",
            "SQNR, dB": decibels(whole.sqnr_db),
            "  worst tensor": decibels(min(each, key=lambda v: (not math.isnan(v), v))),
            "  median tensor": decibels(middle(each)),
            "relative error": f"{whole.relative_error:.3g}",
            "mean sq. error": f"{whole.mse:.3g}",
            "mean error": f"{whole.mean_error:.2g}",
            "largest error": f"{whole.max_abs_error:.3g}",
            "  relative": f"{whole.max_relative_error:.3g}",
            "clipped": percent(whole.clipped_share),
            "to zero": percent(whole.underflow_share),
            "subnormal": percent(whole.subnormal_share),
            "cosine": f"{whole.cosine:.6f}",
        }
        if len(each) == 1:
            del column["  worst tensor"], column["  median tensor"]
        column |= {"NaN, infinite": f"{whole.nonfinite:,}"} if whole.nonfinite else {}
        column |= {"made so": f"{whole.lost:,}"} if whole.lost else {}
        columns.append(column)
    key = 17
    wide = max(len(text) for column in columns for text in column.values()) + 2
    across = max(1, (width - key) // wide)
    lines: list[str] = []
    for start in range(0, len(columns), across):
        part = columns[start : start + across]
        keys = dict.fromkeys(name for column in part for name in column)
        lines += [""] * bool(lines)
        lines += [
            (f"{name:{key}}" + "".join(f"{column.get(name, '0'):>{wide}}" for column in part)).rstrip() for name in keys
        ]
    lines[0] = "all tensors".ljust(key) + lines[0][key:] if len(analysis.tensors) > 1 else lines[0]
    return lines
