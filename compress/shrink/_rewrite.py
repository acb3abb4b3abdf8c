"""Structured pruning as a lazy view of a checkpoint: a smaller dense model, one tensor at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from .._checkpoint import Checkpoint
from .._manifest import manifest_of
from .._safetensors import TensorSpec
from ._choose import (
    CHANNEL_KINDS,
    Amount,
    Kept,
    choose_channels,
    choose_experts,
    choose_heads,
    choose_layers,
    choose_width,
)
from ._config import check_builds, smaller_config
from ._magnitude import Importance, magnitude
from ._parts import CHANNELS, CONV1D, EXPERTS, GROUPS, HEADS, LAYERS, TIED_CHANNELS, WIDTH, Decoder, Part, decoder
from ._slice import Positions, cuts, read_cut, smaller

MARK = "halfulp_shrink"  # in the config: a hash of what stays, so that no two choices pass for each other


@dataclass(frozen=True, eq=False)
class Shrink:
    """What `shrink` makes: a rewrite of checkpoints into smaller ones. The fields are its arguments."""

    width: Amount | None = None
    heads: Amount | None = None
    groups: Amount | None = None
    channels: Amount | None = None
    layers: Amount | None = None
    experts: Amount | None = None
    by: Importance | str = "magnitude"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not any(getattr(self, kind) is not None for kind in _KINDS):
            raise ValueError(f"nothing to shrink: give at least one of {', '.join(_KINDS)}")
        if not isinstance(self.by, Importance) and self.by != "magnitude":
            raise ValueError(f"by={self.by!r}: give 'magnitude', or what measure(model, sequences) returned")
        if type(self.multiple_of) is not int or self.multiple_of < 1:
            raise ValueError(f"multiple_of={self.multiple_of!r}: give a whole number from 1")

    def rewrite(self, checkpoint: Checkpoint) -> Checkpoint:
        """The smaller checkpoint, whose tensors are cut from the larger one's as they are read."""
        model, kept = _choice(self, checkpoint)
        places = dict(_places(model, kept))
        tensors = {name: small for name, (_, _, small) in places.items()}

        def read(name: str, rows: slice | None) -> torch.Tensor:
            part, taken, small = places[name]
            return read_cut(checkpoint, part.spec, taken, small, rows)

        config = smaller_config(model, kept) | {MARK: _digest(kept, checkpoint.config.get(MARK))}
        if any(kept.count(kind) is not None for kind in (WIDTH, HEADS, GROUPS)):
            check_builds(checkpoint.config, config, tensors)
        return replace(checkpoint, tensors=tensors, config=config, _read=read)

    def notes(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What becomes smaller, what goes, and by which measure."""
        model, kept = _choice(self, checkpoint)
        how = "L2 norm" if self.by == "magnitude" else f"activations of {self.by.tokens} tokens"  # type: ignore[union-attr]
        lines = []
        for kind in (WIDTH, HEADS, GROUPS, *CHANNEL_KINDS):
            if (count := kept.count(kind)) is not None:
                lines.append(f"{kind} {model.sizes[kind]} -> {count} ({model.keys[kind]}), by {self._how(kind, how)}")
        stay = {id(part) for part, _, _ in dict(_places(model, kept)).values()}
        gone = [part for part in model.parts if id(part) not in stay]
        dropped = [layer for layer in range(model.sizes[LAYERS]) if layer not in kept.layers]
        if dropped:
            lines.append(
                f"layers {model.sizes[LAYERS]} -> {len(kept.layers)}, by {self._how(LAYERS, how)}: dropped "
                f"{', '.join(map(str, dropped))} with {sum(p.layer in dropped for p in gone)} tensors; the others are "
                "numbered anew"
            )
        if (count := kept.count(EXPERTS)) is not None:
            lost = [p.spec.name for p in gone if p.layer in kept.layers]
            lines.append(f"experts {model.sizes[EXPERTS]} -> {count} in each layer, by {self._how(EXPERTS, how)}")
            if isinstance(self.by, Importance) and (
                unseen := {i: int((n == 0).sum()) for i, n in self.by.counts.items() if bool((n == 0).any())}
            ):
                told = ", ".join(f"{n} of layer {layer}" for layer, n in unseen.items())
                lines.append(f"experts that no token went to while measuring: {told}")
            if lost:
                lines.append(f"dropped {len(lost)} tensors of experts: {', '.join(lost)}")
        return tuple(lines)

    def _how(self, kind: str, how: str) -> str:
        given = getattr(self, "channels" if kind in CHANNEL_KINDS else kind)
        given = self.heads if kind == GROUPS and given is None else given
        return "the given list" if isinstance(given, (list, tuple, dict)) else how


_KINDS = (WIDTH, HEADS, GROUPS, CHANNELS, LAYERS, EXPERTS)


def shrink(
    *,
    width: Amount | None = None,
    heads: Amount | None = None,
    groups: Amount | None = None,
    channels: Amount | None = None,
    layers: Amount | None = None,
    experts: Amount | None = None,
    by: Importance | str = "magnitude",
    multiple_of: int = 1,
) -> Shrink:
    """Structured pruning: heads, MLP channels, experts, the hidden width or whole layers go.

    >>> small = shrink(channels=0.75, layers=22, multiple_of=64).rewrite(checkpoint)  # doctest: +SKIP
    >>> shrink(channels=0.75, layers=22).layers
    22

    Each of the amounts says what *stays*: a count (in every layer), a fraction, or a list of indices (of layers;
    of the others one list for all layers, or one for each).

    - width: the hidden size: embedding, norms, and every reader and writer of the residual stream;
    - heads: query heads, counted over all groups that share a key and a value, equally many of each;
      groups: such groups, with all their query heads;
    - channels: rows of gate and up with the column of down, in experts too, each expert's own; a fraction of each
      where a model has several kinds;
    - layers: those that stay are numbered anew; experts: with their rows of the router.

    by: "magnitude" (the L2 norm of all weights along a unit, read tensor by tensor), or an `Importance` from
    `measure`. Fractions of width and channels are rounded to a multiple of ``multiple_of``.

    The result has ``rewrite(checkpoint)``, the smaller checkpoint as a lazy view in the memory of a tensor and its cut,
    and ``notes(checkpoint)``. Tensors that are not known by name stay as they are, or are refused where they would
    have to shrink. Raises ValueError for amounts that do not fit, at the latest in ``rewrite``.
    Sources: Minitron (arXiv 2407.14679); ShortGPT (arXiv 2403.03853).
    """
    return Shrink(
        _plain(width),
        _plain(heads),
        _plain(groups),
        _plain(channels),
        _plain(layers),
        _plain(experts),
        by,
        multiple_of,
    )


def _plain(value: Any) -> Any:
    """Arrays of indices as lists."""
    return value.tolist() if getattr(value, "ndim", 0) else value


@lru_cache(maxsize=8)
def _choice(how: Shrink, checkpoint: Checkpoint) -> tuple[Decoder, Kept]:
    if checkpoint.config.get("quantization_config") or manifest_of(checkpoint) is not None:
        raise ValueError(f"{checkpoint.source} is compressed already: shrink first, quantize after")
    model = decoder(checkpoint.tensors.values(), checkpoint.config)
    _check_kinds(how, model)

    def scores(kind: str) -> Mapping[int | None, torch.Tensor]:
        if isinstance(how.by, Importance):
            return _measured(how.by, model, kind)
        return magnitude(checkpoint, model, kind)

    layers = choose_layers(model, how.layers, scores)
    indices: dict[tuple[str, int | None], torch.Tensor] = {}
    if how.width is not None:
        indices |= choose_width(model, how.width, scores, how.multiple_of)
    if how.heads is not None or how.groups is not None:
        indices |= choose_heads(model, layers, how.heads, how.groups, scores)
    if how.channels is not None:
        indices |= choose_channels(model, layers, how.channels, scores, how.multiple_of)
    if how.experts is not None:
        indices |= choose_experts(model, layers, how.experts, scores)
    return model, Kept(layers, indices)


def _check_kinds(how: Shrink, model: Decoder) -> None:
    kind = model.config.get("model_type")
    if kind in CONV1D and any(getattr(how, k) is not None for k in (WIDTH, HEADS, GROUPS)):
        raise ValueError(
            f"a {kind} model has n_embd / n_head numbers in a head, whatever the weights say: width and heads cannot "
            "shrink alone; shrink channels or layers"
        )
    for name in (WIDTH, HEADS, GROUPS, CHANNELS, EXPERTS):
        if getattr(how, name) is not None:
            model.refuse_unknown(name)
    if how.channels is not None and any(part.along(TIED_CHANNELS) for part in model.parts):
        raise ValueError("channels cannot be shrunk: the shared experts' width is a multiple of the routed experts'")


def _measured(by: Importance, model: Decoder, kind: str) -> Mapping[int | None, torch.Tensor]:
    found: Any
    if kind == WIDTH:
        found = None if by.width is None else {None: by.width}
    elif kind == LAYERS:
        found = None if by.layers is None or len(by.layers) != model.sizes[LAYERS] else dict(enumerate(by.layers))
    else:
        found = {HEADS: by.heads, EXPERTS: by.experts}.get(kind, by.channels.get(kind))
    if not found:
        raise ValueError(
            f"the importance has no scores of this model's {kind}: measure(model, sequences) on the same model"
        )
    if kind != LAYERS and (odd := [s for s in found.values() if s.shape[-1] != model.sizes[kind]]):
        raise ValueError(f"the importance has {odd[0].shape[-1]} scores of {kind}, and the model {model.sizes[kind]}")
    return found


def _places(model: Decoder, kept: Kept) -> list[tuple[str, tuple[Part, tuple[Positions, ...], TensorSpec]]]:
    """Every tensor that stays: its new name, what it is cut from and where, and its new spec."""
    layer_of = {layer: place for place, layer in enumerate(kept.layers)}
    found = []
    for part in model.parts:
        if part.layer is not None and part.layer not in layer_of:
            continue
        experts = kept.of(EXPERTS, part.layer)
        expert = part.expert
        if experts is not None and expert is not None:
            order = experts.tolist()
            if expert not in order:
                continue
            expert = order.index(expert)
        name = part.renamed(None if part.layer is None else layer_of[part.layer], expert)
        taken = cuts(part, model, kept)
        found.append((name, (part, taken, smaller(part.spec, name, taken))))
    return found


def _digest(kept: Kept, before: str | None) -> str:
    """Of what stays, and of what stayed where the checkpoint was shrunk before."""
    facts = [[kind, layer, index.tolist()] for (kind, layer), index in kept.indices.items()]
    return hashlib.sha256(json.dumps([before, list(kept.layers), facts]).encode()).hexdigest()[:16]
