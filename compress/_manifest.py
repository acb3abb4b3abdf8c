"""halfulp.json: what an output holds, how to decode it, and what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from ._attention import Attention
from ._checkpoint import Checkpoint, short_name
from ._layouts import described, stored, stored_bits
from ._plan import Plan
from ._safetensors import some_names

MANIFEST = "halfulp.json"
RUINED = 0.5  # a relative error above this is remarked on

HOW_TO_DECODE = (
    "A tensor in the halfulp layout is NAME.codes (uint8: codes of the element format packed along the last axis, "
    "least significant bit first, each row starting a byte), NAME.scale (codes of the scale format, packed alike, "
    "one for each block along 'axis', or for each tile of 'size' along its axes), and where the format has them "
    "NAME.zero_point (codes of the element format, one a block) and NAME.tensor_scale (float32). A number is "
    "(code - zero_point) * scale * tensor_scale, where codes stand for the numbers they encode: sign | exponent | "
    "mantissa for a Float; two's complement (or sign | magnitude, or code - offset) times 2**-fraction for Fixed and "
    "Int; values[code] for a Codebook; a posit of the 2022 standard, with 'es' exponent bits; sign | u for a Log, "
    "which is 2**(u / 2**fraction - bias), or 0 where u is. The last block of an axis may be short."
)


def content_hash(hashes: Iterable[str]) -> str:
    """One hash of a model from those of its tensors."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def manifest_for(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: str | None,
    notes: Mapping[str, Any],
    recipe: Mapping[str, str] | None,
    run: str,
) -> dict[str, Any]:
    """What was made of each tensor, from what with which recipe; ``notes`` are the writer's, by tensor."""
    content = content_hash(notes[row.name]["sha256"] for row in plan.rows)
    formats = {str(row.weights): row.weights for row in plan.rows if row.weights is not None}
    dense = [row for row in plan.rows if row.weights is not None and row.prune is None]
    ruined = [row for row in dense if notes[row.name]["relative_error"] > RUINED]
    remarks = list(plan.notes)
    if ruined:
        worst = max(ruined, key=lambda row: notes[row.name]["relative_error"])
        remarks.append(
            f"{len(ruined)} tensors lost more than half of their norm (worst {worst.name}, relative error "
            f"{notes[worst.name]['relative_error']:.2f}): a format without a scale, such as int4 for int4:channel?"
        )
    fallbacks: dict[str, list[str]] = {}
    for row in plan.rows:
        if why := notes[row.name].get("facts", {}).get("fallback"):
            fallbacks.setdefault(why, []).append(row.name)
    for why, names in fallbacks.items():
        remarks.append(f"{len(names)} tensor{'s' * (len(names) > 1)} {why} ({some_names(names)})")
    tensors = {}
    for row in plan.rows:
        entry: dict[str, Any] = {"shape": list(row.spec.shape), "dtype": row.spec.dtype, "kind": row.kind}
        entry["action"] = row.action
        if row.weights is not None:
            entry["format"] = str(row.weights)
            entry["stored"] = [spec.name for spec in stored(row, layout)]
        if row.activations is not None:
            entry["activations"] = str(row.activations)
            if row.static:
                entry["input_scale"] = f"{row.module}.input_scale"
        if row.touched:
            entry["relative_error"] = notes[row.name]["relative_error"]
            entry["zeros"] = notes[row.name]["zeros"]
        entry["bits_per_weight"] = stored_bits(row, layout)
        if facts := notes[row.name].get("facts"):
            entry["facts"] = facts
        if text := row.note or row.reason:
            entry["why"] = text
        tensors[row.name] = entry
    return {
        "halfulp": version("halfulp"),
        "run": run,
        "source": {"name": short_name(checkpoint.source), "sha256": content},
        "recipe": dict(recipe or {}),
        "layout": layout or "plain",
        "how_to_decode": HOW_TO_DECODE,
        "formats": {name: described(fmt) for name, fmt in formats.items()},
        "attention": None if plan.attention is None else described_attention(plan.attention),
        "notes": remarks,
        "tensors": tensors,
    }


def described_attention(attention: Attention) -> dict[str, Any]:
    """The formats inside attention by the names of their tensors, and whether their scales are static."""
    return {name: str(fmt) for name, fmt in attention.formats.items()} | {"static": attention.static}


def manifest_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The halfulp.json of an output of ours, None for any other checkpoint.

    Raises ValueError for a damaged one.
    """
    path = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not (path / MANIFEST).is_file():
        return None
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        manifest["tensors"], manifest["layout"], manifest["source"]  # the keys that must be there
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged ({error}): compress the model again") from None
    return dict(manifest)
