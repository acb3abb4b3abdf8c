"""Importance from the weights alone, one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .._checkpoint import Checkpoint
from ._parts import EXPERTS, FIXED, LAYERS, WIDTH, Axis, Decoder, Part

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Importance:
    """Scores of what may go, the higher the more important, as `measure` makes them.

    ``width``: [width]. ``layers``: [layers]. ``heads``: [heads] for each layer, by its number. ``channels``:
    [channels] of a dense MLP, or [experts, channels], for each kind of channel and layer. ``experts``: [experts]
    for each layer. ``counts``: tokens that went to each expert, for each layer. ``tokens``: how many were seen.
    What a model does not have is absent.
    """

    width: Tensor | None = None
    layers: Tensor | None = None
    heads: Mapping[int, Tensor] = field(default_factory=dict)
    channels: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)
    counts: Mapping[int, Tensor] = field(default_factory=dict)
    tokens: int = 0


def magnitude(checkpoint: Checkpoint, model: Decoder, kind: str) -> dict[int | None, Tensor]:
    """The L2 norm of all weights along each unit of a kind, for each layer (None for the width): [units].

    Channels of experts give [experts, channels]; layers give the norm of all that a layer holds, by its number.
    Source: magnitude pruning by groups, Li et al., "Pruning filters for efficient convnets" (arXiv 1608.08710),
    with L2 for L1.
    """
    squares: dict[int | None, Tensor] = {}
    for part in model.parts:
        if kind == LAYERS and part.layer is not None:
            whole = checkpoint.read(part.spec.name)
            squares[part.layer] = squares.get(part.layer, torch.zeros(())) + _squares(whole).sum()
        elif kind != LAYERS and part.axes is not None and _counts(part, kind):
            layer = None if kind == WIDTH else part.layer
            value = _along(checkpoint.read(part.spec.name), part, part.axes, model, kind)
            squares[layer] = squares.get(layer, torch.zeros((), dtype=torch.float64)) + value
    return {layer: value.sqrt() for layer, value in squares.items()}


def _counts(part: Part, kind: str) -> bool:
    # an expert in tensors of its own has its number in their names
    return part.along(kind) or (kind == EXPERTS and part.expert is not None)


def _squares(tensor: Tensor) -> Tensor:
    return tensor.double().square() if tensor.is_floating_point() else torch.zeros(tensor.shape, dtype=torch.float64)


def _along(tensor: Tensor, part: Part, axes: tuple[Axis, ...], model: Decoder, kind: str) -> Tensor:
    squares = _squares(tensor)
    experts = model.sizes.get(EXPERTS, 0)
    if kind == EXPERTS and part.expert is not None:
        return _at(squares.sum(), part.expert, experts)
    place = next(i for i, axis in enumerate(axes) if any(s.kind == kind for s in axis))
    fused = place > 0 and any(s.kind == EXPERTS for s in axes[0])
    kept = [0, place] if fused and kind != WIDTH else [place]
    others = [i for i in range(squares.ndim) if i not in kept]
    line = squares.sum(others) if others else squares
    total: Tensor | None = None
    runs = [s.inner * (1 if s.kind == FIXED else model.sizes[s.kind]) for s in axes[place]]
    for segment, run in zip(axes[place], line.split(runs, dim=-1)):
        if segment.kind == kind:
            value = run.unflatten(-1, (model.sizes[kind], segment.inner)).sum(-1)
            total = value if total is None else total + value
    assert total is not None
    return _at(total, part.expert, experts) if part.expert is not None and kind != WIDTH else total


def _at(value: Tensor, index: int, count: int) -> Tensor:
    whole = torch.zeros((count, *value.shape), dtype=torch.float64)
    whole[index] = value
    return whole
