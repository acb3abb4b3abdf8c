"""A number format in words, every figure derived from the format itself."""

from __future__ import annotations

from ..numerics import Block, Codebook, Fixed, Float, Format, decode, format


def _number(value: float) -> str:
    return f"{value:.6g}"


def _specials(fmt: Format) -> str:
    if isinstance(fmt, Block):
        second = f", tensor scale {fmt.tensor_scale}" if fmt.tensor_scale else ""
        return f"{fmt.element} by {fmt.size}, scale {fmt.scale} ({fmt.rule}){second}"
    if isinstance(fmt, Codebook):
        return f"{len(fmt.values)} values"
    if isinstance(fmt, Fixed):
        return f"{fmt.low} to {fmt.high}" + (f" / 2^{fmt.fraction}" if fmt.fraction else "")
    words = ["inf"] * fmt.inf + ([] if fmt.nan_code is None else [f"NaN 0x{fmt.nan_code:x}"])
    words += ["-0"] * fmt.negative_zero + ["subnormals"] * fmt.subnormal + ["no zero"] * (not fmt.zero)
    return ", ".join(words)


def rows(name: str) -> tuple[str, str, str, str, str]:
    """Name, bits, largest, smallest positive, and the rest, for a table."""
    fmt = format(name)
    element = fmt.element if isinstance(fmt, Block) else fmt
    bits = fmt.bits_per_element if isinstance(fmt, Block) else fmt.bits
    return name, f"{bits:g}", _number(element.max), _number(_smallest(element)), _specials(fmt)


def _smallest(fmt: Format) -> float:
    if isinstance(fmt, Float):
        return fmt.min_positive
    if isinstance(fmt, Codebook):
        return min((v for v in fmt.values if v > 0), default=float("nan"))
    assert isinstance(fmt, Fixed)
    return 2.0**-fmt.fraction


def summary(name: str) -> list[str]:
    """A format in a few lines, with all its positive values where they are few.

    >>> summary("e2m1")[-1]
    'values >= 0   0 0.5 1 1.5 2 3 4 6'
    """
    fmt = format(name)
    lines = [f"{'format':14}{fmt}", f"{'python':14}{fmt!r}"]
    if isinstance(fmt, Block):
        per = f"{fmt.bits_per_element:g} bits per element"
        lines.append(f"{'block':14}{_specials(fmt)}; {per}")
        return [*lines, "", *summary(str(fmt.element))]
    lines.append(f"{'bits':14}{fmt.bits}")
    lines.append(f"{'largest':14}{_number(fmt.max)}")
    lines.append(f"{'smallest > 0':14}{_number(_smallest(fmt))}")
    if isinstance(fmt, Float):
        normal = float(fmt.magnitude(2**fmt.mantissa if fmt.zero else 0))
        lines.append(f"{'normal from':14}{_number(normal)}  (exponents {fmt.emin} to {fmt.emax}, bias {fmt.bias})")
        lines.append(f"{'ulp of 1':14}{_number(2.0**-fmt.mantissa)}")
    lines.append(f"{'has':14}{_specials(fmt)}")
    if fmt.bits <= 6:
        import numpy as np

        values = decode(np.arange(2**fmt.bits, dtype=np.uint8), fmt)
        positive = sorted({float(v) for v in values if v >= 0 and np.isfinite(v)})
        lines.append(f"{'values >= 0':14}{' '.join(map(_number, positive))}")
    return lines
