"""Scale rules: how a block's scale follows from its largest magnitude."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache


@dataclass(frozen=True)
class ScaleRule:
    """How a block's scale follows from ``amax``, its largest magnitude: ``round(amax / target)``.

    ``target`` is the element's largest number plus ``stretch`` integer steps; ``2**emax`` of the element
    (``to_emax``); or halfway between its largest number and ``2**(emax + 1)`` (``midway``); or the rule's own
    ``targets``. ``round_amax`` first rounds amax to the element's own precision; ``rounding`` rounds the
    scale, once. ``zero``: a scale may round to zero, and the block with it; otherwise it is at least the
    smallest scale. ``search``: of the scales for all targets, the one that loses least (see `Block`).
    ``meaning`` says it in words, with the source.
    """

    rounding: str
    to_emax: bool = False
    stretch: float = 0.0
    round_amax: bool = False
    midway: bool = False
    zero: bool = False
    search: bool = False
    targets: tuple[float, ...] = ()
    meaning: str = field(default="", compare=False, repr=False)


SCALE_RULES: dict[str, ScaleRule] = {
    "floor": ScaleRule(
        "toward_zero",
        to_emax=True,
        meaning="OCP MX v1.0 section 6.3: floor(log2(amax)) - emax; the largest elements may saturate",
    ),
    "ceil": ScaleRule(
        "up", to_emax=True, meaning="ceil(log2(amax)) - emax: nothing saturates, up to a bit of range unused"
    ),
    "even": ScaleRule(
        "toward_zero",
        to_emax=True,
        round_amax=True,
        meaning="floor after amax is rounded to the element's precision (torchao's and compressed-tensors' EVEN)",
    ),
    "rceil": ScaleRule(
        "up",
        meaning=(
            "smallest scale with amax / scale <= max: NVIDIA's RCEIL, and what cuDNN's block scaling does for any scale"
        ),
    ),
    "midmax": ScaleRule(
        "up",
        midway=True,
        meaning=(
            "floor, and one more where amax is nearer to the next power of two than to what saturation makes "
            "of it (the alternative scale selection of Brevitas' MX tests)"
        ),
    ),
    "absmax": ScaleRule(
        "nearest_even",
        meaning="amax maps to the largest number: int4 has amax / 7; with an argument to that, as in 'absmax(4)'",
    ),
    "absmax_half": ScaleRule(
        "nearest_even",
        stretch=0.5,
        meaning="amax / 7.5 for int4: both ends of two's complement clip by half a step (torchao)",
    ),
    "absmax_full": ScaleRule(
        "nearest_even", stretch=1.0, meaning="amax / 8 for int4: the positive end clips by a whole step"
    ),
    "nv": ScaleRule(
        "nearest_even",
        zero=True,
        meaning=(
            "absmax with whatever scale comes out, subnormal or zero (NVIDIA, 'Pretraining large language "
            "models with NVFP4', 2025, appendix): blocks far below the tensor's largest vanish, and so do "
            "blocks of zeros"
        ),
    ),
    "mse": ScaleRule(
        "nearest_even",
        search=True,
        meaning=(
            "amax maps to each target in turn, and the scale with the least squared error stays; 'mse(4,6)' "
            "for e2m1 is Four Over Six (Cook et al. 2025); without targets see `search_targets`"
        ),
    ),
}
"""Scale rules by name."""

_WITH_TARGETS = {"absmax": 1, "mse": 64}  # how many targets a rule takes at most
_RULE = re.compile(r"([a-z_]+)(?:\(([^()]*)\))?")


@cache
def scale_rule(text: str) -> ScaleRule:
    """The rule that a name stands for, arguments in parentheses included.

    >>> scale_rule("mse(4,6)").targets, scale_rule("floor").to_emax
    ((4.0, 6.0), True)
    """
    match = _RULE.fullmatch(text)
    if match is None or match[1] not in SCALE_RULES:
        raise ValueError(f"scale rule {text!r}: choose one of {', '.join(SCALE_RULES)}")
    rule = SCALE_RULES[match[1]]
    if match[2] is None:
        return rule
    most = _WITH_TARGETS.get(match[1], 0)
    if not most:
        raise ValueError(f"scale rule {text!r}: only {' and '.join(_WITH_TARGETS)} take arguments")
    try:
        targets = tuple(sorted({float(word) for word in match[2].split(",")}))
    except ValueError:
        targets = ()
    if not 1 <= len(targets) <= most or not all(2.0**-60 <= t <= 2.0**60 and float_of_24_bits(t) for t in targets):
        raise ValueError(
            f"scale rule {text!r}: in parentheses {'one number' if most == 1 else f'1 to {most} numbers'} that amax "
            "maps to, float32 and above zero"
        )
    return replace(rule, targets=targets)


def float_of_24_bits(x: float) -> bool:
    """Whether a float is a float32, for numbers well within its range."""
    numerator, _ = x.as_integer_ratio()
    return (numerator // (numerator & -numerator)).bit_length() <= 24


def rule_name(text: str) -> str:
    """The one spelling of a rule: targets ascending, no more digits than needed.

    >>> rule_name("mse(6.0, 4)")
    'mse(4,6)'
    """
    rule, stem = scale_rule(text), text.partition("(")[0]
    if not rule.targets:
        return stem
    return f"{stem}({','.join(repr(t).removesuffix('.0') for t in rule.targets)})"


def search_targets(largest: float, power_of_two: bool) -> tuple[float, ...]:
    """The targets of "mse" without arguments: half, once and twice the largest number under scales that are
    powers of two, else 8 to 32 sixteenths of it.

    >>> search_targets(6.0, True)
    (3.0, 6.0, 12.0)
    """
    sixteenths = (8, 16, 32) if power_of_two else range(8, 33)
    return tuple(largest * (k / 16) for k in sixteenths)
