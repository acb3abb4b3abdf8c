"""Scale rules: how a block's scale follows from its largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleRule:
    """How a block's scale follows from ``amax``, its largest magnitude: ``round(amax / target)``.

    ``target`` is ``2**emax`` of the element (``to_emax``) or its largest number plus ``stretch``;
    ``round_amax`` first rounds amax to the element's own precision; ``rounding`` rounds the scale, once.
    """

    rounding: str
    to_emax: bool = False
    stretch: float = 0.0
    round_amax: bool = False


SCALE_RULES: dict[str, ScaleRule] = {
    # OCP MX v1.0 section 6.3: floor(log2(amax)) - emax; the largest elements may saturate
    "floor": ScaleRule("toward_zero", to_emax=True),
    # ceil(log2(amax)) - emax: nothing saturates, up to a bit of range unused
    "ceil": ScaleRule("up", to_emax=True),
    # floor after amax is rounded to the element's precision (torchao's and compressed-tensors' EVEN)
    "even": ScaleRule("toward_zero", to_emax=True, round_amax=True),
    # smallest scale with amax / scale <= max (NVIDIA's RCEIL)
    "rceil": ScaleRule("up"),
    # amax maps to the largest number: int4 has amax / 7
    "absmax": ScaleRule("nearest_even"),
    # amax / 7.5 for int4: both ends of two's complement clip by half a step (torchao)
    "absmax_half": ScaleRule("nearest_even", stretch=0.5),
    # amax / 8 for int4: the positive end clips by a whole step
    "absmax_full": ScaleRule("nearest_even", stretch=1.0),
}
"""Scale rules by name."""
