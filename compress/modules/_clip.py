"""The one scale of a layer's inputs, from inputs that were seen: what of them is clipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...numerics import Block, Format, optimal_clip
from ...numerics import format as read_format
from .._activations import static_scale

CLIPS = ("amax", "mse")
Clip = str | float
_SEARCHED = 1 << 18  # elements that the least squared error is found on


def check_clip(clip: Clip) -> None:
    """Raise ValueError for what is no way to clip."""
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip not in CLIPS and not (number and 50 < float(clip) <= 100):
        raise ValueError(f"clip={clip!r}: choose 'amax', 'mse' or a percentile above 50, such as 99.9")


def input_scale(inputs: Sequence[torch.Tensor], fmt: Format | str, clip: Clip = "amax") -> torch.Tensor:
    """The scale of all inputs of a layer, float32 [1].

    >>> x = torch.tensor([[1.0, -2.0, 3.0, 127.0]])
    >>> input_scale([x], "int8:tensor").item() <= 1.0, input_scale([x], "int8:tensor", 75).item() < 0.03
    (True, True)

    inputs: tensors of any shapes. fmt: a format with one scale. clip: "amax", nothing is clipped; a percentile of the
    magnitudes, such as 99.9, from which on they are; or "mse", the scale of least squared error (`optimal_clip`, on
    2**18 elements at most, drawn with a fixed seed, and the largest of all).

    Raises ValueError where there are only zeros or nothing, NaN or infinity among the inputs, and for another clip.
    """
    fmt = read_format(fmt)
    check_clip(clip)
    assert isinstance(fmt, Block)
    each = [float(x.detach().abs().max()) for x in inputs if x.numel()]
    if not all(map(math.isfinite, each)):
        raise ValueError("activations with NaN or infinity")
    amax = max(each, default=0.0)
    if amax == 0:
        raise ValueError("no input other than zero was seen, so they have no scale")
    if clip == "amax":
        return static_scale(torch.tensor(amax), fmt)
    values = torch.cat([x.detach().reshape(-1).float().cpu() for x in inputs])
    if clip == "mse":
        if len(values) > _SEARCHED:
            some = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))[:_SEARCHED]
            values = torch.cat([values[some], values[values.abs().argmax()].reshape(1)])
        return torch.as_tensor(optimal_clip(values.reshape(1, -1), fmt).scale).float().reshape(1)
    # the smallest magnitude that so many are not above, and one that is not zero
    rank = max(math.ceil(float(clip) / 100 * len(values)), 1)
    limit = float(values.abs().kthvalue(rank).values)
    if limit == 0:
        raise ValueError(f"{clip} % of the inputs are zero: choose a higher percentile, or 'amax'")
    return static_scale(torch.tensor(limit), fmt)
