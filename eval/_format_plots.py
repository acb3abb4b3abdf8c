"""Pictures of number formats: their numbers on a line, and how wrong rounding is across magnitudes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..numerics import Block, Format, describe, error_profile, format, numbers_of
from ..numerics.analysis._describe import EXHAUSTIVE, Facts, fate, scale_in_words
from ..numerics.analysis._profile import Profile
from ._plots import CHARACTER, Scale, _line, _svg, _text, plain, shorten, ticks
from ._record import write_atomic

WIDTH = 860
LEFT = 130.0
RIGHT = WIDTH - 18.0
ROW = 46.0  # of one format's number line
COLOURS = 8
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
FLOOR = 26.0  # binades below a block's largest number that are drawn at most
BETWEEN = np.array([0.0, 0.03, 0.1, 0.25, 0.5, 0.75, 0.9, 0.97])  # points on the way from tooth to tooth


@dataclass(frozen=True)
class Line:
    """One format of a picture. ``unit``: what its magnitudes are divided by: 1, or its largest number where all
    magnitudes are relative to that of a block."""

    format: Format
    facts: Facts
    profile: Profile
    unit: float
    colour: str

    @property
    def block(self) -> bool:
        return isinstance(self.format, Block)

    @property
    def bits(self) -> str:
        bits = self.format.bits_per_element if isinstance(self.format, Block) else self.format.bits
        return f"{bits:g} bits"


def power(exponent: int) -> str:
    """`power(-4) == "2⁻⁴"`."""
    return "2" + str(exponent).translate(SUPERSCRIPT)


def format_picture(formats: Sequence[Format | str]) -> str:
    """`format_picture(["e3m2", "e2m3"])`: one SVG that stands alone, in the reader's light or dark colours.

    >>> format_picture(["e3m2"]).startswith("<svg")
    True

    One format is drawn in detail, several are compared. Where a block format is among them, magnitudes are
    relative to a block's largest, and scalar formats are drawn as if scaled to reach just that far.
    """
    lines = _lines(formats)
    return _one(lines[0]) if len(lines) == 1 else _several(lines)


def write_picture(formats: Sequence[Format | str], out: str | Path) -> Path:
    """Write `format_picture` to an .svg or .html file."""
    out = Path(out)
    write_atomic(as_file(format_picture(formats), out, ", ".join(str(format(f)) for f in formats)), out)
    return out


def as_file(svg: str, out: Path, title: str) -> str:
    """The picture as the text of an .svg or .html file; ValueError for another ending."""
    if out.suffix == ".svg":
        return svg + "\n"
    if out.suffix == ".html":
        head = f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        page = "body { margin: 0 auto; max-width: 1100px; background: #fdfdfb }\n"
        page += "@media (prefers-color-scheme: dark) { body { background: #14171a } }\n"
        look = f'<meta name="color-scheme" content="light dark">\n<style>\n{page}</style>'
        return f"{head}{look}\n{svg}\n</html>\n"
    raise ValueError(f"cannot draw into {out}: give a name that ends in .svg or .html")


def styled(width: float, height: float, title: str, body: Sequence[str]) -> str:
    """A picture that stands alone: on a sheet, with its own colours."""
    style = files(__package__).joinpath("figure.css").read_text(encoding="utf-8")
    margin = 22
    width, height = width + 2 * margin, height + margin
    body = [f'<g transform="translate({margin} {margin / 2:g})">', *body, "</g>"]
    sheet = f'<rect class="sheet" width="{width:g}" height="{height:g}"/>'
    return _svg(width, height, "picture", title, [f"<style>{style}</style>", sheet, *body])


def _lines(formats: Sequence[Format | str]) -> list[Line]:
    read = list(dict.fromkeys(format(f) for f in formats))
    if not read:
        raise ValueError("no formats to draw: give at least one")
    relative = any(isinstance(fmt, Block) for fmt in read)
    found = []
    for i, fmt in enumerate(read):
        element: Any = fmt.element if isinstance(fmt, Block) else fmt
        facts = describe(element)
        unit = max(facts.max, -facts.lowest) if relative else 1.0
        found.append(Line(fmt, facts, error_profile(fmt), unit, f"s{i % COLOURS}"))
    return found


def _across(lines: Sequence[Line]) -> Scale:
    """log2 of magnitude to pixels, with room below the smallest number and, of scalars, above the largest."""
    smallest = [math.log2(line.facts.min_positive / line.unit) for line in lines]
    if any(line.block for line in lines):
        low = min(low for low, line in zip(smallest, lines) if line.block) - 3
        return Scale(max(low, -FLOOR), 0.0, LEFT, RIGHT)
    low, high = min(smallest), max(math.log2(line.facts.max) for line in lines)
    spare = 0.05 * (high - low)
    return Scale(low - max(2.5, spare), high + max(1.25, spare), LEFT, RIGHT)


def _exponents(across: Scale) -> list[int]:
    room = (RIGHT - LEFT) / 44
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if (across.high - across.low) / n <= room)
    return [k for k in range(math.ceil(across.low), math.floor(across.high) + 1) if k % every == 0]


def _ticks(at: np.ndarray, base: float, tall: float, kind: str) -> list[str]:
    """A stroke up from the base for each place; runs of places closer than two pixels become one band."""
    if not len(at):
        return []
    runs = np.split(at, np.flatnonzero(np.diff(at) > 2.0) + 1)
    path = "".join(f"M{x:.1f} {base:.1f}v{-tall:.1f}" for run in runs if len(run) < 3 for x in run)
    bands = [
        _rect(f"dense {kind}", run[0] - 0.6, min(base, base - tall), run[-1] - run[0] + 1.2, abs(tall))
        for run in runs
        if len(run) > 2
    ]
    return [f'<path class="values {kind}" d="{path}"/>' if path else "", *bands]


def _rect(name: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _number_line(line: Line, across: Callable[[float], float], base: float, tall: float, log: bool) -> list[str]:
    """The numbers as strokes, subnormal ones shorter; negative ones of another magnitude hang below a log axis."""
    facts = line.facts
    body = [_line(LEFT, base, RIGHT, base, "rule")]
    if facts.bits > EXHAUSTIVE:
        normal = facts.min_normal or facts.min_positive
        for kind, low, high, share in (("", normal, facts.max, 1.0), (" sub", facts.min_positive, normal, 0.6)):
            a, b = (across(math.log2(v / line.unit)) for v in (low, high))
            body += [_rect(f"dense {line.colour}{kind}", a, base - share * tall, b - a, share * tall)] * (b > a)
        return body
    numbers = numbers_of(facts.format) / line.unit
    sides = [(numbers[numbers > 0], 1.0)] if log else [(numbers, 1.0)]
    if log and not facts.symmetric and facts.lowest < 0:
        sides.append((-numbers[numbers < 0], -0.5))
    normal = (facts.min_normal or 0.0) / line.unit
    for side, share in sides:
        small = (np.abs(side) < normal) & (side != 0)
        for chosen, kind, part in ((~small, "", share), (small, " sub", 0.6 * share)):
            at = np.sort([across(math.log2(v) if log else v) for v in side[chosen].tolist()])
            body += _ticks(at, base, part * tall, line.colour + kind)
    return body


def _error_panel(lines: Sequence[Line], across: Scale, top: float, bottom: float) -> list[str]:
    """Curves of the relative error over the magnitude, on log axes. One format with few numbers is drawn with
    every tooth, of several the envelope: over each gap between numbers the worst error in it."""
    up = Scale(min(_least(line.profile) for line in lines) / 2, 1.0, bottom, top, log=True)
    body = []
    for value in ticks(up.low, 1.0, log=True, most=9):
        if value <= 1:
            body.append(_line(LEFT, up(value), RIGHT, up(value), "grid"))
            body.append(_text(LEFT - 8, up(value) + 4, _percent(value), "tick", "end"))
    if len(lines) == 1 and not lines[0].block and lines[0].facts.min_normal:
        worst = lines[0].facts.worst_error
        words = f"{100 * worst:.2g} % at worst for normal numbers"
        body.append(_line(LEFT, up(worst), RIGHT, up(worst), "reference"))
        body.append(_text(RIGHT - 4, up(worst) - 6, words, "label faint halo", "end"))
    for line in lines:
        for name, error in (("curve", line.profile.error), ("curve typical", line.profile.typical)):
            if error is not None and (name == "curve" or len(lines) == 1):
                x, y = _points(line, error, across, len(lines) == 1)
                path = "M" + "L".join(f"{across(a):.1f} {up(max(e, up.low)):.1f}" for a, e in zip(x, y))
                if len(lines) == 1 and name == "curve":
                    body.append(f'<path class="area {line.colour}" d="{path}V{bottom:.1f}H{across(x[0]):.1f}Z"/>')
                body.append(f'<path class="{name} {line.colour}" d="{path}"/>')
    return body


def _least(profile: Profile) -> float:
    """The error where the format is at its best, leaving out the few gaps that are narrower still."""
    errors = profile.error if profile.typical is None else profile.typical
    peaks = errors[errors > 0]
    return float(np.quantile(peaks, 0.05)) if len(peaks) else 0.01


def _points(line: Line, error: np.ndarray, across: Scale, teeth: bool) -> tuple[list[float], list[float]]:
    """log2 of magnitude, and error, from edge to edge of the picture."""
    x = line.profile.magnitude
    if len(line.profile.numbers) and teeth:
        # between these points the absolute error is straight, which the relative one is not
        fine = np.concatenate([a + (b - a) * BETWEEN for a, b in pairwise(x.tolist())] + [x[-1:]])
        x, error = fine, np.interp(fine, x, error * x) / fine
    elif len(line.profile.numbers):
        numbers = line.profile.numbers
        steps, last = np.repeat(numbers, 2)[1:-1], np.searchsorted(x, numbers[-1])
        peaks = np.repeat(np.maximum.reduceat(error[: last + 1], np.searchsorted(x, numbers[:-1])), 2)
        # outside the curve dips to 0 at the last number on its way, which an envelope does not
        below, above = (x < numbers[0]) & (error >= peaks[0]), (x > numbers[-1]) & (error >= peaks[-1])
        x, error = (np.concatenate([v[below], w, v[above]]) for v, w in ((x, steps), (error, peaks)))
    at = np.log2(x if line.block else x / line.unit)
    if not len(line.profile.numbers) and not teeth:
        inner = (error[1:-1] >= error[:-2]) & (error[1:-1] >= error[2:])
        peaks = np.concatenate([[True], inner, error[-1:] > error[-2:-1]])
        error = np.interp(at, at[peaks], error[peaks])
    if not line.block:  # below all numbers the error stays what it is, above them it grows to 1
        more = np.arange(1, 4 * math.ceil(max(across.high - at[-1], 0)) + 1) / 4
        error = np.concatenate([error[:1], error, 1 - (1 - error[-1]) / np.exp2(more)])
        at = np.concatenate([[min(across.low, at[0])], at, at[-1] + more])
    inside = (at >= across.low) & (at <= across.high)
    ends = np.array([across.low, across.high])
    x = np.concatenate([ends[:1], at[inside], ends[1:]])
    edge = np.interp(ends, at, error)
    return x.tolist(), [float(edge[0]), *error[inside].tolist(), float(edge[1])]


def _percent(share: float) -> str:
    if share >= 1e-5:
        return f"{plain(100 * share)} %"
    return f"10{str(round(math.log10(100 * share))).translate(SUPERSCRIPT)} %"


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-").replace("-", "−")


def _binade_axis(across: Scale, top: float, bottom: float, label: str) -> list[str]:
    body = []
    for k in _exponents(across):
        body.append(_line(across(k), top, across(k), bottom, "grid"))
        body.append(_text(across(k), bottom + 16, power(k), "tick", "middle"))
    return [*body, _line(LEFT, bottom, RIGHT, bottom, "rule"), _text(RIGHT, bottom + 34, label, "axis", "end")]


def _linear_panel(line: Line, y: float) -> list[str]:
    facts = line.facts
    across = Scale(min(facts.lowest, 0.0), facts.max, LEFT, RIGHT)
    body = [_text(0, y - 4, f"{facts.distinct:,} numbers", "label"), _text(0, y + 10, "linear axis", "label faint")]
    body += _number_line(replace(line, unit=1.0), across, y + 12, 26, False)
    for value in ticks(across.low, across.high, most=9):
        body.append(_line(across(value), y + 12, across(value), y + 16, "rule"))
        body.append(_text(across(value), y + 28, plain(value), "tick", "middle"))
    return body


def _regions(line: Line, across: Scale, top: float, bottom: float) -> tuple[list[str], list[str]]:
    """Where a scalar format flushes, is subnormal, and overflows: shades to lie under all else, and words."""
    facts = line.facts
    becomes = fate(line.format)["overflow"].replace(f" to {facts.max:g}", "")
    marks = [(-math.inf, facts.min_positive / 2, "rounds to 0" if facts.zeros else "rounds up")]
    if facts.min_normal and facts.subnormals:
        marks.append((facts.min_positive, facts.min_normal, "subnormal"))
    marks.append((facts.max, math.inf, becomes))
    shades, words = [], []
    for low, high, word in marks:
        a = LEFT if low == -math.inf else across(math.log2(low))
        b = RIGHT if high == math.inf else across(math.log2(high))
        shades.append(_rect("shade", a, top, b - a, bottom - top))
        if b - a > len(word) * CHARACTER - 8:
            words.append(_text((a + b) / 2, top - 5, word, "label faint", "middle"))
    return shades, words


def _one(line: Line) -> str:
    fmt, facts = line.format, line.facts
    across = _across([line])
    element = f"element {fmt.element}: " if isinstance(fmt, Block) else ""
    sign = "±" if facts.symmetric else ""
    span = f"{sign}{plain(facts.max)}" if facts.symmetric else f"{plain(facts.lowest)} to {plain(facts.max)}"
    told = [line.bits, f"{element}{span}", f"smallest above zero {plain(facts.min_positive)}"]
    if facts.ulp_of_one is not None:
        told.append(f"ulp of 1: {plain(facts.ulp_of_one)}")
    told += [f"{facts.binades:.1f} binades ({facts.decibels:.0f} dB)"]
    body = [_text(0, 18, str(fmt), "title"), _text(0, 40, "  ·  ".join(told), "label faint")]
    if isinstance(fmt, Block):
        body.append(_text(0, 56, f"scale: {scale_in_words(fmt)}", "label faint"))
    y = 96.0
    if facts.bits <= 8 and (facts.step is not None or facts.binades <= 24):
        body += _linear_panel(line, y)
        y += 76
    top, bottom = y + 66, y + 300
    shades, words = ([], []) if line.block else _regions(line, across, top - 14, bottom)
    body += [
        *shades,
        *_binade_axis(
            across, y - 16, bottom, f"magnitude{', relative to the largest of its block' if line.block else ''}"
        ),
    ]
    body += [
        _text(0, y - 4, "the same" if y > 100 else f"{facts.distinct:,} numbers", "label"),
        _text(0, y + 10, "log axis", "label faint"),
    ]
    body += _number_line(line, lambda v: across(v), y + 12, 26, True)
    body += [*words, *_error_panel([line], across, top, bottom)]
    body += [
        _text(0, top + 4, "relative error", "label"),
        _text(0, top + 18, "of rounding", "label faint"),
        _text(0, top + 32, "to nearest", "label faint"),
    ]
    body.append(_text(LEFT, bottom + 52, _legend([line]), "label faint"))
    return styled(WIDTH, bottom + 66, str(fmt), [f'<g transform="translate(0 14)">{"".join(body)}</g>'])


def _legend(lines: Sequence[Line]) -> str:
    told = ["short, pale strokes: subnormal"] if any(line.facts.subnormals for line in lines) else []
    if any(line.block for line in lines):
        dotted = ", dotted: root mean square" if len(lines) == 1 else ""
        told.append(f"curves: worst over where in an octave the block’s largest lies{dotted}")
    if any(line.profile.error.max() > 1.001 for line in lines):
        told.append("errors above 100 % are drawn there")
    return "; ".join(told)


def _several(lines: Sequence[Line]) -> str:
    across = _across(lines)
    relative = any(line.block for line in lines)
    rows = 24.0
    top = rows + ROW * len(lines) + 26
    bottom = top + 260
    label = "magnitude, relative to the largest of a block" if relative else "magnitude"
    body = _binade_axis(across, rows - 6, bottom, label)
    for i, line in enumerate(lines):
        base = rows + ROW * i + 30
        facts = line.facts
        reach = f"±{_short(facts.max)}" if facts.symmetric else f"to {_short(facts.max)}"
        body.append(_text(0, base - 13, shorten(str(line.format), 17), f"name {line.colour}"))
        body.append(_text(0, base + 2, line.bits if line.block else f"{line.bits}, {reach}", "label faint"))
        body += _number_line(line, lambda v: across(v), base, 24, True)
    body += _error_panel(lines, across, top, bottom)
    body += [_text(0, top - 14, "relative error of rounding to nearest", "label")]
    body.append(_text(LEFT, bottom + 52, _legend(lines), "label faint"))
    title = "Compared: " + ", ".join(str(line.format) for line in lines)
    return styled(WIDTH, bottom + 66, title, [f'<g transform="translate(0 14)">{"".join(body)}</g>'])
