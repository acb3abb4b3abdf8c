"""Which layers hurt, drawn: KL along the depth of the model, a panel for each role, a curve for each format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..compress.mixed import Group, Sensitivity
from ._format_plots import COLOURS, as_file, styled
from ._plots import CHARACTER, Scale, _line, _text, plain, scale_for, shorten, ticks
from ._record import write_atomic
from ._sensitivity import estimate

WIDTH = 860.0
PANEL = 150.0  # height of a panel's frame
COLUMN = 418.0
ORDER = ("q", "k", "v", "qkv", "c_attn", "o", "out", "gate", "up", "gate_up", "down")  # panels, where roles are known
WORST = 36  # groups in the picture of a model whose groups have no depth


def write_sensitivity_picture(sensitivity: Sensitivity, out: str | Path) -> Path:
    """Write `sensitivity_picture` to an .svg or .html file; ValueError for another ending."""
    out = Path(out)
    write_atomic(as_file(sensitivity_picture(sensitivity), out, f"What hurts in {sensitivity.source}"), out)
    return out


def sensitivity_picture(sensitivity: Sensitivity) -> str:
    """`sensitivity_picture(found)`: one SVG that stands alone, in the reader's light or dark colours.

    KL of each group rounded alone, on a log scale, with bars of one standard error. Groups of one decoder block are
    drawn along the depth, a panel for each role; where some span several blocks, the worst groups have a line each.
    A KL of zero has no place on a log scale and is left out.
    """
    shown = [name for name in sensitivity.formats if any(sensitivity.kl(g, name) > 0 for g in sensitivity.groups)]
    deep = all(group.block is not None for group in sensitivity.groups)
    legend, y = _legend(sensitivity, shown)
    if not shown:
        body, height = [_text(0, 10, "no format changes what the model predicts", "label")], 20.0
    else:
        body, height = _panels(sensitivity, shown) if deep else _lines(sensitivity, shown)
    tokens, windows = sum(sensitivity.window_tokens), len(sensitivity.window_tokens)
    title = f"{shorten(sensitivity.source, 40)}: each of {len(sensitivity.groups)} groups of layers rounded alone"
    told = f"KL(original || rounded), nats per token; {tokens:,} tokens in {windows} windows; bars: one standard error"
    parts = [_text(0, 14, title, "title"), _text(0, 34, told, "label faint"), _moved(50, legend), _moved(50 + y, body)]
    return styled(WIDTH, 50 + y + height, title, parts)


def _moved(y: float, body: Iterable[str]) -> str:
    return f'<g transform="translate(0 {y:g})">{"".join(body)}</g>'


def _colour(sensitivity: Sensitivity, name: str) -> str:
    return f"s{sensitivity.formats.index(name) % COLOURS}"


def _legend(sensitivity: Sensitivity, shown: Sequence[str]) -> tuple[list[str], float]:
    """Formats with their bits and the sum of KL over all groups; and the height."""
    body, x, y = [], 0.0, 0.0
    for name in shown:
        bits = 8 * sum(group.option(name).bytes for group in sensitivity.groups) / sensitivity.weights
        total = math.fsum(sensitivity.kl(group, name) for group in sensitivity.groups)
        text = f"{name}: {bits:.4g} bits, sum of KL {total:.3g}"
        wide = 34 + len(text) * CHARACTER
        if x and x + wide > WIDTH:
            x, y = 0.0, y + 18
        colour = _colour(sensitivity, name)
        body.append(f'<circle class="dot {colour}" cx="{x + 5:.1f}" cy="{y + 6:.1f}" r="4"/>')
        body.append(_text(x + 14, y + 10, text, f"name {colour}"))
        x += wide
    return body, y + 28


def _low_high(sensitivity: Sensitivity, groups: Iterable[Group], shown: Sequence[str]) -> list[float]:
    """What the scale of KL has to hold."""
    found = [estimate(sensitivity, group, name) for group in groups for name in shown]
    positive = [e.value for e in found if e.value > 0]
    # a bar that reaches down to zero would claim most of a log axis
    return [*positive, min(positive) / 2, *(e.value + (e.se or 0.0) for e in found if e.value > 0)]


def _panels(sensitivity: Sensitivity, shown: Sequence[str]) -> tuple[list[str], float]:
    roles: dict[str, list[Group]] = {}
    for group in sensitivity.groups:
        roles.setdefault(group.role, []).append(group)
    blocks = [group.block for group in sensitivity.groups if group.block is not None]
    values = _low_high(sensitivity, sensitivity.groups, shown)
    up = scale_for(values, PANEL, 16.0, log=True)
    marks = ticks(up.low, up.high, log=True, most=6)
    left = max(len(plain(value)) for value in marks) * CHARACTER + 8
    columns = 1 if len(roles) == 1 else 2
    wide = WIDTH if columns == 1 else COLUMN
    across = Scale(min(blocks) - 0.5, max(blocks) + 0.5, left, wide - 4)
    body = []
    for i, (role, groups) in enumerate(sorted(roles.items(), key=lambda item: _rank(item[0]))):
        x, y = (i % columns) * (WIDTH - COLUMN), (i // columns) * (PANEL + 40)
        panel = [_text(0, 8, shorten(role, 40), "head")]
        for value in marks:
            panel.append(_line(left, up(value), wide - 4, up(value), "grid"))
            panel.append(_text(left - 6, up(value) + 4, plain(value), "tick", "end"))
        panel.append(_line(left, PANEL, wide - 4, PANEL, "rule"))
        for value in ticks(min(blocks), max(max(blocks), min(blocks) + 1), most=int(wide / 50)):
            if value == int(value) and value <= max(blocks):
                panel.append(_text(across(value), PANEL + 17, plain(value), "tick", "middle"))
        panel.append(_text(left - 6, PANEL + 17, "block", "tick", "end"))
        for name in shown:
            panel += _curve(sensitivity, sorted(groups, key=lambda g: g.block or 0), name, across, up)
        body.append(f'<g transform="translate({x:g} {y:g})">{"".join(panel)}</g>')
    return body, -(-len(roles) // columns) * (PANEL + 40)


def _rank(role: str) -> int:
    """Attention before the MLP, each in the order in which its layers run; others last."""
    first = role.split("/")[0].removesuffix("_proj")
    return ORDER.index(first) if first in ORDER else len(ORDER)


def _curve(sensitivity: Sensitivity, groups: Sequence[Group], name: str, across: Scale, up: Scale) -> list[str]:
    """One format in one panel. Bars of formats stand beside each other where they would overlap."""
    colour, place = _colour(sensitivity, name), sensitivity.formats.index(name)
    step = min(across(1) - across(0), 12.0) / 4
    shift = (place - (len(sensitivity.formats) - 1) / 2) * step / max(len(sensitivity.formats) - 1, 1)
    path, bars, dots = "", "", []
    for group in groups:
        e = estimate(sensitivity, group, name)
        if e.value <= 0:
            path += " "
            continue
        x, y = across(group.block or 0) + shift, up(e.value)
        path += f"{'L' if path and path[-1] != ' ' else 'M'}{x:.1f} {y:.1f}"
        if e.se:
            bars += f"M{x:.1f} {up(max(e.value - e.se, up.low)):.1f}V{up(e.value + e.se):.1f}"
        error = "" if e.se is None else f" ± {e.se:.2g}"
        hint = f"{group.name} in {name}: {e.value:.3g}{error} at {sensitivity.bits(group, name):.4g} bits"
        dots.append(
            f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"><title>{escape(hint)}</title></circle>'
        )
    return [f'<path class="values {colour} sub" d="{path}"/>', f'<path class="values {colour}" d="{bars}"/>', *dots]


def _lines(sensitivity: Sensitivity, shown: Sequence[str]) -> tuple[list[str], float]:
    """The worst groups, a line each, with a dot and a bar for each format."""
    worst = sorted(sensitivity.groups, key=lambda g: -max(sensitivity.kl(g, name) for name in shown))[:WORST]
    left = max(len(shorten(group.name, 40)) for group in worst) * CHARACTER + 12
    across = scale_for(_low_high(sensitivity, worst, shown), left, WIDTH - 10, log=True)
    bottom = 10 + 18.0 * len(worst)
    body = []
    for value in ticks(across.low, across.high, log=True, most=9):
        body.append(_line(across(value), 0, across(value), bottom, "grid"))
        body.append(_text(across(value), bottom + 14, plain(value), "tick", "middle"))
    for i, group in enumerate(worst):
        y = 12 + 18.0 * i
        body.append(_text(left - 10, y + 4, shorten(group.name, 40), "label", "end"))
        for name in shown:
            e, colour = estimate(sensitivity, group, name), _colour(sensitivity, name)
            if e.value > 0:
                low, high = across(max(e.value - (e.se or 0.0), across.low)), across(e.value + (e.se or 0.0))
                body.append(f'<path class="values {colour}" d="M{low:.1f} {y:g}H{high:.1f}"/>')
                hint = escape(f"{group.name} in {name}: {e.value:.3g}")
                dot = f'<circle class="dot {colour}" cx="{across(e.value):.1f}" cy="{y:g}" r="4">'
                body.append(f"{dot}<title>{hint}</title></circle>")
    more = len(sensitivity.groups) - len(worst)
    if more:
        body.append(_text(0, bottom + 30, f"the worst {len(worst)} of {len(sensitivity.groups)} groups", "label faint"))
    return body, bottom + (36 if more else 20)
