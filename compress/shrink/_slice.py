"""A smaller tensor out of a larger one: which positions of each axis stay, and how to read no more than those."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .._checkpoint import Checkpoint
from .._safetensors import TORCH_DTYPES, TensorSpec, row_span
from ._choose import Kept
from ._parts import EXPERT_CHANNELS, EXPERTS, FIXED, Axis, Decoder, Part

Tensor = torch.Tensor
Positions = Tensor | None


def positions(axis: Axis, sizes: dict[str, int], chosen: Callable[[str], Positions]) -> Positions:
    """The positions of an axis that stay, ascending in each of its segments; None where all do.

    >>> from ._parts import Segment
    >>> pair = (Segment("channels", 2),)  # gate and up of each channel side by side
    >>> positions(pair, {"channels": 3}, lambda kind: torch.tensor([0, 2])).tolist()
    [0, 1, 4, 5]
    """
    if all(chosen(segment.kind) is None for segment in axis):
        return None
    runs, start = [], 0
    for segment in axis:
        count = 1 if segment.kind == FIXED else sizes[segment.kind]
        units = chosen(segment.kind)
        units = torch.arange(count) if units is None else units
        runs.append(start + (units[..., None] * segment.inner + torch.arange(segment.inner)).flatten(-2))
        start += count * segment.inner
    return torch.cat(runs, dim=-1)


def cuts(part: Part, model: Decoder, kept: Kept) -> tuple[Positions, ...]:
    """For each axis of a tensor what stays of it: [positions], or [experts, positions] in fused experts."""
    if part.axes is None:
        return (None,) * len(part.spec.shape)
    experts = kept.of(EXPERTS, part.layer)

    def chosen(kind: str) -> Positions:
        units = kept.of(kind, part.layer)
        if units is None or kind != EXPERT_CHANNELS:
            return units
        if part.expert is not None:
            return units[part.expert]
        return units if experts is None else units[experts]

    return tuple(positions(axis, dict(model.sizes), chosen) for axis in part.axes)


def smaller(spec: TensorSpec, name: str, taken: Sequence[Positions]) -> TensorSpec:
    """The spec of what `read_cut` gives."""
    shape = tuple(n if t is None else t.shape[-1] for n, t in zip(spec.shape, taken))
    return replace(spec, name=name, shape=shape)


def read_cut(
    checkpoint: Checkpoint, spec: TensorSpec, taken: Sequence[Positions], small: TensorSpec, rows: slice | None
) -> Tensor:
    """The smaller tensor, or a span of its rows; of the larger one only the span that holds these is read."""
    if not spec.shape or all(t is None for t in taken):
        return checkpoint.read(spec.name, rows)
    first, count = row_span(small, slice(None) if rows is None else rows)
    if not count or not small.numel:
        return torch.empty((count, *small.shape[1:]), dtype=TORCH_DTYPES[spec.dtype])
    lead = torch.arange(first, first + count) if taken[0] is None else taken[0][first : first + count]
    low, high = int(lead.min()), int(lead.max()) + 1
    tensor = checkpoint.read(spec.name, slice(low, high))
    if not torch.equal(lead, torch.arange(low, high)):
        tensor = tensor[lead - low]
    for axis, index in enumerate(taken[1:], start=1):
        if index is None:
            continue
        if index.ndim == 1:
            tensor = tensor.index_select(axis, index)
            continue
        # every expert has positions of its own
        own = index[first : first + count]
        shape = [1] * tensor.ndim
        shape[0], shape[axis] = own.shape
        extent = [*tensor.shape]
        extent[axis] = own.shape[1]
        tensor = tensor.gather(axis, own.reshape(shape).expand(extent))
    return tensor.contiguous()
