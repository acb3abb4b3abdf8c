"""How a sum of products is rounded on its way: frozen values, each the whole definition of one arithmetic."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from .._format import Float
from .._names import format as read_format
from .._rounding import ROUNDINGS

# the float32 bits of the NaN that a rule returns
QUIET_NAN = 0x7FC00000
ONES_NAN = 0x7FFFFFFF


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _read_float(rule: Any, key: str) -> None:
    """Reads the field's name and refuses what cannot hold a sum."""
    fmt = read_format(getattr(rule, key))
    fits = (
        isinstance(fmt, Float)
        and fmt.signed
        and fmt.subnormal
        and fmt.nan is not False
        and fmt.mantissa <= 23
        and fmt.emax <= 127
        and fmt.emin - fmt.mantissa >= -149
    )
    _check(
        fits,
        f"{key}={str(fmt)!r} cannot hold a sum: a signed Float with NaN and subnormals whose numbers are all float32s, "
        "such as 'fp32', 'bf16', 'fp16' or 'e8m13'",
    )
    object.__setattr__(rule, key, fmt)


def _check_rounding(rounding: Any) -> None:
    known = isinstance(rounding, str) and rounding in ROUNDINGS
    _check(known, f"rounding={rounding!r} of a sum: choose one of {', '.join(ROUNDINGS)}")


def _check_overflow(overflow: str | None) -> None:
    _check(overflow in (None, "inf", "saturate", "nan"), f"overflow={overflow!r}: choose 'inf', 'saturate' or 'nan'")


def _check_count(name: str, value: Any, low: int, high: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _check(whole and low <= value <= high, f"{name}={value!r}: a whole number from {low} to {high}")


def _text(value: Any) -> str:
    return f"({value})" if ":" in str(value) else str(value)


def _options(rule: Any, *apart: str) -> str:
    """The fields that are not as by default, in the words that `accumulator` reads."""
    text = ""
    for item in fields(rule):
        value = getattr(rule, item.name)
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if item.name in apart or value == default or (isinstance(value, Float) and str(value) == default):
            continue
        if item.name == "rounding":
            text += f":{value}"
        elif item.name == "nan":
            text += f":nan={value:#x}"
        elif isinstance(value, bool):
            text += f":{item.name}"
        else:
            text += f":{item.name}={_text(value)}"
    return text


@dataclass(frozen=True)
class Sequential:
    """One product after the other: ``acc = round(acc + a[k] * b[k])``, k upwards, from c (or +0).

    >>> str(Sequential("bf16")), str(Sequential("fp32", product="fp32"))
    ('bf16', 'fp32:product=fp32')

    ``product=None`` adds the exact product (a fused multiply-add); a format rounds the product to it first.
    ``overflow``: as in `cast`, but by default "inf" where the format has infinities, also of sums that are rounded
    toward zero, as matrix units have it; else "saturate". ``flush=True``: a result
    below the smallest normal number becomes a zero of its sign. c is rounded to the format before it starts.
    Raises ValueError for a format that cannot hold a sum: at most 24 bits of significand, within float32.
    """

    format: Float = "fp32"  # type: ignore[assignment]  # names are read
    rounding: str = "nearest_even"
    product: Float | None = None
    overflow: str | None = None
    flush: bool = False

    def __post_init__(self) -> None:
        _check_sum(self)

    def __str__(self) -> str:
        return f"{self.format}{_options(self, 'format')}"


@dataclass(frozen=True)
class Pairwise:
    """A binary tree of additions: n products split at the largest power of two below n, each sum rounded.

    >>> str(Pairwise("fp32"))
    'pairwise:fp32'

    c joins last: ``round(c + tree)``. The fields mean what they mean in `Sequential`; ``product=None`` keeps
    products exact until the first addition.
    """

    format: Float = "fp32"  # type: ignore[assignment]
    rounding: str = "nearest_even"
    product: Float | None = None
    overflow: str | None = None
    flush: bool = False

    def __post_init__(self) -> None:
        _check_sum(self)

    def __str__(self) -> str:
        return f"pairwise:{self.format}{_options(self, 'format')}"


def _check_sum(rule: Sequential | Pairwise) -> None:
    _read_float(rule, "format")
    if rule.product is not None:
        _read_float(rule, "product")
    _check_rounding(rule.rounding)
    _check_overflow(rule.overflow)


@dataclass(frozen=True)
class Exact:
    """The sum as if with infinite precision, rounded once at the end (a Kulisch accumulator).

    >>> str(Exact()), str(Exact("bf16"))
    ('exact', 'exact:bf16')

    A sum of exactly 0 is +0.
    """

    format: Float = "fp32"  # type: ignore[assignment]
    rounding: str = "nearest_even"
    overflow: str | None = None

    def __post_init__(self) -> None:
        _read_float(self, "format")
        _check_rounding(self.rounding)
        _check_overflow(self.overflow)

    def __str__(self) -> str:
        word = "" if str(self.format) == "fp32" else f":{self.format}"
        return f"exact{word}{_options(self, 'format')}"


@dataclass(frozen=True)
class Integer:
    """Integers in ``bits`` bits of two's complement: "wrap" is modulo ``2**bits``, "saturate" clips each sum.

    >>> str(Integer(32)), str(Integer(16, "saturate", group=2))
    ('int32', 'int16:saturate:group=2')

    ``group`` products are added exactly, then to the accumulator, which is clipped after each group (the dot
    instructions of CPUs clip after 4). Operands are integers of at most 17 bits: -65536 to 65536.
    """

    bits: int = 32
    overflow: str = "wrap"
    group: int = 1

    def __post_init__(self) -> None:
        _check_count("bits", self.bits, 2, 48)
        _check_count("group", self.group, 1, 1 << 16)
        _check(self.overflow in ("wrap", "saturate"), f"overflow={self.overflow!r}: choose 'wrap' or 'saturate'")

    def __str__(self) -> str:
        word = "" if self.overflow == "wrap" else f":{self.overflow}"
        return f"int{self.bits}{word}{_options(self, 'bits', 'overflow')}"

    @property
    def high(self) -> int:
        """Largest sum."""
        return 2 ** (self.bits - 1) - 1


CUTS = ("toward_zero", "down", "nearest_even")


@dataclass(frozen=True)
class Aligned:
    """Block multiply-add: ``group`` products and the accumulator aligned to one exponent, cut, added, rounded.

    >>> hopper = Aligned(group=32, fraction=13, output="e8m13")
    >>> str(hopper)
    'aligned:group=32:fraction=13:output=e8m13'

    A term is ``significand * 2**exponent``; a product has ``(-4, 4)`` for its significand and the sum of its
    operands' exponents, where an operand's is ``floor(log2|x|)`` but not below its own format's emin. With E
    the largest exponent in the group, every term is cut (``cut``, toward zero without sticky bits in GPUs) to a
    multiple of ``2**(E - fraction)``; what is left adds up exactly and is rounded once (``rounding``) to
    ``output``, which is the accumulator of the next group. c enters unrounded.

    A zero operand (and a zero accumulator) has the exponent ``zero_exponent``; None: it does not count.
    ``least_exponent``: E is at least this. A zero result is +0, what overflows is infinite, and a NaN has the
    float32 bits ``nan``. Products of infinities follow IEEE 754, group by group.

    ``interleave``: of twice ``group`` products the first group takes runs of that many, the second those between;
    with 0 groups are consecutive. ``scaled=True``: scales of blocks take part, their exponents in the products'.
    With ``terms`` above 1 that many products, which have one scale, are added exactly; the term is that sum times
    the scales' significands, its exponent the scales' alone (MXFP4 and NVFP4 on Blackwell).

    Sources: Xie et al., MMA-Sim (arXiv 2511.10909); Khattak and Mikaitis, Accurate models of NVIDIA tensor
    cores (ACM TACO, doi 10.1145/3830409); Fasi et al., Numerical behavior of NVIDIA tensor cores (2021).
    """

    group: int
    fraction: int
    output: Float = "fp32"  # type: ignore[assignment]
    rounding: str = "toward_zero"
    cut: str = "toward_zero"
    terms: int = 1
    scaled: bool = False
    zero_exponent: int | None = -126
    least_exponent: int | None = None
    interleave: int = 0
    nan: int = ONES_NAN

    def __post_init__(self) -> None:
        _check_count("group", self.group, 1, 1024)
        _check_count("fraction", self.fraction, 0, 36)
        _check_count("terms", self.terms, 1, self.group)
        _read_float(self, "output")
        _check(self.output.emax >= 0 and self.output.inf, f"output={self.output} has no infinity for what overflows")
        _check_rounding(self.rounding)
        _check(self.cut in CUTS, f"cut={self.cut!r}: choose one of {', '.join(CUTS)}")
        _check(self.group % self.terms == 0, f"terms={self.terms} does not divide group={self.group}")
        _check_count("interleave", self.interleave, 0, self.group)
        fits = not self.interleave or (self.group % self.interleave == 0 and not self.scaled)
        _check(fits, f"interleave={self.interleave}: a divisor of group={self.group}, without scales")
        _check(self.terms == 1 or self.scaled, "terms above 1 share a scale: they need scaled=True")
        wide = self.terms > 1 and self.fraction + (self.group // self.terms).bit_length() > 38
        _check(not wide, f"fraction={self.fraction} of {self.group // self.terms} sums of terms: beyond 53 bits")
        for key in ("zero_exponent", "least_exponent"):
            if getattr(self, key) is not None:
                _check_count(key, getattr(self, key), -300, 0)

    def __str__(self) -> str:
        return f"aligned{_options(self)}"


@dataclass(frozen=True)
class AlignedLate:
    """Block multiply-add whose accumulator joins late, rounded down: AMD's CDNA3.

    >>> str(AlignedLate(group=8))
    'aligned_late:group=8'

    Products are aligned to their own largest exponent and cut toward zero to ``fraction`` bits, as in `Aligned`,
    and added. Then that sum and the accumulator are aligned to the larger exponent of the two and rounded down:
    the sum to ``sum_fraction`` bits, the accumulator to ``fraction``. The total is rounded to ``output``, whose
    zero keeps the sign of what underflowed. A finite product of ``2**128`` or more counts as infinite.

    ``odd_even=True``: the products of even and of odd places are added apart, and joined by rounding down to
    ``fraction`` bits; and an accumulator whose exponent lies more than ``fraction + 1`` below is left out.
    Source: Xie et al., MMA-Sim (arXiv 2511.10909).
    """

    group: int
    fraction: int = 24
    sum_fraction: int = 31
    odd_even: bool = False
    output: Float = "fp32"  # type: ignore[assignment]
    rounding: str = "nearest_even"
    zero_exponent: int | None = -126

    def __post_init__(self) -> None:
        _check_count("group", self.group, 1, 1024)
        _check_count("fraction", self.fraction, 0, 36)
        _check_count("sum_fraction", self.sum_fraction, self.fraction, 36)
        _read_float(self, "output")
        _check(self.output.inf, f"output={self.output} has no infinity for what overflows")
        _check_rounding(self.rounding)
        if self.zero_exponent is not None:
            _check_count("zero_exponent", self.zero_exponent, -300, 0)

    def __str__(self) -> str:
        return f"aligned_late{_options(self)}"


@dataclass(frozen=True)
class Chunked:
    """Every ``every`` products are summed by ``inner`` from +0; the partial sums are summed by ``outer``.

    >>> str(Chunked("hopper-fp8", every=128))
    'chunked:128:hopper-fp8'

    DeepGEMM promotes the partial sums of Hopper's FP8 tensor cores so, to float32 every 128 products. ``inner``
    is any accumulator; ``outer`` a `Sequential` or `Pairwise` (c starts the one and joins the other last), or, over
    integers, an `Integer`; else integers become float32 (nearest even) first. Where operands are blocks whose
    scales are the same within a chunk, a partial sum is multiplied by them on the way:
    ``acc = round(acc + partial * round32(scale_a * scale_b))``.
    """

    inner: Any = "fp32"
    every: int = 128
    outer: Any = None  # fp32, over integers int32

    def __post_init__(self) -> None:
        for key in ("inner", "outer"):
            if isinstance(getattr(self, key), str):
                from ._names import accumulator

                object.__setattr__(self, key, accumulator(getattr(self, key)))
        _check_count("every", self.every, 1, 1 << 30)
        _check(isinstance(self.inner, Accumulator), f"inner={self.inner!r} is no accumulator")
        whole = sums_integers(self.inner)
        if self.outer is None:
            object.__setattr__(self, "outer", Integer() if whole else Sequential())
        kinds = (Sequential, Pairwise, Integer) if whole else (Sequential, Pairwise)
        names = "a Sequential, Pairwise or Integer" if whole else "a Sequential or Pairwise"
        _check(isinstance(self.outer, kinds), f"outer={self.outer}: partial sums of {self.inner} are summed by {names}")

    def __str__(self) -> str:
        plain = "int32" if sums_integers(self.inner) else "fp32"
        outer = "" if str(self.outer) == plain else f":outer={_text(self.outer)}"
        inner = "" if str(self.inner) == "fp32" else f":{_text(self.inner)}"
        return f"chunked:{self.every}{inner}{outer}"


@dataclass(frozen=True)
class Hardware:
    """The arithmetic of a machine's matrix instruction: a rule, what operands it takes, and how well that is known.

    >>> from ._hardware import HARDWARE
    >>> h = HARDWARE["hopper-fp8"]
    >>> h.machine, h.instruction, h.operands, str(h.rule), h.verified
    ('NVIDIA H100, H200', 'wgmma', ('e4m3fn', 'e5m2'), 'aligned:group=32:fraction=13:output=e8m13', True)

    ``operands``: the formats that either operand may have, the first where a call does not say.
    ``truncates``: operands are float32s whose last bits the instruction ignores (TF32). ``flushes``: subnormal
    operands, and c, count as zero. ``converts``: the format to which operands are converted first, exactly, so that
    their subnormals become normal. ``verified``: the rule is bit-equal, in tests of this project, to outputs
    recorded on the machine or to a published model that its authors validated on it; ``evidence`` says which,
    or why not, and ``source`` and ``date`` where the constants come from.
    """

    name: str
    machine: str
    instruction: str
    operands: tuple[str, ...]
    rule: Any
    verified: bool
    evidence: str
    source: str
    date: str
    truncates: bool = False
    flushes: bool = False
    converts: str | None = None

    def __str__(self) -> str:
        return self.name


Accumulator = Sequential | Pairwise | Exact | Integer | Aligned | AlignedLate | Chunked | Hardware


def sums_integers(rule: Any) -> bool:
    """Whether operands and sums are integers."""
    if isinstance(rule, Hardware):
        return sums_integers(rule.rule)
    return isinstance(rule, Integer) or (isinstance(rule, Chunked) and isinstance(rule.outer, Integer))
