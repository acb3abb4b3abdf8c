"""Learned step sizes: the scale of each block is trained along with the weights.

Source: Esser et al., "Learned step size quantization" (LSQ, arXiv 1902.08153).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...numerics import Block, Int, Quantized, encode, fake_quantize

Tensor = torch.Tensor
TINY = 2.0**-60  # a step that has shrunk to nothing stays a number


def check_learnable(fmt: Any) -> Block:
    """The format, if its steps can be learned; ValueError with what can."""
    plain = isinstance(fmt, Block) and isinstance(fmt.element, Int) and fmt.element.signed
    if not plain or fmt.zero_point or fmt.tensor_scale is not None or not isinstance(fmt.size, int | str):
        raise ValueError(
            f"{fmt}: step sizes are learned for blocks of signed integers without zero point or tensor scale, along "
            "one axis, such as 'int4:g32' or 'int8:channel'"
        )
    if fmt.axis != -1:
        raise ValueError(f"{fmt}: step sizes are learned along the last axis")
    return fmt


def first_steps(weight: Tensor, fmt: Block) -> Tensor:
    """The step of each block at the start, 2 mean|w| / sqrt(Qp) (section 2.1): [..., n] to [..., blocks].

    >>> from halfulp.numerics import format
    >>> first_steps(torch.tensor([[1.0, -1.0, 7.0]]), format("int4:g2")).shape
    torch.Size([1, 2])
    """
    per = size(weight, fmt)
    magnitude = weight.detach().float().abs()
    # the last block may be short: it is a mean over what it has
    mean = _by_block(magnitude, per) / _by_block(torch.ones_like(magnitude), per)
    return (2 * mean / math.sqrt(fmt.element.high)).clamp(min=TINY)  # type: ignore[union-attr]


def size(weight: Tensor, fmt: Block) -> int:
    """How many weights share a step."""
    extent = weight.shape[-1] if weight.ndim else 1
    if fmt.size == "tensor":
        raise ValueError(f"{fmt}: step sizes are learned for blocks along an axis, such as 'int8:channel'")
    return extent if isinstance(fmt.size, str) else int(fmt.size)  # type: ignore[arg-type]


def fake_learned(weight: Tensor, steps: Tensor, fmt: Block) -> Tensor:
    """The weight on the grid of its steps, with gradients for both.

    weight: [..., n] in float32; steps: [..., blocks]. Steps are rounded to the scale's format, straight through.
    """
    rounded = fake_quantize(steps.clamp(min=TINY), fmt.scale)
    n: Tensor = _Learned.apply(weight, rounded, fmt.element.low, fmt.element.high, size(weight, fmt))  # type: ignore[union-attr]
    return n


def learned_codes(weight: Tensor, steps: Tensor, fmt: Block) -> Quantized:
    """Codes and scales which decode to just what `fake_learned` gives.

    >>> from halfulp.numerics import decode, format
    >>> w, fmt = torch.tensor([[1.0, -1.0, 7.0]]), format("int4:g2")
    >>> steps = first_steps(w, fmt)
    >>> torch.equal(decode(learned_codes(w, steps, fmt)), fake_learned(w, steps, fmt))
    True
    """
    rounded = fake_quantize(steps.detach().clamp(min=TINY), fmt.scale)
    element: Any = fmt.element
    numbers = (weight.detach() / _spread(rounded, size(weight, fmt), weight)).round().clamp(element.low, element.high)
    return Quantized(encode(numbers, element), encode(rounded, fmt.scale), None, None, fmt)


def _spread(steps: Tensor, size: int, weight: Tensor) -> Tensor:
    return steps.repeat_interleave(size, dim=-1)[..., : weight.shape[-1]]


def _by_block(x: Tensor, size: int) -> Tensor:
    """Sums over the blocks of the last axis, [..., n] to [..., blocks]."""
    short = -x.shape[-1] % size
    return torch.nn.functional.pad(x, (0, short)).unflatten(-1, (-1, size)).sum(-1)


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, steps: Tensor, low: int, high: int, size: int) -> Tensor:
        ctx.save_for_backward(weight, steps)
        ctx.ends = low, high, size
        spread = _spread(steps, size, weight)
        return (weight / spread).round().clamp(low, high) * spread

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        weight, steps = ctx.saved_tensors
        low, high, size = ctx.ends
        ratio = weight / _spread(steps, size, weight)
        inside = (ratio > low) & (ratio < high)
        # equation 3, and the scale of the gradient g = 1 / sqrt(N Qp) of section 2.2
        slope = torch.where(inside, ratio.round() - ratio, ratio.clamp(low, high)) * g
        return g * inside, _by_block(slope, size) / math.sqrt(size * high), None, None, None
