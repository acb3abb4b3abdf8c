"""What a number format is: frozen values from which everything else is derived. Scalars, and blocks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from ._codebook import Codebook
from ._float import Float, check, min_positive_code, p3109
from ._integer import Fixed, Int
from ._log import Log
from ._posit import Posit
from ._scales import rule_name, scale_rule

__all__ = [
    "Block",
    "Codebook",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "Log",
    "Posit",
    "Scalar",
    "Size",
    "Table",
    "min_positive_code",
    "p3109",
]

Table = Codebook | Posit | Log
Scalar = Float | Fixed | Table
Size = int | tuple[int, ...] | Literal["channel", "tensor"]

DIVISIONS = ("exact", "rounded", "reciprocal")


@dataclass(frozen=True)
class Block:
    """Elements that share a scale, along one axis or in tiles.

    >>> mxfp4 = Block(Float(2, 1, inf=False, nan=False), size=32, scale="e8m0", rule="floor")
    >>> str(mxfp4), mxfp4.bits_per_element
    ('mxfp4', 4.25)
    >>> str(Block("e4m3fn", size=(128, 128), scale="fp32")), Block(Int(8, signed=False), zero_point=128).element.low
    ('e4m3fn:128x128', -128)

    ``size``: elements in a block, or "channel" (the whole axis: a row of a weight, a token of an activation),
    or "tensor"; or the extents of a tile, with ``axis`` as many axes, by default the last ones. Blocks are cut
    from the start of each axis; a last one may be ragged: it has its own scale and no padding shows.
    ``scale``: format of the shared scale, ``rule``: how it follows from the block (one of `SCALE_RULES`).
    ``zero_point=True``: integers about a zero point per block, ``(code - zero_point) * scale``; an integer is
    the one zero point of all blocks of unsigned integers, and becomes the element's ``offset``.
    ``tensor_scale``: format of a second scale, one for the tensor (NVFP4).

    ``division``: how elements are taken over their scale. "exact" (the default): as if by exact division by
    the scale (and the tensor scale), rounded once. "rounded": the quotient by the product of scale and tensor
    scale, both rounded to the source's precision on the way, as runtimes do that divide in float32.
    "reciprocal": every step rounded, as runtimes do that multiply, torchao for one: the scale is
    ``amax / target``, over the tensor scale, the element ``x * (1 / scale)``, or ``x * (1 / tensor_scale /
    scale)``; a reciprocal is held at the largest finite float, and a zero point still comes by division.

    The rule "mse" decides thus: of the scales that map amax to each of the rule's targets, the one with the
    least sum over the block of ``(cut(x) - cut(y))**2`` stays, of equals the smallest. ``y`` is what x decodes
    to, elements rounded to nearest even; ``cut`` drops what is below ``2**(floor(log2(amax)) - 14)`` of a
    magnitude, and differences count up to ``2**15 - 1`` of these, so that the sum is one of integers.

    Raises ValueError for a size below 1, axes that are not as many as sizes, an unknown rule, a zero point on
    anything but integers, a scale without NaN, numbers beyond float32.
    """

    element: Scalar
    size: Size = 32
    scale: Float = "e8m0"  # type: ignore[assignment]  # a name is read here
    rule: str = None  # type: ignore[assignment]  # None: "floor" for powers of two, else "absmax"
    axis: int | tuple[int, ...] = -1
    zero_point: bool = False
    tensor_scale: Float | None = None
    division: Literal["exact", "rounded", "reciprocal"] = "exact"

    def __post_init__(self) -> None:
        for key in ("element", "scale", "tensor_scale"):
            if isinstance(getattr(self, key), str):
                from ._names import format

                object.__setattr__(self, key, format(getattr(self, key)))
        if isinstance(self.element, Block):
            raise ValueError(f"a block's element is a scalar format, not the block {self.element}")
        for key in ("scale", "tensor_scale"):
            part = getattr(self, key)
            if not isinstance(part, Float) and (key, part) != ("tensor_scale", None):
                raise ValueError(f"a block's {key} is a Float, got {part}")
        if self.rule is None:
            powers = self.scale.mantissa == 0 and not isinstance(self.element, Table)
            object.__setattr__(self, "rule", "floor" if powers else "absmax")
        object.__setattr__(self, "rule", rule_name(self.rule))
        size, axis = _sizes_and_axes(self.size, self.axis)
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "axis", axis)
        check(self.division in DIVISIONS, f"division {self.division!r}: choose {', '.join(map(repr, DIVISIONS))}")
        if not isinstance(self.zero_point, bool):
            object.__setattr__(self, "element", _with_offset(self.element, self.zero_point))
            object.__setattr__(self, "zero_point", False)
        plain = isinstance(self.element, Fixed) and not (self.element.sign_magnitude or self.element.offset)
        check(
            not self.zero_point or (plain and self.rule == "absmax"),
            "a zero point needs an integer element, two's complement or unsigned, and the rule 'absmax'",
        )
        _check_rule(self)
        _check_parts(self)

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits_per_element(self) -> float:
        """Bits for an element with its share of a full block's scale and zero point."""
        shared = self.scale.bits + self.zero_point * self.element.bits
        count = block_elements(self)
        return self.element.bits + (0 if count is None else shared / count)


def block_elements(fmt: Block) -> int | None:
    """How many elements a full block has; None where that depends on the tensor."""
    if isinstance(fmt.size, str):
        return None
    return math.prod(fmt.size) if isinstance(fmt.size, tuple) else fmt.size


def _sizes_and_axes(size: Size, axis: int | tuple[int, ...]) -> tuple[Size, int | tuple[int, ...]]:
    """Checked; a tile of one axis as a plain size, axes in ascending order where they count from one end."""
    sizes = size if isinstance(size, tuple) else (size,)
    check(
        (len(sizes) > 0 and all(type(n) is int and n >= 1 for n in sizes)) or size in ("channel", "tensor"),
        f"block size {size!r}: a whole number from 1, such numbers for a tile, 'channel' or 'tensor'",
    )
    if axis == -1 and len(sizes) > 1:
        axis = tuple(range(-len(sizes), 0))
    axes = axis if isinstance(axis, tuple) else (axis,)
    check(
        all(type(n) is int for n in axes),
        f"block axis {axis!r}: a whole number, negative from the end, or as many as the tile has extents",
    )
    check(
        len(axes) == len(sizes) == len(set(axes)),
        f"block size {size!r} and axis {axis!r}: as many axes as extents, each once",
    )
    if len(sizes) == 1:
        return sizes[0], axes[0]
    assert isinstance(size, tuple)
    if len({n < 0 for n in axes}) == 1:
        order = sorted(range(len(axes)), key=axes.__getitem__)
        axes, size = tuple(axes[i] for i in order), tuple(size[i] for i in order)
    return size, axes


def _with_offset(element: Scalar, zero_point: int) -> Scalar:
    plain = isinstance(element, Fixed) and not element.signed and not element.offset
    if type(zero_point) is not int or not plain:
        raise ValueError(
            f"zero_point={zero_point!r}: True, or one integer for all blocks of an unsigned element, not of {element}"
        )
    assert isinstance(element, Fixed)
    return replace(element, offset=zero_point)


def _check_rule(fmt: Block) -> None:
    rule, element = scale_rule(fmt.rule), fmt.element
    kind = {Codebook: "a codebook", Posit: "a posit", Log: "a logarithmic number"}.get(type(element))
    if kind is not None and (rule.to_emax or rule.midway):
        raise ValueError(f"the rule {fmt.rule!r} needs the element's exponent range, which {kind} has not")
    if rule.stretch and not isinstance(element, Fixed):
        raise ValueError(f"the rule {fmt.rule!r} counts in integer steps, which {element} has not")
    if not (rule.targets or fmt.zero_point or element.max > 0 or rule.stretch > 0):
        raise ValueError(f"{element} has no number above zero for the rule {fmt.rule!r} to map a block's largest to")


def _check_parts(fmt: Block) -> None:
    """Blocks are computed and decoded in float32: what is beyond it, or cannot be exact in it, is refused."""
    if fmt.scale.nan_code is None:
        raise ValueError(f"the scale {fmt.scale} has no NaN, the mark of a block that holds NaN or infinity")
    for part in (fmt.element, fmt.scale, fmt.tensor_scale):
        if part is not None and not _fits_float32(part):
            raise ValueError(f"{part} cannot be part of a block: it has numbers beyond float32")
    element = fmt.element.mantissa if isinstance(fmt.element, (Float, Fixed)) else 0
    if fmt.tensor_scale is not None and fmt.scale.mantissa + element > 20:
        raise ValueError(f"a scale under a tensor scale is a short one, such as 'e4m3fn', not {fmt.scale}")


def _fits_float32(fmt: Scalar) -> bool:
    """Whether every number of the format is a float32 (of tables: nearly one)."""
    if isinstance(fmt, Float):
        return fmt.mantissa <= 23 and fmt.emax <= 127 and fmt.emin - fmt.mantissa >= -149
    if isinstance(fmt, Fixed):
        return fmt.emax <= 127 and fmt.fraction <= 126
    least = fmt.max if isinstance(fmt, Codebook) else fmt.min_positive
    return least >= 2.0**-126 and fmt.max < 2.0**128


Format = Scalar | Block
