"""What a layer's inputs say of it: moments for the methods, a scale for the inputs, means for the bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .._plan import Row
from ..calibrate._seen import Seen
from ._clip import Clip, input_scale
from ._layer import Layer
from ._original import Inputs
from ._rounding import RoundInput


@dataclass(frozen=True)
class Statistics:
    """Of one layer's inputs x: what the methods need of each group of a convolution, the scale of static inputs,
    and the means [groups, n] of x and of x as the layer sees it, in its format; None where it was not asked for."""

    seen: tuple[Seen, ...]
    scale: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rounded_mean: torch.Tensor | None = None


def gather(
    layer: Layer, row: Row, inputs: Inputs, clip: Clip, means: bool, originals: Inputs | None = None
) -> Statistics:
    """The statistics of a layer's inputs, by the number of their batch; originals are those in the original model.

    Methods see inputs in the format that the layer will see them in. Raises ValueError, naming the layer, for inputs
    with NaN or infinity, and static ones of zeros alone.
    """
    values = [inputs[i] for i in sorted(inputs)]
    scale = None
    if row.static:
        assert row.activations is not None
        try:
            scale = input_scale(values, row.activations, clip)
        except ValueError as error:
            raise ValueError(
                f"{row.module}: {error}; repair the inputs, leave static out or ignore the module"
            ) from None
    needs = row.needs - {"amax"}
    total = [Seen() for _ in range(layer.groups)]
    sums = torch.zeros(2, *_mean_shape(layer), dtype=torch.float64)
    count = 0
    for i in sorted(inputs) if needs or means else ():
        x = inputs[i]
        given = x if row.activations is None else RoundInput(row.activations, row.static).rounded(x, scale)
        for part, was in zip(layer.vectors(given), _references(layer, x, (originals or {}).get(i))):
            if needs:
                try:
                    total = [seen + Seen.of(v, needs, y) for seen, v, y in zip(total, part, was)]
                except ValueError as error:
                    raise ValueError(f"{row.module}: {error} in batch {i} of the inputs") from None
            if means:
                sums[1] += part.double().sum(1)
                count += part.shape[1]
        if means:
            sums[0] += sum(part.double().sum(1) for part in layer.vectors(x))
    if scale is not None:
        # what the transform makes a scale of; the layer's own, which may clip, goes before it
        total = [replace(seen, amax=torch.ones(1)) for seen in total]
    mean = sums / count if means and count else None
    return Statistics(tuple(total), scale, *((None, None) if mean is None else (mean[0], mean[1])))


def _references(layer: Layer, x: torch.Tensor, original: torch.Tensor | None) -> Iterator[torch.Tensor | list[None]]:
    """The vectors of the original inputs, in the pieces of those of x; Nones where there are none of that shape."""
    if original is None or original.shape != x.shape:
        while True:
            yield [None] * layer.groups
    yield from layer.vectors(original)


def _mean_shape(layer: Layer) -> tuple[int, int]:
    return layer.groups, layer.shape[1]


def output_shift(before: torch.Tensor, after: torch.Tensor, statistics: Statistics) -> torch.Tensor:
    """E[W x] - E[V x'], of each output, float64 [out]: W before, V after, x' what the layer sees of x.

    Nagel et al., arXiv 1906.04721, section 4.2, with means that were measured.
    """
    assert statistics.mean is not None
    assert statistics.rounded_mean is not None
    groups = len(statistics.mean)
    old, new = (m.double().reshape(groups, -1, m.shape[1]) for m in (before, after))
    shift = old @ statistics.mean[..., None] - new @ statistics.rounded_mean[..., None]
    return shift.reshape(-1)
