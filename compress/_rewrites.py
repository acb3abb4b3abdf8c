"""Rewrites: steps of a chain that make another checkpoint of the same function, before any tensor is compressed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..numerics import Block, Format
from ..numerics import format as read_format
from ._checkpoint import Checkpoint
from ._graph import graph_of
from ._load import load
from .calibrate import Calibration, Need, measure
from .rotate import FoldScales, Smooth, awq_scales, pairs_of
from .rotate import smooth as smooth_of
from .rotate._scale import KINDS
from .shrink import Importance, Shrink
from .shrink import measure as measure_units
from .shrink import shrink as shrink_of


@runtime_checkable
class Rewrite(Protocol):
    """A checkpoint becomes another, of the same function or a smaller one, tensor by tensor as they are read."""

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The other checkpoint. Raises ValueError for a model that the rewrite does not understand."""
        ...

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What is to be said of it in the plan and the report."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A rewrite that follows from what the model's layers see."""

    def measured(self, checkpoint: Checkpoint, calibration: Calibration) -> Rewrite:
        """The rewrite for this model and calibration."""
        ...


def rewritten(
    checkpoint: Checkpoint, steps: Iterable[Any], calibration: Calibration | None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint after all rewrites, and their notes.

    Raises ValueError for a measured one without a calibration.
    """
    notes: list[str] = []
    for step in steps:
        if isinstance(step, Measured):
            if calibration is None:
                raise ValueError(f"{step} needs a calibration: give one, such as calibration('wikitext2')")
            step = step.measured(checkpoint, calibration)
        notes += step.notes(checkpoint)
        checkpoint = step.rewrite(checkpoint)
    return checkpoint, tuple(notes)


@dataclass(frozen=True)
class SmoothQuant:
    """Activations smoothed as they are measured; see `smooth`."""

    alpha: float
    pairs: tuple[str, ...]

    def __str__(self) -> str:
        return "smooth"

    def measured(self, checkpoint: Checkpoint, calibration: Calibration) -> Smooth:
        amax: dict[str, Any] = {}
        for block in measure(checkpoint, calibration, lambda module: {"amax"}):
            amax |= {name: seen.amax for name, seen in block.items()}
        return smooth_of(amax, self.alpha, pairs=self.pairs)


def smooth(alpha: float = 0.5, *, pairs: str | Iterable[str] = ("norm",)) -> SmoothQuant:
    """SmoothQuant (Xiao et al., arXiv 2211.10438): outlier channels of activations move into weights; needs a
    calibration, and comes before the steps that round.

    >>> smooth(0.8).pairs
    ('norm',)

    Each channel is divided by max|X|**alpha / max|W|**(1 - alpha) where a norm, or a layer before, makes it, and
    multiplied where it is read: the model computes the same. pairs: of "norm", "heads" (v to o; the query heads of a
    group share) and "channels" (up to down). Raises ValueError for alpha outside 0 to 1, and unknown pairs.
    """
    checked = smooth_of({}, alpha, pairs=pairs)
    return SmoothQuant(checked.alpha, checked.pairs)


@dataclass(frozen=True)
class Awq:
    """Scales that suit a format, as they are measured; see `awq`."""

    weights: Format
    pairs: tuple[str, ...]
    grid: int

    def __str__(self) -> str:
        return "awq"

    def measured(self, checkpoint: Checkpoint, calibration: Calibration) -> FoldScales:
        graph = graph_of(checkpoint)
        pairs = [[p for p in pairs_of(graph, block) if p.kind in self.pairs] for block in graph.blocks]
        readers = {reader.module for block in pairs for pair in block for reader in pair.measured}
        needs: set[Need] = {"second", "total"}
        scales: dict[str, torch.Tensor] = {}
        blocks = measure(checkpoint, calibration, lambda module: needs if module in readers else set())
        for block, seen in zip(pairs, blocks, strict=True):
            for pair in block:
                met = [r for r in pair.measured if r.module in seen]
                if not met:
                    continue  # experts that no token reached keep their scales
                statistics = [seen[r.module] for r in met]
                tokens = sum(s.tokens for s in statistics)
                mean = sum(s.total for s in statistics) / max(tokens, 1)  # type: ignore[misc]
                weights = [checkpoint.read(r.name) for r in met]
                weights = [w if r.input_axis == -1 else w.T for w, r in zip(weights, met, strict=True)]
                # as a mean, so that the search works on numbers of a fair size
                hessians = [s.second / max(tokens, 1) for s in statistics]  # type: ignore[operator]
                found = awq_scales(mean, weights, hessians, self.weights, pair=pair, grid=self.grid)
                scales[pair.name] = found.scales
        return FoldScales(scales)


def awq(weights: Format | str, *, pairs: str | Iterable[str] = KINDS, grid: int = 20) -> Awq:
    """AWQ (Lin et al., arXiv 2306.00978): channels with large activations get more of a format's precision; needs a
    calibration, and comes before the steps that round.

    >>> str(awq("int4:g128"))
    'awq'

    Channels are scaled by mean|X|**alpha where they are read and divided by it where they are made; alpha is the one
    of grid + 1 from 0 to 1 with the least error of the layer's output when its weights are rounded to nearest in
    ``weights``. pairs as in `smooth`, v to o with grouped queries among them.
    Raises ValueError for an unreadable format, unknown pairs and a grid below 1.
    """
    fmt = read_format(weights)
    if not isinstance(fmt, Block):
        raise ValueError(f"awq needs a format with scales, such as int4:g64 or {fmt}:channel")
    if not isinstance(grid, int) or grid < 1:
        raise ValueError(f"grid={grid!r}: give a whole number from 1")
    return Awq(fmt, smooth_of({}, pairs=pairs).pairs, grid)


@dataclass(frozen=True)
class ShrinkByActivations:
    """Structured pruning by what the model's activations say; see `shrink`."""

    amounts: tuple[tuple[str, Any], ...]
    multiple_of: int

    def __str__(self) -> str:
        return "shrink by activations"

    def preview(self) -> Shrink:
        """One of the same shapes, of which layers and channels are chosen without a measurement."""
        return shrink_of(**dict(self.amounts), multiple_of=self.multiple_of)

    def measured(self, checkpoint: Checkpoint, calibration: Calibration) -> Shrink:
        importance = measure_units(load(checkpoint), calibration.tokens(checkpoint))
        return shrink_of(**dict(self.amounts), by=importance, multiple_of=self.multiple_of)


def shrink(*, by: Importance | str = "magnitude", multiple_of: int = 1, **amounts: Any) -> Shrink | ShrinkByActivations:
    """Structured pruning: heads, MLP channels, experts, the hidden width or whole layers go, and a smaller dense model
    is left, which loads anywhere.

    >>> shrink(channels=0.75, layers=22, by="activations").amounts
    (('channels', 0.75), ('layers', 22))

    amounts: of width, heads, groups, channels, layers and experts; each says what *stays*, a count, a fraction or a
    list of indices (see `halfulp.compress.shrink.shrink`). by: "magnitude", "activations" (Minitron, arXiv
    2407.14679, and for layers ShortGPT, 2403.03853; needs a calibration, and the whole model in memory) or an
    `Importance`. multiple_of: what fractions of width and channels are rounded to.
    Raises ValueError for amounts that do not fit.
    """
    if by != "activations":
        return shrink_of(by=by, multiple_of=multiple_of, **amounts)
    shrink_of(multiple_of=multiple_of, **amounts)
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in amounts.items() if x is not None}
    return ShrinkByActivations(tuple(given.items()), multiple_of)
