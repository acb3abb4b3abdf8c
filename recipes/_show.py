"""A number format in words and as a line of numbers, every figure derived from the format itself."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from ..numerics import (
    Block,
    Codebook,
    Facts,
    Fixed,
    Float,
    Format,
    describe,
    error_profile,
    format,
    values_of,
)
from ..numerics._format import block_elements
from ..numerics.analysis._describe import EXHAUSTIVE, constructor, fate, scale_in_words
from ._number_line import KEY, binade_table, exact, number, number_lines, shared_lines

KINDS = {"Float": "floating point", "Fixed": "fixed point", "Int": "integer", "Codebook": "codebook"}


def _both(value: float) -> str:
    text = f"{number(value)} = {exact(value)}" if value and math.isfinite(value) else number(value)
    return text.replace(" ", "\xa0")


def _bits(fmt: Any) -> float:
    return float(fmt.bits_per_element if isinstance(fmt, Block) else fmt.bits)


def _specials(fmt: Format) -> str:
    if isinstance(fmt, Block):
        second = f", tensor scale {fmt.tensor_scale}" if fmt.tensor_scale else ""
        return f"{fmt.element} by {_size(fmt)}, scale {fmt.scale} ({fmt.rule}){second}"
    if isinstance(fmt, Codebook):
        return f"{len(fmt.values)} values"
    if isinstance(fmt, Fixed):
        return f"{fmt.low} to {fmt.high}" + (f" / 2^{fmt.fraction}" if fmt.fraction else "")
    code = getattr(fmt, "nan_code", None)
    words = ["inf"] * (getattr(fmt, "inf_code", None) is not None) + ([] if code is None else [f"NaN 0x{code:x}"])
    words += ["-0"] * bool(getattr(fmt, "negative_zero", False))
    words += ["subnormals"] * (getattr(fmt, "subnormal", False) and fmt.mantissa > 0)  # type: ignore[union-attr]
    return ", ".join(words + ["no zero"] * (not getattr(fmt, "zero", True)))


def rows(name: str) -> tuple[str, str, str, str, str]:
    """Name, bits, largest, smallest positive, and the rest, for a table."""
    fmt = format(name)
    element: Any = fmt.element if isinstance(fmt, Block) else fmt
    # to describe a format of 16 bits takes a second
    smallest = element.min_positive if hasattr(element, "min_positive") else describe(element).min_positive
    return name, f"{_bits(fmt):g}", number(element.max), number(smallest), _specials(fmt)


def codes(found: Iterable[tuple[int, int]], bits: int) -> str:
    """`codes([(125, 127)], 8) == "0x7d-0x7f"`."""
    digits = -(-bits // 4)
    return ", ".join(f"0x{a:0{digits}x}" + (f"-0x{b:0{digits}x}" if b > a else "") for a, b in found)


def summary(name: str | Format, width: int = 80, unicode: bool = True) -> list[str]:
    r"""A format in lines of at most ``width`` characters, from 60 up.

    >>> print("\n".join(summary("e2m1", unicode=False)))
    e2m1: floating point, 4 bits
    halfulp.Float(exponent=2, mantissa=1, inf=False, nan=False)
    <BLANKLINE>
    code         s ee m: a sign, 2 exponent bits (bias 1), 1 of mantissa
    codes        16: 15 numbers, +0 0x0, -0 0x8; no infinity, no NaN
    largest      ±6 = 1.5 * 2^2
    normal       from 1 = 2^0
    subnormal    from 0.5 = 2^-1: 2 of both signs, 12 % of the codes
    dynamic      3.58 binades, 21.6 dB from smallest to largest
    ulp of 1     0.5 = 2^-1; half of it, the unit roundoff, 0.25 = 2^-2
    rounding     to nearest is off by at most 20 % for normal numbers
    too large    saturates to 6
    infinity     saturates to 6
    NaN          becomes 0
    <BLANKLINE>
    numbers >= 0 |     .    |    |     |          |          |                     |
                 0              1.5               3               4.5              6
    <BLANKLINE>
    log axis     .               |         |      |         |      |        |
                 2^-1           2^0              2^1              2^2            2^3
    <BLANKLINE>
    numbers above zero; the negative ones mirror them
    binade       step
    subnormal    0.5          0.5
    2^0          0.5            1  1.5
    2^1          1              2    3
    2^2          2              4    6
    """
    fmt = format(name)
    call = f"halfulp.{constructor(fmt)}"
    lines = [_title(fmt), *([call] if len(call) <= width else []), ""]
    facts = describe(fmt.element if isinstance(fmt, Block) else fmt)
    for key, text in _block_pairs(fmt) if isinstance(fmt, Block) else _scalar_pairs(fmt, facts):
        lines += _wrapped(key, text, width)
    if isinstance(fmt, Block):
        return [*lines, "", *summary(fmt.element, width, unicode)]
    rest = [*number_lines(facts, width, unicode), *binade_table(facts, width)]
    return [*lines, *([""] if rest else []), *rest]


def _wrapped(key: str, text: str, width: int) -> list[str]:
    """Text behind its key; no line ends within a `_both`."""
    lines = textwrap.wrap(
        text, width, initial_indent=key.ljust(KEY), subsequent_indent=" " * KEY, break_on_hyphens=False
    )
    return [line.replace("\xa0", " ") for line in lines]


def _title(fmt: Any) -> str:
    if isinstance(fmt, Block):
        size = {"channel": "one scale a channel", "tensor": "one scale for the tensor"}
        words = size.get(str(fmt.size), f"blocks of {_size(fmt)}")
        return f"{fmt}: {fmt.element}, {words}, {_bits(fmt):g} bits a number"
    kind = KINDS.get(type(fmt).__name__, type(fmt).__name__.lower())
    return f"{fmt}: {kind}, {fmt.bits} bits"


def _size(fmt: Block) -> str:
    return " x ".join(map(str, fmt.size)) if isinstance(fmt.size, tuple) else str(fmt.size)


def _scalar_pairs(fmt: Any, facts: Facts) -> list[tuple[str, str]]:
    told = [("code", _layout(fmt)), ("codes", _code_words(facts))]
    if facts.symmetric:
        told.append(("largest", f"±{_both(facts.max)}"))
    else:
        told.append(("range", f"{number(facts.lowest)} to {_both(facts.max)}"))
    if facts.min_normal:
        told.append(("normal", f"from {_both(facts.min_normal)}"))
    else:
        told.append(("smallest", f"{_both(facts.min_positive)} above zero"))
    if facts.subnormals:
        both = " of both signs" * facts.symmetric
        share = f"{facts.subnormals:,}{both}, {100 * facts.subnormals / 2**facts.bits:.2g} % of the codes"
        told.append(("subnormal", f"from {_both(facts.min_positive)}: {share}"))
    if facts.binades > 0:
        told.append(("dynamic", f"{facts.binades:.2f} binades, {facts.decibels:.1f} dB from smallest to largest"))
    if facts.step is not None:
        told.append(("step", f"{_both(facts.step)} throughout: rounding to nearest is off by at most half of it"))
    elif facts.ulp_of_one is not None:
        half = _both(facts.ulp_of_one / 2)
        told.append(("ulp of 1", f"{_both(facts.ulp_of_one)}; half of it, the unit roundoff, {half}"))
    if facts.step is None:
        where = "normal numbers" if facts.min_normal else "numbers in the range"
        told.append(("rounding", f"to nearest is off by at most {100 * facts.worst_error:.3g} % for {where}"))
    return told + [(key, text) for key, text in zip(("too large", "infinity", "NaN"), fate(fmt).values())]


def _layout(fmt: Any) -> str:
    if isinstance(fmt, Float):
        fields = " ".join(filter(None, ["s" * fmt.signed, "e" * fmt.exponent, "m" * fmt.mantissa]))
        sign = "a sign" if fmt.signed else "no sign"
        return f"{fields}: {sign}, {fmt.exponent} exponent bits (bias {fmt.bias}), {fmt.mantissa} of mantissa"
    if isinstance(fmt, Codebook):
        return f"{fmt.bits} bits: the place in a table of {len(fmt.values)} values"
    if isinstance(fmt, Fixed):
        signed = "sign and magnitude" if getattr(fmt, "sign_magnitude", False) else "two's complement"
        point = f", {fmt.fraction} of them after the point" if fmt.fraction else ""
        return f"{fmt.bits} bits{point}, {signed if fmt.signed else 'unsigned'}"
    told = [f"{name} {value}" for name, value in vars(fmt).items() if name != "bits"]
    return ", ".join([f"{fmt.bits} bits", *told])


def _code_words(facts: Facts) -> str:
    bits = facts.bits
    kinds = (
        ("+0" if facts.negative_zeros else "0", facts.zeros),
        ("-0", facts.negative_zeros),
        ("infinity", facts.infinities),
        ("NaN", facts.nans),
        ("unused", facts.unused),
    )
    parts = [f"{2**bits:,}: {facts.distinct:,} numbers"]
    parts += [f"{words} {codes(found, bits)}" for words, found in kinds if found]
    lacks = {"zero": facts.zeros, "infinity": facts.infinities, "NaN": facts.nans}
    absent = [word for word, found in lacks.items() if not found]
    return ", ".join(parts) + (f"; no {', no '.join(absent)}" if absent else "")


def _block_pairs(fmt: Block) -> list[tuple[str, str]]:
    element: Any = fmt.element
    shared = [f"a scale of {fmt.scale.bits} bits, {fmt.scale}"]
    if fmt.zero_point:
        shared.append(f"a zero point of {element.bits} bits")
    count = block_elements(fmt)
    if count is not None:
        total = count * element.bits + fmt.scale.bits + fmt.zero_point * element.bits
        told = [("block", f"{_size(fmt)} elements of {element.bits} bits, {' and '.join(shared)}: {total:,} bits")]
    else:
        of = {"channel": "each row along the axis"}.get(str(fmt.size), "the tensor")
        told = [("block", f"elements of {element.bits} bits, and for {of} {' and '.join(shared)}")]
    minus, tensor = " - zero point" * fmt.zero_point, " * tensor scale" * (fmt.tensor_scale is not None)
    told.append(("number", (f"(element{minus})" if minus else "element") + f" * scale{tensor}"))
    scale = describe(fmt.scale)
    told.append(
        ("scale", f"{scale_in_words(fmt)} (rule {fmt.rule}); {exact(scale.min_positive)} to {exact(scale.max)}")
    )
    axes = {-1: "the last", (-2, -1): "the last two"}
    told.append(("axis", axes.get(fmt.axis, str(fmt.axis))))
    profile = error_profile(fmt)
    lost = profile.magnitude[profile.error >= 1]
    if len(lost) and profile.typical is not None:
        always = profile.magnitude[profile.typical >= 1]
        below = f"always below 1/{1 / always[-1]:.3g} of the block's largest, " if len(always) else ""
        told.append(("to zero", f"{below}never above 1/{1 / lost[-1]:.3g} of it"))
    worst = profile.error[profile.magnitude >= 0.5].max()
    told.append(("rounding", f"the upper half of a block's range is off by at most {100 * worst:.2g} %"))
    told.append(("too large", "elements saturate"))
    told.append(("NaN", "a block with NaN or infinity has a NaN scale and decodes to NaN"))
    return told


def code_table(name: str | Format, width: int = 80) -> list[str]:
    """Every code of a scalar format of at most 12 bits with its number.

    >>> code_table("codebook(-1,0,1)")
    ['0x0 00       -1  0x1 01        0  0x2 10        1  0x3 11      nan']
    """
    fmt: Any = format(name)
    if isinstance(fmt, Block) or fmt.bits > 12:
        raise ValueError(f"{fmt} has too many codes to print: give a scalar format of at most 12 bits")
    digits = -(-fmt.bits // 4)
    values = [number(v) if v or math.copysign(1, v) > 0 else "-0" for v in values_of(fmt).tolist()]
    widest = max(map(len, values)) + 5
    cells = [f"0x{c:0{digits}x} {c:0{fmt.bits}b} {v:>{widest}}" for c, v in enumerate(values)]
    across = max(1, (width + 2) // (len(cells[0]) + 2))
    down = -(-len(cells) // across)
    return ["  ".join(cells[i::down]) for i in range(down)]


def comparison(names: Sequence[str | Format], width: int = 80, unicode: bool = True) -> list[str]:
    r"""Formats side by side: figures in columns, then the numbers of each on one log axis.

    >>> print("\n".join(comparison(["e3m2", "int6"], unicode=False)[:5]))
                        e3m2       int6
    bits                   6          6
    largest               28         31
    normal from         0.25          -
    smallest          0.0625          1
    """
    formats = list(dict.fromkeys(format(name) for name in names))
    columns = [_column(fmt) for fmt in formats]
    lines = []
    least = max(max(len(v) for v in column.values()) for column in columns) + 2
    across = max(1, (width - KEY) // least)
    for start in range(0, len(columns), across):
        part = columns[start : start + across]
        for key in dict.fromkeys(key for column in part for key in column):
            lines.append((key.ljust(KEY) + "".join(column.get(key, "-").rjust(least) for column in part)).rstrip())
        lines.append("")
    scalars = [fmt for fmt in formats if not isinstance(fmt, Block) and fmt.bits <= EXHAUSTIVE]
    return lines + (shared_lines(scalars, width, unicode) if len(scalars) > 1 else [])


def _column(fmt: Any) -> dict[str, str]:
    facts = describe(fmt.element if isinstance(fmt, Block) else fmt)
    of = "element " if isinstance(fmt, Block) else ""
    told = {"": str(fmt), "bits": f"{_bits(fmt):g}"}
    if isinstance(fmt, Block):
        told |= {"element": str(fmt.element), "block": _size(fmt), "scale": str(fmt.scale), "rule": fmt.rule}
    told |= {"largest": number(facts.max), "normal from": number(facts.min_normal) if facts.min_normal else "-"}
    told |= {"smallest": number(facts.min_positive), "subnormals": f"{facts.subnormals:,}"}
    told |= {"binades": f"{facts.binades:.2f}", "dB": f"{facts.decibels:.1f}"}
    told["ulp of 1"] = number(facts.ulp_of_one) if facts.ulp_of_one is not None else "-"
    told["off by"] = f"<= {100 * facts.worst_error:.3g} %"
    if not of:
        told |= {"infinities": _some(facts.infinities), "NaNs": _some(facts.nans), "-0": _some(facts.negative_zeros)}
        told |= {"too large": fate(fmt)["overflow"].replace(f" to {facts.max:g}", "")}
    return told


def _some(found: Iterable[tuple[int, int]]) -> str:
    return f"{sum(b - a + 1 for a, b in found):,}"
