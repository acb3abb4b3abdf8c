"""The layer by module picture of a recipe's relative errors."""

from __future__ import annotations

import math
from typing import Any

from ._findings import Row, names, number
from ._plots import Cell, heat_strip
from ._record import TensorResult


def strip_of(row: Row) -> dict[str, Any]:
    """Layer by module picture of the relative error, its five worst tensors, and what has no layer."""
    places = {t.name: _place(t.name) for t in row.tensors}
    short = _short_kinds({kind for kind, _ in filter(None, places.values())})
    inside: dict[tuple[str, int], list[TensorResult]] = {}
    outside, vectors = [], set()
    changed = {place[0] for t in row.tensors if (place := places[t.name]) and not _kept(t)}
    for t in row.tensors:
        place = places[t.name]
        if place is None:
            outside.append(t)
        elif place[0] in changed or len(t.shape) > 1:
            inside.setdefault((short[place[0]], place[1]), []).append(t)
        else:
            vectors.add(short[place[0]])
    cells = {key: _cell(tensors) for key, tensors in inside.items()}
    shown = list(dict.fromkeys(kind for kind, _ in cells))
    layers = sorted({layer for _, layer in cells})
    done = [t for t in row.tensors if not _kept(t) and t.relative_error is not None]
    worst = sorted(done, key=lambda t: (math.isfinite(t.relative_error or 0), -(t.relative_error or 0), t.name))[:5]
    kept_names = sorted({*(t.name.removesuffix(".weight") for t in outside if _kept(t)), *vectors})
    return {
        "label": row.label,
        "svg": heat_strip(shown, layers, cells, title=f"relative error by layer, {row.label}") if cells else "",
        "worst": [(t.name.removesuffix(".weight"), number(t.relative_error or 0.0, 4), t.action) for t in worst],
        "outside": [(t.name.removesuffix(".weight"), t.action, t.relative_error) for t in outside if not _kept(t)],
        "kept": names(kept_names, 6),
    }


def _kept(tensor: TensorResult) -> bool:
    return tensor.action == "keep"


def _place(name: str) -> tuple[str, int] | None:
    """`_place("model.layers.3.mlp.experts.7.up.weight") == ("model.layers.mlp.experts.*.up", 3)`."""
    parts = name.removesuffix(".weight").split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if at is None:
        return None
    rest = ["*" if part.isdigit() else part for part in parts[at + 1 :]]
    return ".".join([*parts[:at], *rest]), int(parts[at])


def _short_kinds(kinds: set[str]) -> dict[str, str]:
    """The fewest last words of each kind that tell it from all others."""

    def tail(kind: str, count: int) -> str:
        return ".".join(kind.split(".")[-count:])

    short = {}
    for kind in kinds:
        counts = range(1, kind.count(".") + 2)
        unique = (
            n
            for n in counts
            if sum(tail(other, n) == tail(kind, n) for other in kinds) == 1 and tail(kind, n)[0] != "*"
        )
        short[kind] = tail(kind, next(unique, kind.count(".") + 1))
    return short


def _cell(tensors: list[TensorResult]) -> Cell:
    """One place of the picture; where experts share it, the worst of them."""
    done = [t for t in tensors if not _kept(t)]
    if not done:
        why = next((t.reason for t in tensors if t.reason), "")
        return Cell(None, kept=True, title=f"{tensors[0].name}: kept" + (f" ({why})" if why else ""))
    errors = [t.relative_error for t in done if t.relative_error is not None]
    value = None if not errors else math.nan if any(map(math.isnan, errors)) else max(errors)
    many = f"worst of {len(done)}: " if len(done) > 1 else ""
    told = "not known" if value is None else number(value, 4)
    bits = f", {done[0].bits_per_weight:.2f} bits/weight" if len(done) == 1 else ""
    quality = f", SQNR {done[0].sqnr_db:.1f} dB" if len(done) == 1 and done[0].sqnr_db is not None else ""
    return Cell(value, title=f"{done[0].name}: {many}relative error {told}, {done[0].action}{bits}{quality}")
