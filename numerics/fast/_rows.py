"""Block formats through the compiled loops: what is possible, with which parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from .._backend import Array, Numpy
from .._block import targets, tensor_scale
from .._codec import code_bits
from .._format import Block, Fixed, Float, Table, min_positive_code
from .._policy import Policy
from .._random import Stochastic
from .._scales import ScaleRule, scale_rule
from ._block import ScaleSteps, ScaleValues
from ._element import Lattice, Range
from ._plan import known, plan, power
from ._power import places
from ._scalar import TYPES, ByArithmetic, Encode, Rounder, find_rounder, saturating

_KNOWN = {"element", "size", "scale", "rule", "axis", "zero_point", "tensor_scale", "division"}
_RULE = {"rounding", "to_emax", "stretch", "round_amax", "midway", "zero", "search", "targets", "meaning"}


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Parameters of the loops for a block format under a policy.

    ``steps``, ``values``: of the scale (`ScaleSteps`, `ScaleValues` but for the tensor scale). ``fused``: whether
    `_element.nearest` does the elements, with ``lattice`` and ``bounds``; else ``rounder`` does, after
    division, ``rounded`` to nearest or to odd. ``places``: of scales that `_power` finds.
    """

    fmt: Block
    steps: Array
    values: ScaleValues
    fused: bool
    exact: bool
    plain: bool
    short: bool
    lattice: Array
    bounds: Array
    rounder: Rounder
    rounded: bool
    places: Array | None


def block_plan(fmt: Any, policy: Policy, encode: Encode | None) -> BlockPlan | None:
    """How the loops serve a block format, or None where they do not."""
    if type(fmt) is not Block or not {f.name for f in fields(fmt)} <= _KNOWN:
        return None
    if isinstance(fmt.size, tuple) and fmt.axis != (-2, -1):
        return None
    rule = scale_rule(fmt.rule)
    if not {f.name for f in fields(rule)} <= _RULE or rule.search:
        return None  # a search looks at more than the largest magnitude
    if rule.rounding not in ("nearest_even", "toward_zero", "up") or fmt.division not in ("exact", "rounded"):
        return None
    if known(fmt.scale) is not Float or fmt.scale.mantissa > 23 or fmt.scale.even == "code":
        return None
    policy = saturating(policy)
    rule_of = policy.rounding
    power_of_two = fmt.scale.mantissa == 0 and fmt.tensor_scale is None
    if isinstance(rule_of, Stochastic) and not power_of_two:
        return None  # the text's thresholds come of a quotient of 26 bits
    if fmt.zero_point and fmt.element.bits > 8:
        return None
    rounder = find_rounder(_unbounded(fmt), policy, encode)
    if rounder is None:
        return None
    codebook = not isinstance(rounder, ByArithmetic)
    if codebook and (not isinstance(fmt.element, Table) or fmt.tensor_scale is not None):
        return None  # a quotient is rounded to float32 before it is looked up
    if not codebook and rounder.mantissa > 16:
        return None
    fused = rule_of == "nearest_even" and fmt.division == "exact" and _fusible(fmt)
    if rule.zero and not fused:
        return None
    lattice, bounds = _element(fmt, policy) if fused else (np.empty(0, np.int32), np.empty(0, np.float32))
    rounded = codebook or (fmt.division == "rounded")
    values = _scale_values(fmt, rule)
    low, high, _, zero, *_ = bounds.tolist() if fused else (0.0, 0.0, 0.0, 0.0)
    plain = fused and low == -high and math.copysign(1.0, zero) < 0 and not fmt.zero_point
    if plain:
        bounds[2] = high
    steps = _scale_steps(fmt, rule)
    by_octaves = fused and power_of_two and not fmt.zero_point
    return BlockPlan(
        fmt,
        steps,
        values,
        fused,
        power_of_two,
        plain,
        _decided_at_once(fmt, rule, values),
        lattice,
        bounds,
        rounder,
        rounded,
        _places(fmt, steps, values) if by_octaves else None,
    )


@lru_cache(maxsize=64)
def _known_places(steps: bytes, values: ScaleValues, bits: int) -> Any:
    return places(np.frombuffer(steps, np.int64), np.array(values), TYPES[bits])


def _places(fmt: Block, steps: Array, values: ScaleValues) -> Any:
    return _known_places(steps.tobytes(), values, code_bits(fmt.scale))


def _decided_at_once(fmt: Block, rule: ScaleRule, values: ScaleValues) -> bool:
    """Whether a float64 quotient of amax and everything else is never taken for a number of the scale, or the
    middle between two, that the exact one is not: these have at most mantissa + 2 bits, times the divisor's."""
    bits = len(f"{abs(int(math.frexp(values.target)[0] * 2**53)):b}".rstrip("0"))
    tensor = 0 if fmt.tensor_scale is None else 24
    return not rule.round_amax and bits + tensor + fmt.scale.mantissa + 2 <= 50


def _unbounded(fmt: Block) -> Any:
    """The element; about a zero point an integer with room for what is moved into its range then."""
    element: Any = fmt.element
    return Fixed(16, element.fraction) if fmt.zero_point else element


def _fusible(fmt: Block) -> bool:
    """Elements of few bits whose numbers are far from the ends of float32's range."""
    element: Any = fmt.element
    if known(element) is Fixed:
        return element.bits <= 10 and abs(element.fraction) <= 80
    if known(element) is Float:
        near = element.mantissa <= 8 and element.emin - element.mantissa >= -90 and element.emax <= 90
        return near and element.subnormal and element.zero and element.even != "code"
    return False


def _element(fmt: Block, policy: Policy) -> tuple[Array, Array]:
    element: Any = fmt.element
    ends = policy.ends(element)
    found = plan(element, policy)
    assert found is not None
    codes = [int(v) for v in found.codes]
    if known(element) is Fixed:
        top = max(element.high, -element.low).bit_length()
        top = element.bits + 2 if fmt.zero_point else top
        m, emin, span = top, top - element.fraction, element.bits
        quantum = 2.0**-element.fraction
        low, high, limit = element.low * quantum, element.high * quantum, 2.0**emin
        steps = 2.0**element.fraction
    else:
        m, emin, span = element.mantissa, element.emin, element.mantissa + 1
        high, limit, steps = element.max, 2.0 ** (element.emax + 1), 0.0
        low = -high if element.signed else 0.0
    lattice = Lattice(
        emin=power(emin),
        lift=(23 - m) << 23,
        low=power(emin - m),
        mantissa=m,
        most_code=(codes[8], codes[9]),
        over_code=(codes[10], codes[11]),
        nan_code=(codes[14], codes[15]),
        code_sign=codes[17],
        negate=codes[18],
        mask=codes[19],
        zero=codes[20],
        offset=codes[21],
    )
    flat = np.array([v for field in lattice for v in (field if isinstance(field, tuple) else (field,))], np.int32)
    # a product with a reciprocal is off by 2**-23 of it; 1.25 is for the rounding of this bound itself
    tie = 2.0**-24 * (1 - 1.25 * 2.0 ** (span + 1 - 23))
    zero = -0.0 if ends.negative_zero else 0.0
    return flat, np.array(Range(low, high, limit, zero, tie, 1.0, steps), np.float32)


def _scale_steps(fmt: Block, rule: ScaleRule) -> Array:
    scale, element = fmt.scale, fmt.element
    m = scale.mantissa
    spread = m if scale.subnormal else 0
    keep = getattr(element, "mantissa", 0)
    nan = scale.nan_code
    assert nan is not None
    steps = ScaleSteps(
        emin=(scale.emin + 1023) << 52,
        mantissa=m,
        low=(scale.emin - spread + 52 + 1023) << 52,
        flush=m - spread,
        first=0 if scale.zero else 1 << m,
        down=-(rule.rounding == "toward_zero"),
        up=-(rule.rounding == "up"),
        code_least=0 if rule.zero else min_positive_code(scale),
        code_most=scale.max_code,
        nan=nan,
        round_half=(1 << (51 - keep)) - 1 if rule.round_amax else 0,
        round_shift=52 - keep if rule.round_amax else 0,
        round_odd=int(rule.round_amax),
        round_mask=-(1 << (52 - keep)) if rule.round_amax else -1,
        short_mask=0 if rule.to_emax else (1 << 29) - 1,
        short_bit=0 if rule.to_emax else 1 << 29,
    )
    return np.array(steps, np.int64)


def _scale_values(fmt: Block, rule: ScaleRule) -> ScaleValues:
    element: Any = fmt.element
    target = targets(fmt)[0]
    if fmt.zero_point:
        target = (element.high - element.low) * 2.0**-element.fraction
    return ScaleValues(
        tensor=1.0,
        power=1 / target if rule.to_emax else 1.0,
        target=1.0 if rule.to_emax else float(np.float32(target)),
        least=0.0 if rule.zero and fmt.scale.zero else fmt.scale.min_positive,
        most=fmt.scale.max,
        rounded=float(fmt.division == "rounded" and fmt.tensor_scale is not None),
    )


def tensor_scale_of(fmt: Block, amax: float) -> Any:
    """The array text's second scale (float32) of a tensor whose blocks without NaN and infinity reach amax."""
    bounds = np.array([np.float32(amax)]).view(np.int32)
    # about a zero point the text takes the larger of two bounds; one alone is as good
    return tensor_scale(Numpy, (bounds, ~np.zeros(1, np.int32)) if fmt.zero_point else (bounds,), fmt)
