"""What stays: from counts, fractions or lists, and scores, to indices for every layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from ._parts import (
    CHANNELS,
    EXPERT_CHANNELS,
    EXPERTS,
    GROUPS,
    HEADS,
    LAYERS,
    SHARED_CHANNELS,
    TIED_CHANNELS,
    WIDTH,
    Decoder,
)
from ._scores import highest, highest_within

Tensor = torch.Tensor
Amount = int | float | Sequence[int] | Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
Scores = Callable[[str], Mapping[int | None, Tensor]]
CHANNEL_KINDS = (CHANNELS, EXPERT_CHANNELS, SHARED_CHANNELS)


@dataclass(frozen=True, eq=False)
class Kept:
    """The indices that stay, ascending, by kind and layer (None: the same in all); what is absent stays whole.

    ``layers`` are the numbers of the layers that stay. Channels of experts: [experts, channels], over all experts.
    """

    layers: tuple[int, ...]
    indices: Mapping[tuple[str, int | None], Tensor] = field(default_factory=dict)

    def of(self, kind: str, layer: int | None) -> Tensor | None:
        """What stays of a kind in a layer, None for all."""
        return self.indices.get((kind, None), self.indices.get((kind, layer)))

    def count(self, kind: str) -> int | None:
        """How many stay in every layer, None where the kind is not touched."""
        return next((i.shape[-1] for (k, _), i in self.indices.items() if k == kind), None)


def amount(what: str, value: Any, total: int, multiple: int = 1) -> int:
    """How many stay of `total`, from a count or a fraction; a fraction is rounded to a multiple.

    >>> amount("channels", 0.75, 1536, multiple=128), amount("layers", 22, 30)
    (1152, 22)

    At least one multiple (or all there are) stays. Raises ValueError for what is no count from 1 to `total` and
    no fraction above 0 and up to 1.
    """
    if isinstance(value, float) and 0 < value <= 1:  # numpy's too
        return min(total, max(multiple, math.floor(value * total / multiple + 0.5) * multiple))
    if isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= total:
        return int(value)
    raise ValueError(
        f"{what}={value!r}: give how many of {total} stay, as a count from 1 to {total} or a fraction in (0, 1], "
        "or the list of their indices"
    )


def listed(what: str, value: Any, layers: Sequence[int], total: int) -> dict[int, Tensor]:
    """Explicit indices for every layer: one list for all, one for each layer, or a mapping from layers to lists.

    >>> {k: v.tolist() for k, v in listed("heads", [2, 0], [0, 1], 3).items()}
    {0: [0, 2], 1: [0, 2]}

    Raises ValueError for a missing layer, an index twice or outside 0 to total - 1, lists of different lengths.
    """
    if isinstance(value, Mapping):
        by_layer = dict(value)
    elif value and all(isinstance(v, Sequence) for v in value):
        by_layer = dict(zip(layers, value)) if len(value) == len(layers) else {}
    else:
        by_layer = dict.fromkeys(layers, value)
    if sorted(by_layer) != sorted(layers):
        raise ValueError(
            f"{what}: lists for {len(value)} layers; give one list, or one for each of the layers {list(layers)}"
        )
    lists = {layer: sorted(by_layer[layer]) for layer in layers}
    for layer, one in lists.items():
        if len(set(one)) != len(one) or not one or not all(type(i) is int and 0 <= i < total for i in one):
            of = "" if what in (WIDTH, LAYERS) else f" of layer {layer}"
            raise ValueError(f"{what}{of}: {one}; expected different indices from 0 to {total - 1}")
    if len({len(one) for one in lists.values()}) > 1:
        lengths = sorted({len(one) for one in lists.values()})
        raise ValueError(f"{what}: lists of {lengths} entries; a model has as many in every layer")
    return {layer: torch.tensor(one) for layer, one in lists.items()}


def is_list(value: Any) -> bool:
    """Is it an explicit choice?"""
    return isinstance(value, (Sequence, Mapping)) and not isinstance(value, str)


def choose_layers(model: Decoder, value: Any, scores: Scores) -> tuple[int, ...]:
    """The numbers of the layers that stay, ascending."""
    total = model.sizes[LAYERS]
    if value is None:
        return tuple(range(total))
    if is_list(value):
        return tuple(listed(LAYERS, value, [0], total)[0].tolist())
    count = amount(LAYERS, value, total)
    if count == total:
        return tuple(range(total))
    by_layer = scores(LAYERS)
    return tuple(highest(torch.stack([by_layer[i].double() for i in range(total)]), count).tolist())


def choose_width(model: Decoder, value: Any, scores: Scores, multiple: int) -> dict[tuple[str, int | None], Tensor]:
    """The indices of the hidden width that stay, the same in every layer: the residual stream has one width."""
    total = model.sizes[WIDTH]
    if is_list(value):
        return {(WIDTH, None): listed(WIDTH, value, [0], total)[0]}
    count = amount(WIDTH, value, total, multiple)
    return {(WIDTH, None): highest(scores(WIDTH)[None], count)} if count < total else {}


def choose_channels(
    model: Decoder, kept: Sequence[int], value: Any, scores: Scores, multiple: int
) -> dict[tuple[str, int | None], Tensor]:
    """The MLP channels that stay in every layer; in experts of each expert."""
    present = {kind: layers for kind in CHANNEL_KINDS if (layers := _in(model, kind, kept))}
    if not present:
        raise ValueError(f"channels={value!r}: the layers that stay have no MLP whose tensors are known")
    if len(present) > 1 and not isinstance(value, float):
        raise ValueError(f"channels={value!r}: the model has {', '.join(present)} of their own sizes; give a fraction")
    if _in(model, TIED_CHANNELS, kept):
        raise ValueError("channels cannot be shrunk: the shared experts' width is a multiple of the routed experts'")
    found: dict[tuple[str, int | None], Tensor] = {}
    for kind, layers in present.items():
        total = model.sizes[kind]
        if is_list(value):
            same = listed("channels", value, layers, total)
            if kind == EXPERT_CHANNELS:
                same = {layer: one.expand(model.sizes[EXPERTS], -1) for layer, one in same.items()}
            found |= {(kind, layer): one for layer, one in same.items()}
            continue
        count = amount("channels", value, total, multiple)
        if count < total:
            by_layer = scores(kind)
            found |= {(kind, layer): highest(_score(by_layer, kind, layer), count) for layer in layers}
    return found


def choose_experts(
    model: Decoder, kept: Sequence[int], value: Any, scores: Scores
) -> dict[tuple[str, int | None], Tensor]:
    """The experts that stay in every layer that has any."""
    layers = _in(model, EXPERTS, kept)
    if not layers:
        raise ValueError(f"experts={value!r}: the layers that stay have no experts")
    if int(model.config.get("n_group") or 1) > 1:
        raise ValueError("experts cannot be shrunk where routing goes by groups of them (n_group in the config)")
    total = model.sizes[EXPERTS]
    if is_list(value):
        return {(EXPERTS, layer): one for layer, one in listed(EXPERTS, value, layers, total).items()}
    count = amount(EXPERTS, value, total)
    if count == total:
        return {}
    by_layer = scores(EXPERTS)
    return {(EXPERTS, layer): highest(_score(by_layer, EXPERTS, layer), count) for layer in layers}


def choose_heads(
    model: Decoder, kept: Sequence[int], heads: Any, groups: Any, scores: Scores
) -> dict[tuple[str, int | None], Tensor]:
    """Query heads, and groups of them that share a key and a value.

    `groups` stay or go whole; of those that stay, `heads` (counted over all groups) stay evenly. Where every head
    has its own key and value, heads are groups.
    """
    total, all_groups = model.sizes[HEADS], model.sizes[GROUPS]
    size = total // all_groups
    layers = _in(model, HEADS, kept)
    if not layers:
        raise ValueError("the layers that stay have no attention whose tensors are known")
    if is_list(heads):
        if groups is not None:
            raise ValueError("heads are listed, and they tell the groups: leave groups out")
        return _listed_heads(listed(HEADS, heads, layers, total), size)
    if size == 1 and groups is None:
        groups, heads = heads, None
    by_layer = None
    if is_list(groups):
        of_groups = listed(GROUPS, groups, layers, all_groups)
    else:
        count = all_groups if groups is None else amount("heads" if size == 1 else GROUPS, groups, all_groups)
        of_groups = dict.fromkeys(layers, torch.arange(all_groups))
        if count < all_groups:
            by_layer = scores(HEADS)
            of_groups = {
                layer: highest(_score(by_layer, HEADS, layer).reshape(all_groups, size).sum(-1), count)
                for layer in layers
            }
    left = len(of_groups[layers[0]])
    each = size
    if heads is not None:
        count = amount(HEADS, heads, total)
        if isinstance(heads, float):
            each = max(1, math.floor(heads * size + 0.5))
        elif count % left or count // left > size:
            raise ValueError(
                f"heads={heads!r}: {left} groups of {size} query heads keep equally many each; give a multiple of "
                f"{left} up to {left * size}, or groups=... to drop whole groups"
            )
        else:
            each = count // left
    found: dict[tuple[str, int | None], Tensor] = {}
    for layer, chosen in of_groups.items():
        within = torch.arange(size).repeat(left)
        if each < size:
            by_layer = by_layer or scores(HEADS)
            score = _score(by_layer, HEADS, layer).reshape(all_groups, size)[chosen]
            within = highest_within(score.reshape(-1), left, each) % size
        if left < all_groups:
            found[GROUPS, layer] = chosen
        if left < all_groups or each < size:
            found[HEADS, layer] = chosen.repeat_interleave(each) * size + within
    return found


def _listed_heads(lists: Mapping[int, Tensor], size: int) -> dict[tuple[str, int | None], Tensor]:
    found: dict[tuple[str, int | None], Tensor] = {}
    for layer, heads in lists.items():
        groups, counts = torch.unique(heads // size, return_counts=True)
        if len(set(counts.tolist())) > 1:
            raise ValueError(
                f"heads of layer {layer}: {heads.tolist()} are {counts.tolist()} of the groups {groups.tolist()} that "
                "share a key and a value; list equally many of each"
            )
        found |= {(HEADS, layer): heads, (GROUPS, layer): groups}
    if len({len(found[GROUPS, layer]) for layer in lists}) > 1:
        raise ValueError("heads: the layers keep different numbers of groups; a model has as many in every layer")
    return found


def _in(model: Decoder, kind: str, kept: Sequence[int]) -> list[int]:
    return [layer for layer in model.layers_with(kind) if layer in set(kept)]


def _score(by_layer: Mapping[int | None, Tensor], kind: str, layer: int) -> Tensor:
    if layer not in by_layer:
        raise ValueError(f"the importance has no scores of {kind} for layer {layer}: measure the same model")
    return by_layer[layer]
