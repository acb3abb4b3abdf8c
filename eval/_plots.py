"""Small figures as SVG text: numbers in, a string out. Colours are CSS classes of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

CHARACTER = 6.7  # px: the widest of the usual sans-serif faces at the 11 px of `.label`, on average
LINE = 14.0
STEPS = 7  # classes h0 to h6 of the heat ramp
At = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom
REACHES = (9, 14, 20, 28, 38, 50, 64, 80, 100, 125, 155, 190)  # px from a marker to its label
DIRECTIONS = [(dx / 2, dy / 2) for dx in (2, -2, 0, 1, -1) for dy in (0, -2, 2, -1, 1) if max(abs(dx), abs(dy)) == 2]


@dataclass(frozen=True)
class Point:
    """A marker with an interval each way; `hollow` marks one that another beats."""

    label: str
    x: float
    x_interval: tuple[float, float]
    y: float
    y_interval: tuple[float, float]
    hollow: bool = False
    title: str = ""


@dataclass(frozen=True)
class Axis:
    """What an axis says: `second` gives a second, muted line under each tick."""

    label: str
    log: bool = False
    second: Callable[[float], str] | None = None


@dataclass(frozen=True)
class Scale:
    """Data low..high to pixels start..stop; values outside (on a log axis, <= 0) end at the edge."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)


@dataclass(frozen=True)
class Cell:
    """One tensor, or several that share a place. `value` None: not known. `kept`: left as it was."""

    value: float | None
    kept: bool = False
    title: str = ""


def ticks(low: float, high: float, *, log: bool = False, most: int = 7) -> list[float]:
    """`ticks(0, 1, most=6) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]`: round numbers in low..high, about `most`."""
    if log and high / low >= 4:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**e for e in decades for d in digits if low <= d * 10.0**e <= high]
            if 2 <= len(found) <= most:
                return found
        every = max(1, math.ceil(len(found) / most))
        if len(found) >= 2:
            return found[::every]
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def plain(value: float) -> str:
    """Give the shortest writing of a tick: 0.05, 1200, 2e-5."""
    if value == 0:
        return "0"
    text = f"{value:.6g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def shorten(text: str, most: int = 26) -> str:
    """Cut the middle out of a long name: its ends tell it from its neighbours."""
    return text if len(text) <= most else text[: most // 2] + "…" + text[-(most - most // 2 - 1) :]


def scale_for(
    values: Sequence[float], start: float, stop: float, *, log: bool, zero: bool = False, least: float = 0.0
) -> Scale:
    """Fit a scale to finite values with a margin.

    `zero`: a linear axis starts at 0 if nothing is below. `least`: the smallest span, as a share of the
    middle, so that a difference of no weight does not fill the figure.
    """
    values = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = min(values), max(values)
    if log:
        margin = max((high / low) ** 0.08, 1.08)
        return Scale(low / margin, high * margin, start, stop, log=True)
    spare = max(least * abs(high + low) / 2 - (high - low), 0.0) / 2
    margin = spare or (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return Scale(0.0 if zero and low >= 0 else low - margin, high + margin, start, stop)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _gap(box: Box, at: At) -> float:
    return math.dist(at, (min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3])))


def _leader(box: Box, at: At) -> list[Box]:
    """Small boxes along the line from a marker to its label, for the test of what it crosses."""
    end = (min(max(at[0], box[0]), box[2]), min(max(at[1], box[1]), box[3]))
    steps = int(math.dist(at, end) / 3)
    if steps < 5:
        return []
    along = [(at[0] + (end[0] - at[0]) * i / steps, at[1] + (end[1] - at[1]) * i / steps) for i in range(2, steps)]
    return [(x - 1, y - 1, x + 1, y + 1) for x, y in along]


def _place_in(
    order: Sequence[int], widths: Sequence[float], anchors: Sequence[At], obstacles: Sequence[Box], frame: Box
) -> tuple[float, list[Box | None]]:
    """Place labels one by one, each at its cheapest place; return the whole cost with the boxes."""
    boxes: list[Box | None] = [None] * len(widths)
    markers = [(x - 6, y - 6, x + 6, y + 6) for x, y in anchors]
    taken: list[Box] = list(markers)  # markers, labels and leaders, which no label may cover
    labels: list[Box] = []  # which no leader may cross
    total = 0.0
    for i in order:
        (x, y), width = anchors[i], widths[i]
        best: tuple[float, Box] | None = None
        for reach in REACHES:
            if best is not None and best[0] <= reach:
                break
            for dx, dy in DIRECTIONS:
                mid = (x + dx * (reach + width / 2), y + dy * (reach + LINE / 2 - 2))
                box = (mid[0] - width / 2, mid[1] - LINE / 2, mid[0] + width / 2, mid[1] + LINE / 2)
                inside = box[0] >= frame[0] and box[2] <= frame[2] and box[1] >= frame[1] and box[3] <= frame[3]
                if not inside or any(_overlap(box, other) for other in taken):
                    continue
                dots = _leader(box, anchors[i])
                if any(_overlap(dot, other) for dot in dots for other in labels):
                    continue
                own = _gap(box, anchors[i])
                # a label that another marker stands nearer to would be read as that one's
                stolen = sum(
                    _gap(box, other) < own + (3 if math.dist(other, anchors[i]) > 12 else -1) for other in anchors
                )
                crossed = sum(_overlap(box, bar) for bar in obstacles)
                run_over = sum(_overlap(dot, bar) for dot in dots for bar in (*obstacles, *markers))
                cost = reach + 80 * stolen + 25 * crossed + 3 * run_over + 3 * (abs(dx) + abs(dy) > 1)
                if best is None or cost < best[0]:
                    best = (cost, box)
        total += 1000 if best is None else best[0]
        if best is not None:
            boxes[i] = best[1]
            labels.append(best[1])
            taken += [best[1], *_leader(best[1], anchors[i])]
    return total, boxes


def place_labels(
    widths: Sequence[float], anchors: Sequence[At], obstacles: Sequence[Box], frame: Box
) -> list[Box | None]:
    """Find a box near each anchor that meets no other label, marker or edge; None where there is no room.

    Greedy, in several orders of which the best result counts. `obstacles` are error bars, crossed only where
    nothing else is free within reach.
    """
    several = range(len(widths))
    crowd = [sum(math.dist(a, b) < 60 for b in anchors) for a in anchors]
    orders = [sorted(several, key=lambda i: (-crowd[i], anchors[i]))]
    if len(widths) <= 16:  # with more, a better picture is not worth the seconds
        down = sorted(several, key=lambda i: (anchors[i][1], anchors[i][0]))
        across = sorted(several, key=lambda i: anchors[i])
        orders += [down, down[::-1], across, across[::-1]]
    return min((_place_in(order, widths, anchors, obstacles, frame) for order in orders), key=lambda r: r[0])[1]


def _line(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, name: str, anchor: str = "start") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(width: float, height: float, name: str, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def scatter(
    points: Sequence[Point],
    x: Axis,
    y: Axis,
    *,
    width: int,
    height: int,
    name: str = "",
    reference: tuple[float, float, float] | None = None,
    extend: bool = False,
    zero: bool = True,
) -> str:
    """Draw points with error bars, each labelled by name.

    `reference`: low, middle and high of the baseline on the x axis, drawn as a band; outside of the points'
    range it is left out unless `extend`. `zero`: the y axis begins there, where nothing is below.
    """
    right, top, bottom = width - 10.0, 22.0, height - (56.0 if x.second else 42.0)
    xs = [v for p in points for v in (p.x, *p.x_interval)]
    ys = [v for p in points for v in (p.y, *p.y_interval)]
    if y.log:  # an interval that reaches down to zero would claim most of a log axis
        floor = min(p.y for p in points if p.y > 0) / 3
        ys = [v for v in ys if v >= floor]
    if reference is not None and extend:
        xs += reference
    up = scale_for(ys, bottom, top, log=y.log, zero=zero)
    up_ticks = ticks(up.low, up.high, log=y.log, most=6)
    left = max(len(plain(value)) for value in up_ticks) * CHARACTER + 8
    across = scale_for(xs, left, right, log=x.log, least=0.2)
    body = [_text(0, 11, y.label, "axis")]
    for value in up_ticks:
        body += [
            _line(left, up(value), right, up(value), "grid"),
            _text(left - 6, up(value) + 4, plain(value), "tick", "end"),
        ]
    for value in ticks(across.low, across.high, log=x.log, most=max(3, int(width / 60))):
        body += [
            _line(across(value), bottom, across(value), bottom + 4, "rule"),
            _text(across(value), bottom + 16, plain(value), "tick", "middle"),
        ]
        if x.second:
            body.append(_text(across(value), bottom + 29, x.second(value), "tick faint", "middle"))
    body += [_line(left, bottom, right, bottom, "rule"), _text(right, height - 4, x.label, "axis", "end")]
    marks: list[Box] = []
    if reference is not None and across.low <= reference[1] <= across.high:
        low, middle, high = map(across, reference)
        place = f'x="{low:.1f}" y="{top:.1f}" width="{high - low:.1f}" height="{bottom - top:.1f}"'
        body.append(f'<rect class="band" {place}/>')
        body.append(_line(middle, top, middle, bottom, "reference"))
        end = "end" if middle > (left + right) / 2 else "start"
        side = -4 if end == "end" else 4
        body.append(_text(middle + side, top + 9, "baseline", "label faint", end))
        reach = side / 4 * len("baseline") * CHARACTER
        marks.append((min(middle, middle + reach), top - 4, max(middle, middle + reach), top + 14))
    anchors = [(across(p.x), up(p.y)) for p in points]
    bars: list[Box] = list(marks)
    for point, (px, py) in zip(points, anchors):
        (x1, x2), (y1, y2) = map(across, point.x_interval), map(up, point.y_interval)
        body += [_line(x1, py, x2, py, "bar"), _line(px, y1, px, y2, "bar")]
        bars += [(min(x1, x2), py - 1, max(x1, x2), py + 1), (px - 1, min(y1, y2), px + 1, max(y1, y2))]
    texts = [shorten(p.label, 26 if width > 450 else 18) for p in points]
    boxes = place_labels([len(t) * CHARACTER for t in texts], anchors, bars, (left + 2, top - 8, right, bottom - 2))
    for point, (px, py), text, box in zip(points, anchors, texts, boxes):
        hint = f"<title>{escape(point.title or point.label)}</title>"
        kind = "point hollow" if point.hollow else "point"
        body.append(f'<circle class="{kind}" cx="{px:.1f}" cy="{py:.1f}" r="4">{hint}</circle>')
        if box is None:
            continue
        near = (min(max(px, box[0]), box[2]), min(max(py, box[1]), box[3]))
        away = math.dist(near, (px, py))
        if away > 15:
            start = (px + (near[0] - px) * 5 / away, py + (near[1] - py) * 5 / away)
            body.append(_line(*start, *near, "leader"))
        anchor, at = (
            ("start", box[0]) if box[0] > px else ("end", box[2]) if box[2] < px else ("middle", (box[0] + box[2]) / 2)
        )
        body.append(_text(at, box[3] - 3.5, text, "label", anchor))
    unlabelled = sum(box is None for box in boxes)
    if unlabelled:
        body.append(_text(left, height - 4, f"{unlabelled} labels left out for want of room", "label faint"))
    return _svg(width, height, f"plot {name}".strip(), f"{y.label} against {x.label}", body)


def heat_range(values: Sequence[float]) -> tuple[float, float]:
    """Give the span of the colour scale: never less than a factor of two, so that noise looks like noise."""
    return min(min(values), max(values) / 2), max(values)


def heat_class(value: float, low: float, high: float) -> str:
    """`heat_class(1.0, 0.0, 1.0) == "h6"`."""
    share = (value - low) / (high - low) if high > low else 0.0
    return f"h{min(int(share * STEPS), STEPS - 1)}"


def heat_strip(
    rows: Sequence[str],
    columns: Sequence[int],
    cells: Mapping[tuple[str, int], Cell],
    *,
    title: str,
    width: int = 368,
) -> str:
    """Draw rows of named cells by layer, the scale under them; kept cells crossed, unknown ones outlined."""
    left = min(max(len(shorten(row, 20)) for row in rows) * CHARACTER + 8, width * 0.45)
    wide = min((width - left) / len(columns), 16.0)
    tall, gap = 13.0, 1.0 if wide > 5 else 0.0
    numbers = [c.value for c in cells.values() if not c.kept and c.value is not None and math.isfinite(c.value)]
    low, high = heat_range(numbers) if numbers else (0.0, 0.0)
    body: list[str] = []
    strokes: list[str] = []
    for r, row in enumerate(rows):
        y = r * (tall + 1)
        body.append(_text(left - 8, y + 10, shorten(row, 20), "label", "end"))
        for c, column in enumerate(columns):
            cell = cells.get((row, column))
            if cell is None:
                continue
            x, w = left + c * wide, wide - gap
            known = not cell.kept and cell.value is not None and math.isfinite(cell.value)
            kind = heat_class(cell.value or 0.0, low, high) if known else "kept" if cell.kept else "unknown"
            if cell.kept:
                strokes.append(f"M{x:.1f} {y + tall:.1f}l{w:.1f} {-tall:g}")
            hint = f"<title>{escape(cell.title)}</title>" if cell.title else ""
            body.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="{w:.1f}" height="{tall:g}">{hint}</rect>')
    body.append(f'<path class="stroke" d="{"".join(strokes)}"/>' if strokes else "")
    under = len(rows) * (tall + 1)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 10**9) if n * wide >= 26 or n >= len(columns))
    for c, column in enumerate(columns):
        if c % every == 0:
            body.append(_text(left + (c + 0.5) * wide, under + 12, str(column), "tick", "middle"))
    body.append(_text(left - 8, under + 12, "layer", "tick faint", "end"))
    y = under + 24
    if numbers:
        first, last = f"{low:.2g}", f"{high:.2g}"
        x = left + len(first) * CHARACTER + 4
        body.append(_text(left, y + 9, first, "tick"))
        body += [f'<rect class="h{i}" x="{x + i * 14:.1f}" y="{y:g}" width="14" height="11"/>' for i in range(STEPS)]
        body.append(_text(x + STEPS * 14 + 5, y + 9, last, "tick"))
        x += STEPS * 14 + len(last) * CHARACTER + 22
    else:
        x = left
    for kind, word in (("kept", "kept"), ("unknown", "not known")):
        if any(
            (c.kept if kind == "kept" else not c.kept and (c.value is None or not math.isfinite(c.value)))
            for c in cells.values()
        ):
            body.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:g}" width="14" height="11"/>')
            body.append(f'<path class="stroke" d="M{x:.1f} {y + 11:g}l14 -11"/>' if kind == "kept" else "")
            body.append(_text(x + 19, y + 9, word, "tick"))
            x += 30 + len(word) * CHARACTER
    return _svg(width, y + 14, "strip", title, body)
