"""Which layers are rounded together, and which must share a format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .._checkpoint import Checkpoint
from .._graph import graph_of
from .._plan import Row

Grouping = Literal["layer", "fused", "block", "role"]
GROUPINGS: tuple[str, ...] = get_args(Grouping)


@dataclass(frozen=True)
class Members:
    """A group of rows of a plan, before it is measured; the fields of `Group` by the same names."""

    name: str
    role: str
    block: int | None
    fused: str
    rows: tuple[Row, ...]

    @property
    def patterns(self) -> tuple[str, ...]:
        """Expressions for the names of the group's modules, from their first character on."""
        stars = dict.fromkeys(starred(row.module) for row in self.rows)
        return tuple(r"\A" + re.escape(star).replace(r"\*", r"\d+") for star in stars)


def starred(module: str) -> str:
    """`starred("layers.0.mlp.experts.7.up") == "layers.0.mlp.experts.*.up"`: experts of a block are one layer."""
    return re.sub(r"(experts)\.\d+(?=\.|$)", r"\1.*", module)


def group_rows(
    checkpoint: Checkpoint, rows: Sequence[Row], blocks: Mapping[str, int], grouping: str
) -> tuple[tuple[Members, ...], tuple[str, ...]]:
    """The groups of some rows in the model's order, and what is to be told of them.

    blocks: the decoder block of each row by name. grouping: "layer" (each by itself; all experts of a block that play
    one role together), "fused" (q, k and v, gate and up, and all layers of a block's experts), "block" (of the
    decoder) or "role" (over all blocks). Runtimes fuse the layers of a "fused" group, so that groups of "layer" are
    told by it which of them must share a format; so are groups of "role".

    Raises ValueError for another grouping.
    """
    if grouping not in GROUPINGS:
        raise ValueError(f"groups={grouping!r}: choose {', '.join(map(repr, GROUPINGS))}")
    roles, fused, notes = _structure(checkpoint, rows)
    keys: dict[str, Callable[[Row], str]] = {
        "layer": lambda row: starred(row.module),
        "fused": lambda row: fused.get(row.name) or starred(row.module),
        "block": lambda row: f"block {blocks[row.name]}",
        "role": lambda row: roles[row.name],
    }
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(keys[grouping](row), []).append(row)
    made = []
    for name, members in found.items():
        places = {blocks[row.name] for row in members}
        words = dict.fromkeys(roles[row.name] for row in members)
        made.append(
            Members(
                name,
                "all" if grouping == "block" else "/".join(words),
                places.pop() if len(places) == 1 else None,
                _shared(members, fused, roles, grouping),
                tuple(members),
            )
        )
    return tuple(made), notes


def _structure(checkpoint: Checkpoint, rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Role and fused group of each row by name."""
    roles = {row.name: starred(row.module).rpartition(".")[2] for row in rows}
    # a runtime multiplies by all experts of a block in one kernel
    fused = {row.name: match[0] for row in rows if (match := re.match(r".*?\.experts(?=\.\d+\.|\.\w+$)", row.module))}
    try:
        graph = graph_of(checkpoint)
    except ValueError as error:
        return roles, fused, (f"which layers runtimes fuse is not known, so each has its own format: {error}",)
    for block in graph.blocks:
        for layers in block.fusion_groups:
            parts = "/".join(layer.module.rpartition(".")[2] for layer in layers)
            for layer in layers:
                fused.setdefault(layer.name, f"{layer.home}.{parts}")
    return roles, fused, ()


def _shared(members: Sequence[Row], fused: Mapping[str, str], roles: Mapping[str, str], grouping: str) -> str:
    """What ties a group to others."""
    if grouping == "layer":
        return fused.get(members[0].name, "")
    if grouping == "role":
        # q_proj of all blocks is tied to k_proj of all blocks, whatever the block
        homes = {fused[row.name] for row in members if row.name in fused}
        return re.sub(r"\.\d+\.", ".*.", min(homes)) if homes else ""
    return ""
