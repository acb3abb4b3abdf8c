"""Pictures of an analysis: error against bits, and the error of every tensor, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ..numerics.analysis._errors import decibels, percent
from ._analyze import Analysis, middle
from ._format_plots import COLOURS, styled
from ._layers import _place, _short_kinds
from ._plots import CHARACTER, STEPS, Axis, Point, Scale, _line, _text, heat_class, plain, scatter, shorten, ticks
from ._record import write_atomic

WIDTH = 860.0
ENDINGS = (".csv", ".svg", ".html")
WORST = 36  # tensors in the picture of a source without layers
CELL = 14.0


def check_ending(out: Path) -> None:
    """ValueError unless the name ends in one of `ENDINGS`: before the work, not after it."""
    if out.suffix not in ENDINGS:
        raise ValueError(f"cannot write an analysis to {out}: give a name that ends in {', '.join(ENDINGS)}")


def analysis_file(analysis: Analysis, out: Path, command: Sequence[str] = ()) -> Path:
    """Write the analysis to a .csv, .svg or .html file."""
    check_ending(out)
    texts = {
        ".csv": lambda: analysis.csv(),
        ".svg": lambda: analysis_picture(analysis) + "\n",
        ".html": lambda: analysis_page(analysis, command),
    }
    write_atomic(texts[out.suffix](), out)
    return out


def analysis_picture(analysis: Analysis) -> str:
    """One SVG that stands alone: SQNR against bits over SQNR of every tensor."""
    parts: list[tuple[str, float]] = []
    if len(analysis.totals()) > 1:
        parts.append((bits_figure(analysis), 280.0))
    body, height = tensor_figure(analysis)
    parts.append((body, height))
    drawn, y = [], 34.0
    for svg, tall in parts:
        drawn.append(f'<g transform="translate(0 {y:g})">{svg}</g>')
        y += tall + 26
    title = f"{analysis.source}: {analysis.count:,} numbers in {len(analysis.tensors)} tensors"
    return styled(WIDTH, y, title, [_text(0, 14, title, "title"), *drawn])


def bits_figure(analysis: Analysis) -> str:
    """SQNR of all numbers together against bits; bars from the tenth to the ninetieth hundredth of tensors."""
    points = []
    for name, whole, each in analysis.totals():
        known = [v for v in each if math.isfinite(v)]
        if math.isfinite(whole.sqnr_db) and known:
            low, high = np.quantile(known, (0.1, 0.9)).tolist()
            bits = whole.bits_per_element
            hint = f"{name}: {whole.sqnr_db:.2f} dB at {bits:.4g} bits"
            points.append(Point(name, bits, (bits, bits), whole.sqnr_db, (low, high), False, hint))
    if not points:
        return ""
    x, y = Axis("bits a number, scales included"), Axis("SQNR, dB (bars: four of five tensors)")
    svg = scatter(points, x, y, width=560, height=270, zero=False)
    return svg.replace("<svg ", '<svg x="0" y="0" width="560" height="270" ', 1)


def tensor_figure(analysis: Analysis) -> tuple[str, float]:
    """Layer by module where tensors have layers, else a line for each of the worst tensors; and its height."""
    places = {t.spec.name: _place(t.spec.name) for t in analysis.tensors}
    layers = {place[1] for place in places.values() if place}
    return _strips(analysis, places) if len(layers) > 1 else _dots(analysis)


def _series(analysis: Analysis) -> list[tuple[str, dict[str, float]]]:
    """SQNR by tensor, for each format and the best under the bits."""
    names = [name for name, *_ in analysis.totals()]
    values = [[s.sqnr_db for s in t.stats] + ([t.best.sqnr_db] if t.best else []) for t in analysis.tensors]
    return [(name, {t.spec.name: v[i] for t, v in zip(analysis.tensors, values)}) for i, name in enumerate(names)]


def _strips(analysis: Analysis, places: dict[str, Any]) -> tuple[str, float]:
    """For each format rows of modules by layer, all on one scale of colours: the darker, the worse."""
    short = _short_kinds({place[0] for place in places.values() if place})
    rows = list(dict.fromkeys(short[place[0]] for name, place in sorted(places.items()) if place))
    alone = [name for name, place in places.items() if place is None]
    columns = sorted({place[1] for place in places.values() if place})
    series = _series(analysis)
    finite = [v for _, values in series for v in values.values() if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    left = max(len(shorten(row.removesuffix(".weight"), 22)) for row in [*rows, *alone]) * CHARACTER + 10
    wide = min((WIDTH - left) / len(columns), 22.0)
    body, y = [_text(0, 10, "SQNR in dB of every tensor, by layer", "head")], 24.0
    for name, values in series:
        body.append(_text(0, y + 12, name, "name"))
        y += 20
        for row in rows:
            body.append(_text(left - 8, y + 10, shorten(row, 22), "label", "end"))
            cells: dict[int, list[float]] = {}
            for tensor, place in places.items():
                if place and short[place[0]] == row:
                    cells.setdefault(place[1], []).append(values[tensor])
            body += [
                _cell(left + columns.index(c) * wide, y, wide, min(v), low, high, f"{row} {c}")
                for c, v in cells.items()
            ]
            y += CELL
        for tensor in alone:
            body.append(_text(left - 8, y + 10, shorten(tensor.removesuffix(".weight"), 22), "label", "end"))
            body.append(_cell(left, y, wide, values[tensor], low, high, tensor))
            body.append(_text(left + wide + 6, y + 10, decibels(values[tensor]), "tick"))
            y += CELL
        y += 8
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * wide >= 26 or n >= len(columns))
    for i, column in enumerate(columns):
        if i % every == 0:
            body.append(_text(left + (i + 0.5) * wide, y + 6, str(column), "tick", "middle"))
    body.append(_text(left - 8, y + 6, "layer", "tick", "end"))
    y += 20
    return "".join([*body, *_ramp(left, y, low, high)]), y + 18


def _cell(x: float, y: float, wide: float, value: float, low: float, high: float, name: str) -> str:
    kind = heat_class(-value, -high, -low) if math.isfinite(value) else "unknown"
    hint = f"<title>{escape(name)}: {decibels(value)} dB</title>"
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide - 1:.1f}" height="{CELL - 1:g}">{hint}</rect>'


def _ramp(x: float, y: float, low: float, high: float) -> list[str]:
    first, last = f"{high:.1f} dB", f"{low:.1f} dB"
    at = x + len(first) * CHARACTER + 4
    squares = [f'<rect class="h{i}" x="{at + i * 14:.1f}" y="{y:g}" width="14" height="11"/>' for i in range(STEPS)]
    return [_text(x, y + 9, first, "tick"), *squares, _text(at + STEPS * 14 + 5, y + 9, last, "tick")]


def _dots(analysis: Analysis) -> tuple[str, float]:
    """The worst tensors, a line each with a dot for each format."""
    shown = analysis.tensors[:WORST]
    series = _series(analysis)
    finite = [v for _, values in series for t in shown if math.isfinite(v := values[t.spec.name])]
    if not finite:
        return _text(0, 10, "no format changes these tensors", "label"), 20.0
    left = max(len(shorten(t.spec.name, 36)) for t in shown) * CHARACTER + 12
    margin = (max(finite) - min(finite)) * 0.06 or 1.0
    across = Scale(min(finite) - margin, max(finite) + margin, left, WIDTH - 10)
    body, x = [_text(0, 10, "SQNR in dB", "head")], left
    for i, (name, _) in enumerate(series):
        body.append(f'<circle class="dot s{i % COLOURS}" cx="{x + 4:.1f}" cy="6" r="4"/>')
        body.append(_text(x + 13, 10, name, f"name s{i % COLOURS}"))
        x += 30 + len(name) * CHARACTER
    bottom = 30 + 18.0 * len(shown)
    for value in ticks(across.low, across.high, most=9):
        body += [
            _line(across(value), 24, across(value), bottom, "grid"),
            _text(across(value), bottom + 14, plain(value), "tick", "middle"),
        ]
    for row, t in enumerate(shown):
        y = 36 + 18.0 * row
        values = [(i, v) for i, (_, by) in enumerate(series) if math.isfinite(v := by[t.spec.name])]
        body.append(_text(left - 10, y + 4, shorten(t.spec.name, 36), "label", "end"))
        if values:
            body.append(_line(across(min(v for _, v in values)), y, across(max(v for _, v in values)), y, "rule"))
        body += [
            f'<circle class="dot s{i % COLOURS}" cx="{across(v):.1f}" cy="{y:g}" r="4.5">'
            f"<title>{escape(series[i][0])}: {decibels(v)} dB</title></circle>"
            for i, v in values
        ]
    more = len(analysis.tensors) - len(shown)
    if more:
        body.append(_text(0, bottom + 30, f"the worst {len(shown)} of {len(analysis.tensors)} tensors", "label faint"))
    return "".join(body), bottom + (36 if more else 20)


def analysis_page(analysis: Analysis, command: Sequence[str] = ()) -> str:
    """A page that needs nothing else: the picture, the totals, and every tensor."""
    from jinja2 import Environment, StrictUndefined

    text = files(__package__).joinpath("analysis.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    totals = [
        {
            "name": name,
            "bits": f"{s.bits_per_element:.4g}",
            "sqnr": decibels(s.sqnr_db),
            "worst": decibels(min(each)),
            "median": decibels(middle(each)),
            "relative": f"{s.relative_error:.3g}",
            "mse": f"{s.mse:.3g}",
            "largest": f"{s.max_abs_error:.3g}",
            "clipped": percent(s.clipped_share),
            "zero": percent(s.underflow_share),
            "subnormal": percent(s.subnormal_share),
            "cosine": f"{s.cosine:.6f}",
        }
        for name, s, each in analysis.totals()
    ]
    tensors = [
        {
            "name": t.spec.name,
            "shape": " × ".join(map(str, t.spec.shape)),
            "dtype": t.spec.dtype,
            "cells": [
                {"sqnr": decibels(s.sqnr_db), "clipped": percent(s.clipped_share), "zero": percent(s.underflow_share)}
                for s in [*t.stats, *([t.best] if t.best else [])]
            ],
            "best": str(t.best.format) if t.best else "",
        }
        for t in analysis.tensors
    ]
    return template.from_string(text).render(
        source=analysis.source,
        count=f"{analysis.count:,}",
        skipped=", ".join(analysis.skipped),
        first=totals[0]["name"],
        totals=totals,
        tensors=tensors,
        under=analysis.under,
        picture=analysis_picture(analysis),
        command=" ".join(command),
    )
