"""Rewrites that fold scales between layers: given ones, or SmoothQuant's from measured activations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch

from .._checkpoint import Checkpoint
from .._graph import Linear, graph_of
from ._pairs import Pair, checked, pairs_of, steps_of
from ._smooth import smooth_scales
from ._view import Step, view

KINDS = ("norm", "heads", "channels")
_ROWS = 256


@dataclass(frozen=True, repr=False)
class FoldScales:
    """Fold given scales; see `fold_scales`."""

    scales: Mapping[str, Any]
    dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        # with the numbers, for a run that goes on has to know that they are the same
        digest = hashlib.sha256()
        for name, scales in sorted(self.scales.items()):
            digest.update(name.encode() + np.asarray(scales, np.float64).tobytes())
        return f"FoldScales({len(self.scales)} pairs, sha256={digest.hexdigest()}, dtype={self.dtype})"

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint that computes the same function with the scales folded in."""
        pairs = _pairs(checkpoint)
        if unknown := [name for name in self.scales if name not in pairs]:
            near = get_close_matches(unknown[0], pairs, n=3) or list(pairs)[:3]
            raise ValueError(f"scales of {unknown[0]!r} fit no pair of the model; near names: {', '.join(near)}")
        edits: dict[str, list[Step]] = {}
        for name, scales in self.scales.items():
            for tensor, step in steps_of(pairs[name], checked(pairs[name], scales)).items():
                edits.setdefault(tensor, []).append(step)
        return view(checkpoint, edits, dtype=self.dtype)

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What was done, in sentences for the plan and the report."""
        pairs = _pairs(checkpoint)
        return _told({name: checked(pairs[name], scales) for name, scales in self.scales.items() if name in pairs})


def fold_scales(scales: Mapping[str, Any], *, dtype: torch.dtype | None = None) -> FoldScales:
    """Divide sources by scales and multiply their readers by them, such as those that `awq_scales` finds.

    >>> fold_scales({"model.layers.0.input_layernorm": torch.ones(576)}).dtype is None
    True

    scales: by the name of a pair (see `pairs_of`), [pair.width] each. dtype as in `rotate`. `rewrite` raises
    ValueError for names that fit no pair, and scales that are not positive, finite and of the pair's width.
    """
    return FoldScales(dict(scales), dtype)


@dataclass(frozen=True)
class Smooth:
    """SmoothQuant's scales from measured activations; see `smooth`."""

    activations: Mapping[str, Any] = field(repr=False)
    alpha: float
    pairs: tuple[str, ...]
    dtype: torch.dtype | None = None

    def scales(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """The scales of every pair with measured readers. Reads the readers' weights, some rows at a time."""
        linears = {linear.module for block in graph_of(checkpoint).blocks for linear in block.linears}
        if unknown := [name for name in self.activations if name not in linears]:
            near = get_close_matches(unknown[0], linears, n=3)
            raise ValueError(f"activations of {unknown[0]!r} are of no linear layer; near names: {', '.join(near)}")
        found = {}
        for name, pair in _pairs(checkpoint).items():
            measured = [r for r in pair.measured if r.module in self.activations]
            if pair.kind not in self.pairs or not measured:
                continue
            x = torch.stack([self._of(reader) for reader in measured]).amax(0)
            weights = [_input_maxima(checkpoint, reader) for reader in pair.measured]
            try:
                found[name] = smooth_scales(x, weights, self.alpha, pair=pair)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return found

    def _of(self, reader: Linear) -> torch.Tensor:
        x = torch.as_tensor(self.activations[reader.module]).double()
        if tuple(x.shape) != (reader.inputs,):
            raise ValueError(
                f"activations of {reader.module} have shape {list(x.shape)}: expected the largest magnitude of each "
                f"of its {reader.inputs} inputs"
            )
        return x

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint that computes the same function, smoother."""
        return FoldScales(self.scales(checkpoint), self.dtype).rewrite(checkpoint)

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What was done, in sentences for the plan and the report."""
        graph = graph_of(checkpoint)
        notes = [f"activations smoothed with alpha {self.alpha:g}", *_told(self.scales(checkpoint))]
        if "heads" in self.pairs and graph.no_heads:
            notes.append(f"no scales from values to outputs, since {graph.no_heads}")
        if "channels" in self.pairs and graph.no_channels:
            notes.append(f"no scales from up to down projections, since {graph.no_channels}")
        return tuple(notes)


def smooth(
    activations: Mapping[str, Any],
    alpha: float = 0.5,
    *,
    pairs: str | Iterable[str] = KINDS,
    dtype: torch.dtype | None = None,
) -> Smooth:
    """SmoothQuant: move the difficulty of outlier channels from activations into weights; the function stays.

    >>> smooth({"model.layers.0.self_attn.q_proj": torch.ones(576)}, pairs="norm").pairs
    ('norm',)

    activations: the largest magnitude of each input of linear layers over calibration tokens, by module name,
    [inputs]. Layers that read one norm share their scales; one of them measured is enough. Pairs without any
    measured reader stay as they are. pairs: of "norm" (norm -> readers), "heads" (v -> o) and "channels" (up ->
    down), those to use. alpha and source: see `smooth_scales`. dtype as in `rotate`.
    Raises ValueError for unknown pairs and alpha outside 0..1; `rewrite` for activations that are not finite, of
    another width, or of no such layer.
    """
    kinds = (pairs,) if isinstance(pairs, str) else tuple(pairs)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"pairs={unknown[0]!r}: choose of {', '.join(KINDS)}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: choose a number from 0 to 1")
    return Smooth(dict(activations), float(alpha), kinds, dtype)


def _pairs(checkpoint: Checkpoint) -> dict[str, Pair]:
    graph = graph_of(checkpoint)
    return {pair.name: pair for block in graph.blocks for pair in pairs_of(graph, block)}


def _input_maxima(checkpoint: Checkpoint, linear: Linear) -> torch.Tensor:
    """The largest magnitude of the weights of each input, some rows of the tensor at a time."""
    shape = checkpoint.tensors[linear.name].shape
    maxima = []
    for start in range(0, shape[0], _ROWS if len(shape) == 2 else 1):
        piece = checkpoint.read(linear.name, slice(start, start + (_ROWS if len(shape) == 2 else 1)))
        magnitudes = piece.double().abs()
        if not bool(torch.isfinite(magnitudes).all()):
            raise ValueError(f"{linear.name} holds NaN or infinity: repair the model")
        if linear.input_axis == -1 or len(shape) == 3:
            maxima.append(magnitudes.movedim(linear.input_axis, -1).reshape(-1, linear.inputs).amax(0))
        else:  # rows are inputs
            maxima.append(magnitudes.amax(1))
    return torch.cat(maxima) if linear.input_axis == -2 and len(shape) == 2 else torch.stack(maxima).amax(0)


def _told(scales: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    if not scales:
        return ("no scales are folded: no pair of the model was measured",)
    low = min(float(s.min()) for s in scales.values())
    high = max(float(s.max()) for s in scales.values())
    return (f"scales from {low:.3g} to {high:.3g} are folded into {len(scales)} pairs of layers",)
