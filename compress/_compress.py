"""Apply a transform to a checkpoint, tensor by tensor, and write the result beside its final place."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ._attend import layers_of, scale_specs
from ._blockwise import write_blocks
from ._checkpoint import Checkpoint, open_checkpoint
from ._layouts import (
    attention_remarks,
    caution,
    choose,
    quantization_config,
    runtime_dtype,
    stored,
)
from ._manifest import MANIFEST, content_hash, manifest_for
from ._permute import Permute
from ._plan import Plan, Row, start
from ._rewrites import Measured, Rewrite, ShrinkByActivations, rewritten
from ._safetensors import JOURNAL, TensorSpec
from ._stream import StreamWriter, fsync_path, require_space
from ._tensorwise import source_hash, with_shared_amax, write_tensors
from ._transforms import Chain, Transform
from .calibrate import Calibration, Decoder

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of source tensors done of all, and the tensor just done."""

    done: int
    total: int
    name: str


def plan_of(
    tensors: Mapping[str, tuple[int, ...]] | Checkpoint,
    transform: Transform | Rewrite | Measured,
    config: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan of a transform for a checkpoint, or for bare names and shapes (taken as bfloat16).

    >>> from halfulp.compress import quantize
    >>> plan_of({"lm_head.weight": (8, 4), "fc.weight": (4, 4)}, quantize("int8:channel")).rows[0].reason
    'the output head: name it in targets to compress it'

    Raises ValueError for whatever the transform cannot do to these tensors.
    """
    steps = transform if isinstance(transform, Chain) else Chain((transform,))
    if isinstance(tensors, Checkpoint):
        # what follows from a measurement changes no names and no shapes
        known = [s.preview() if isinstance(s, (Permute, ShrinkByActivations)) else s for s in steps.rewrites]
        tensors, notes = rewritten(tensors, [s for s in known if isinstance(s, Rewrite)], None)
        later = [str(s) for s in steps.rewrites if isinstance(s, Measured)]
        notes += tuple(f"{name}: the numbers follow from the calibration" for name in later)
        specs: Iterable[TensorSpec] = tensors.tensors.values()
        config = tensors.config
    else:
        notes = ()
        specs = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in tensors.items()]
    plan = steps.plan(start(specs, config or {}))
    return replace(plan, notes=(*notes, *plan.notes))


def compress(
    source: str | Path | Checkpoint,
    transform: Transform | Rewrite | Measured,
    out: str | Path,
    *,
    recipe: Mapping[str, str] | None = None,
    layout: str | None = None,
    calibration: Calibration | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Apply a transform to a checkpoint; returns the manifest that stands in the output as halfulp.json.

    >>> compress("smollm2-135m", quantize("int4:g64"), out="out/")  # doctest: +SKIP

    source: a directory or file of safetensors, a GGUF file, a hub id or "smollm2-135m" (see `open_checkpoint`).
    out: a directory that is not there yet. Everything is written to ``OUT.partial`` and renamed at the end; a
    run that was stopped goes on where it was and ends with the same bytes.
    layout: "compressed-tensors" or "halfulp"; None takes the first wherever it can hold every tensor.
    calibration: what the model reads to suit it to its inputs (see `calibration`); only some methods need one.
    Memory: a tensor's codes and a few chunks of 2 MB, or one whole tensor and its codes where a format or a
    mask spans the tensor; with a calibration, one decoder block and what its layers are given. Threads: as many
    as torch is set to use; without a calibration the result does not depend on them.

    Raises FileExistsError for an output that exists, ValueError for what cannot be done (see the transforms),
    a tensor with NaN or infinity, or another run's OUT.partial; OSError for a full disk.
    """
    if not isinstance(transform, (Rewrite, Measured)) and not (
        hasattr(transform, "plan") and hasattr(transform, "apply")
    ):
        raise ValueError(f"{transform!r} is no transform: give one such as quantize('int4:g64'), or a chain of them")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists: pass another -o, or remove it first")
    if quantized := checkpoint.config.get("quantization_config"):
        method = dict(quantized).get("quant_method", dict(quantized).get("format", "an unknown method"))
        raise ValueError(f"{checkpoint.source} is quantized already ({method}): start from the uncompressed checkpoint")
    steps = transform if isinstance(transform, Chain) else Chain((transform,))
    checkpoint, told_first = rewritten(checkpoint, steps.rewrites, calibration)
    plan = steps.plan(start(checkpoint.tensors.values(), checkpoint.config))
    plan = replace(plan, notes=(*told_first, *plan.notes))
    if not any(row.touched for row in plan.rows) and plan.attention is None and not steps.rewrites:
        raise ValueError("the recipe touches no tensor of this model: see the plan, and its ignore patterns")
    calibrated = frozenset(row.name for row in plan.rows if row.needs)
    decoder, sequences, read = None, [], []
    watched = plan.attention is not None and plan.attention.calibrates
    if (calibrated or watched) and calibration is None:
        methods = {str(m) for row in plan.rows for m in (row.rounding, row.score) if m is not None}
        methods |= {"static attention"} if watched else set()
        how = ", ".join(sorted(methods)) or "static activations"
        raise ValueError(f"{how} needs a calibration: give one, such as calibration('wikitext2')")
    measured = any(isinstance(step, Measured) for step in steps.rewrites)
    if calibration is not None and (calibrated or watched or measured):
        # what is wrong with the text or the model shows here, before anything is written
        sequences = calibration.tokens(checkpoint)
        read = [ids.tolist() for ids in sequences]
        decoder = Decoder(checkpoint) if calibrated or watched else None
    chosen, why = choose(plan, layout)
    dtype = runtime_dtype(plan, chosen)
    given = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    remarks = []
    if why:
        remarks.append(f"written in the halfulp layout: {why}")
    remarks += attention_remarks(plan, chosen)
    if warning := caution(plan, chosen):
        remarks.append(warning)
    if dtype not in (None, given):
        remarks.append(f"config.json says {dtype}, not {given}: transformers decodes this layout to {dtype}")
    plan = replace(plan, notes=(*plan.notes, *remarks))
    plan = with_shared_amax(checkpoint, plan)
    specs = [spec for row in plan.rows for spec in stored(row, chosen)]
    specs += [] if decoder is None else scale_specs(decoder, plan.attention)
    facts: list[Any] = [version("halfulp"), repr(steps.rewrites), str(plan), repr(plan.rows), repr(plan.attention)]
    facts += [chosen, shard_bytes, dict(recipe or {}), read]
    run = _hash([_shapes(checkpoint), checkpoint.config, *facts])
    partial = out.with_name(out.name + ".partial")
    if not _complete(partial, run, checkpoint):
        if partial.exists() and not (partial / JOURNAL).exists() and (not partial.is_dir() or any(partial.iterdir())):
            raise ValueError(f"{partial} is no unfinished run of this: delete it or pass another -o")
        with _writing(partial, specs, shard_bytes, _hash([checkpoint.identity(), run])) as writer:
            told = _told(plan, progress)
            write_tensors(checkpoint, plan, steps, chosen, writer, calibrated, told)
            if decoder is not None:
                write_blocks(decoder, plan, steps, chosen, writer, sequences, told)
            manifest = manifest_for(checkpoint, plan, chosen, writer.done, recipe, run)
            if decoder is not None and watched:
                manifest["attention"]["layers"] = layers_of(decoder)
            if read:
                manifest["calibration"] = {"text": str(calibration), "sha256": _hash(read)}
            checkpoint.copy_side_files(partial)
            config = dict(checkpoint.config)
            if quantization := quantization_config(plan, chosen):
                config["quantization_config"] = quantization
            if dtype:
                config |= {"dtype": dtype, "torch_dtype": dtype}
            _write_json(partial / "config.json", config)
            _write_json(partial / MANIFEST, manifest)
            writer.finish()
    manifest = json.loads((partial / MANIFEST).read_text(encoding="utf-8"))
    if out.is_dir():
        out.rmdir()
    os.rename(partial, out)
    fsync_path(out.parent)
    return dict(manifest)


@contextmanager
def _writing(partial: Path, specs: list[TensorSpec], shard_bytes: int, fingerprint: str) -> Iterator[StreamWriter]:
    """A `StreamWriter` that lets go of its directory on the way out, with room on the disk checked first."""
    fresh = not partial.exists()
    partial.parent.mkdir(parents=True, exist_ok=True)
    writer = StreamWriter(partial, specs, shard_bytes, fingerprint)
    try:
        try:
            require_space(partial, writer.remaining)
        except OSError:
            if fresh:
                shutil.rmtree(partial)
            raise
        yield writer
    except OSError as error:
        if error.strerror != os.strerror(errno.ENOSPC):
            raise
        # of the small files, which the writer knows nothing of
        message = f"the disk of {partial} is full: free some space, then run the same command again to go on"
        raise OSError(errno.ENOSPC, message) from error
    finally:
        writer.close()


def _complete(partial: Path, run: str, checkpoint: Checkpoint) -> bool:
    """Was this very run stopped after its last byte and before the rename?"""
    if (partial / JOURNAL).exists():
        return False
    try:
        manifest = json.loads((partial / MANIFEST).read_text(encoding="utf-8"))
        same, content = manifest["run"] == run, manifest["source"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    # the run knows names, shapes and recipe; that the numbers are the same takes a look at them
    return bool(same) and content == content_hash(source_hash(checkpoint, spec) for spec in checkpoint.tensors.values())


def _told(plan: Plan, progress: Callable[[Progress], None] | None) -> Callable[[Row], None]:
    """Report a row as done."""
    total, done = sum(row.spec.nbytes for row in plan.rows), 0

    def tell(row: Row) -> None:
        nonlocal done
        done += row.spec.nbytes
        if progress:
            progress(Progress(done, total, row.name))

    return tell


def _shapes(checkpoint: Checkpoint) -> list[Any]:
    return [[spec.name, spec.dtype, list(spec.shape)] for spec in checkpoint.tensors.values()]


def _hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
