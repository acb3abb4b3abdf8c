"""The inputs of a layer in a format: under scales of their own, or one that was measured beforehand."""

from __future__ import annotations

from typing import Any

import torch

from ..numerics import Block, Format, cast, decode, encode


def rounded_input(x: torch.Tensor, fmt: Format, scale: torch.Tensor | None = None) -> Any:
    """What a layer sees of x: in the format, or in its elements under a given scale, float32 [1].

    >>> from halfulp import format
    >>> rounded_input(torch.tensor([[0.4, 5.0, -300.0]]), format("int8:tensor"), torch.tensor([2.0])).tolist()
    [[0.0, 4.0, -256.0]]
    """
    if scale is None:
        return cast(x, fmt)
    assert isinstance(fmt, Block)
    return cast(x / scale.to(x.dtype), fmt.element) * scale.to(x.dtype)


def static_scale(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The scale that a format's rule gives a largest magnitude, float32 [1]."""
    assert isinstance(fmt, Block)
    q: Any = encode(amax.max().float().reshape(1, 1), fmt)
    return torch.as_tensor(decode(q.scale, fmt.scale)).float().reshape(1)
