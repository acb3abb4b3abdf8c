"""Rounding to numbers that suit a layer's inputs: GPTQ and what goes with it, between plan and pure core."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..numerics import Block, Format, Quantized, decode, encode
from .calibrate._seen import Need, Seen
from .methods._grid import grid_of
from .methods._orders import ORDERS, Order

if TYPE_CHECKING:
    from ._plan import Row
    from .methods._gptq import Rounded


def encode_row(value: torch.Tensor, row: Row) -> Quantized | torch.Tensor:
    """A row's tensor rounded to nearest, under the scale that it shares with others."""
    fmt = row.weights
    assert fmt is not None
    if row.amax is None:
        return encode(value, fmt)
    # what a step before this one has made larger than all of them were is cut, for the scale is theirs too
    value = value.clamp(-row.amax, row.amax)
    # a row (a column, where blocks lie along rows) that holds the largest magnitude of all while the scale is found
    dim = value.ndim - 1 if isinstance(fmt, Block) and fmt.axis in (0, -value.ndim) else 0
    more = torch.zeros_like(value.narrow(dim, 0, 1))
    more.reshape(-1)[0] = row.amax
    q = encode(torch.cat([value, more], dim), fmt)
    assert isinstance(q, Quantized)
    count = value.shape[dim]
    scale = q.scale if q.scale.numel() == 1 else q.scale.narrow(dim, 0, count)
    return replace(q, codes=q.codes.narrow(dim, 0, count), scale=scale)


@dataclass(frozen=True)
class Gptq:
    """How codes are found by GPTQ; see `halfulp.compress.gptq`."""

    damp: float = 0.01
    order: Order = "group"
    sweeps: int = 0
    propagate: float = 0.0
    block: int = 128

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: choose {', '.join(map(repr, ORDERS))}")
        for name, low, high in (("damp", 0.0, 1.0), ("propagate", 0.0, 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(f"{name}={getattr(self, name)!r}: give a number from {low:g} to {high:g}")
        for name, least in (("sweeps", 0), ("block", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)!r}: give a whole number from {least}")

    def __str__(self) -> str:
        return "gptq" + (f" and {self.sweeps} sweeps" if self.sweeps else "")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"second", "cross"} if self.propagate else {"second"})

    def check(self, fmt: Format) -> None:
        """Raise ValueError for a format that these loops cannot round to."""
        assert isinstance(fmt, Block)
        grid_of(fmt)
        if not isinstance(fmt.size, int) and fmt.size != "channel":
            raise ValueError(f"{fmt}: GPTQ takes blocks along the inputs, not {fmt.size}; use quantize")

    def codes(self, value: torch.Tensor, row: Row, seen: Seen | None, pruned: torch.Tensor | None) -> tuple[Any, dict]:
        """A weight's codes, and what is to be told: tokens, damping and the share of the output that is lost.

        value: the weight before pruning; pruned: after it, whose zeros stay.
        """
        # the compiler of these loops takes its time and memory, and most recipes need none
        from .methods._gptq import corrected, factor, output_loss, refine
        from .methods._gptq import gptq as round_gptq

        fmt = row.weights
        assert isinstance(fmt, Block)
        keep = None if pruned is None else (pruned != 0).numpy()

        def nearest() -> Any:
            return encode_row(value if pruned is None else pruned, row)

        if seen is None or seen.second is None or not seen.tokens:
            return nearest(), {"fallback": "rounded to nearest: the calibration never reached the layer"}
        # blocks lie along the inputs, which are the columns here
        across = row.axis != -1
        weight = (value.T if across else value).float().numpy()
        keep = keep.T if across and keep is not None else keep
        hessian = seen.second.numpy()
        target = weight
        if self.propagate and seen.cross is not None and (found := factor(hessian, max(self.damp, 1e-3))) is not None:
            target = corrected(weight, hessian, seen.cross.numpy(), found[0], self.propagate)
        second = None if row.amax is None else grid_of(fmt).tensor_scale(row.amax)
        options: dict[str, Any] = {"damp": self.damp, "order": self.order, "block": self.block}
        rounded = round_gptq(target, hessian, fmt, keep=keep, tensor_scale=second, **options)
        if rounded is None:
            return nearest(), {
                "fallback": "rounded to nearest: its Hessian is not positive even when damped by its mean"
            }
        if self.sweeps:
            rounded = refine(target, hessian, rounded, self.sweeps, keep)
        facts: dict[str, Any] = {
            "tokens": seen.tokens,
            "output_loss": six_digits(output_loss(weight, rounded.values(), hessian)),
        }
        if dead := int((np.diagonal(hessian) == 0).sum()):
            facts["dead_inputs"] = dead
        if rounded.damp != self.damp:
            facts["fallback"] = f"damping of {rounded.damp:g} instead of {self.damp:g}, to make the Hessian positive"
        return codes_of(rounded, across, fmt), facts


def codes_of(rounded: Rounded, across: bool, fmt: Block) -> Quantized:
    """The codes of a rounded weight [out, n], which lies [n, out] in the checkpoint if it is ``across``."""
    q = rounded.quantized()
    if not across:
        return q
    turned = [None if a is None else a.T.contiguous() for a in (q.codes, q.scale, q.zero_point)]
    return Quantized(turned[0], turned[1], turned[2], q.tensor_scale, fmt)


def rounded_of(codes: Quantized, across: bool) -> Rounded:
    """The rounded weight that `codes_of` gives these codes for."""
    from .methods._gptq import Rounded

    assert isinstance(codes.format, Block)
    grid = grid_of(codes.format)
    second = 1.0 if codes.tensor_scale is None else float(codes.tensor_scale)

    def numbers(part: Any, fmt: Format) -> np.ndarray:
        found: Any = decode(part.T if across else part, fmt)
        return found.double().numpy()

    scale = numbers(codes.scale, codes.format.scale) * second
    shift = np.zeros_like(scale)
    if codes.zero_point is not None:
        shift = numbers(codes.zero_point, codes.format.element)
    index = np.searchsorted(grid.values, numbers(codes.codes, codes.format.element)).astype(np.int32)
    return Rounded(grid, index, scale, shift, second, 0.0)


def six_digits(x: float) -> float:
    """A number as it is told: more digits would depend on the machine's matmul."""
    return float(np.format_float_scientific(x, precision=5))
