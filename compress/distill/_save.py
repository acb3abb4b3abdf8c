"""A trained model back as a checkpoint, in the place and form of another."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._checkpoint import Checkpoint, open_checkpoint
from .._safetensors import CODES, JOURNAL, TensorSpec, some_names
from .._stream import StreamWriter, fsync_path, require_space
from ._state import fingerprint

SHARD_BYTES = 5 * 10**9
_PARTIAL = ".partial"


def save_student(
    model: Any,
    out: str | Path,
    like: Checkpoint,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model as a checkpoint with the tensors, config and side files of another; returns its directory.

    >>> save_student(result.student, "out/", like=small)  # doctest: +SKIP

    like: the checkpoint (or rewritten view of one) that the model was loaded from: its tensors' names and order, its
    config and tokenizer are taken over, so a tied head stays tied. weights: values to write in place of the model's,
    by parameter name (`merge` of adapters, ``Distilled.weights``). dtype: of floating-point tensors; None leaves the
    model's. Everything is written to ``OUT.partial``, synced and renamed; a run that was stopped goes on where it was.

    Raises FileExistsError for an output that exists; ValueError for a model whose tensors are not those of ``like``.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists: pass another directory, or remove it first")
    state = _state(model, weights or {}, like)
    if dtype is not None:
        state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    specs = [TensorSpec(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()]
    partial = out.with_name(out.name + _PARTIAL)
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists() and not (partial / JOURNAL).exists() and any(partial.iterdir()):
        if not _complete(partial, state):
            raise ValueError(f"{partial} is no unfinished output of this model: delete it, or pass another directory")
        os.rename(partial, out)  # stopped after its last byte
        return out
    writer = StreamWriter(partial, specs, shard_bytes, fingerprint(state))
    try:
        require_space(partial, writer.remaining)
        for name, tensor in state.items():
            if name not in writer.done:
                writer.write(name, {name: tensor}, {})
        like.copy_side_files(partial)
        floats = [t.dtype for t in state.values() if t.is_floating_point()]
        word = str(max(set(floats), key=floats.count)).removeprefix("torch.")
        config = dict(like.config) | {"dtype": word, "torch_dtype": word}
        with open(partial / "config.json", "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        writer.finish()
    finally:
        writer.close()
    os.rename(partial, out)
    fsync_path(out.parent)
    return out


def _complete(partial: Path, state: Mapping[str, torch.Tensor]) -> bool:
    try:
        found = open_checkpoint(partial)
    except (OSError, ValueError):
        return False
    return fingerprint({name: found.read(name) for name in found.tensors}) == fingerprint(state)


def _state(model: Any, weights: Mapping[str, torch.Tensor], like: Checkpoint) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of a checkpoint, in its order."""
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if lost := [name for name in weights if name not in own]:
        raise ValueError(f"weights holds {some_names(lost)}, of no parameter of the model")
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"weights[{name!r}] is {list(tensor.shape)}, and the model's {list(own[name].shape)}")
        own[name] = tensor.detach()
    if set(like.tensors) - set(own):  # experts and the like, which transformers holds fused
        from transformers.core_model_loading import revert_weight_conversion

        own = dict(revert_weight_conversion(model, own))
    # a tied tensor has two names in the model and one in the checkpoint
    extra = [name for name in own if name not in like.tensors]
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    embedding: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tied = bool(like.config.get("tie_word_embeddings")) and head is not None and embedding is not None
    if tied and head.weight is embedding.weight:
        extra = [name for name in extra if not name.endswith("lm_head.weight")]
    missing = [name for name in like.tensors if name not in own]
    wrong = [n for n, spec in like.tensors.items() if n in own and tuple(own[n].shape) != spec.shape]
    for names, what in ((missing, "lacks"), (extra, "has, and like has not,"), (wrong, "has in another shape")):
        if names:
            raise ValueError(
                f"the model {what} {some_names(names)}: give the checkpoint that it was loaded from as like"
            )
    return {name: own[name].contiguous() for name in like.tensors}
