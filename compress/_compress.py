"""Apply a transform to a checkpoint, tensor by tensor, and write the result beside its final place."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..numerics import Format, Quantized, decode
from ._checkpoint import Checkpoint, open_checkpoint
from ._layouts import (
    caution,
    choose,
    quantization_config,
    rowwise,
    runtime_dtype,
    store,
    stored,
)
from ._manifest import MANIFEST, content_hash, manifest_for
from ._plan import Plan, Row, start
from ._safetensors import JOURNAL, TensorSpec
from ._stream import StreamWriter, fsync_path, require_space
from ._transforms import Transform, Weight

SHARD_BYTES = 5 * 10**9
_CHUNK_BYTES = 1 << 21  # source bytes that one thread works on at a time
_ROWS = 32  # zero points are packed along the rows, 32 at a time

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of source tensors done of all, and the tensor just done."""

    done: int
    total: int
    name: str


def plan_of(
    tensors: Mapping[str, tuple[int, ...]] | Checkpoint, transform: Transform, config: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a transform for a checkpoint, or for bare names and shapes (taken as bfloat16).

    >>> from halfulp.compress import quantize
    >>> plan_of({"lm_head.weight": (8, 4), "fc.weight": (4, 4)}, quantize("int8:channel")).rows[0].reason
    'the output head: name it in targets to compress it'

    Raises ValueError for whatever the transform cannot do to these tensors.
    """
    if isinstance(tensors, Checkpoint):
        specs: Iterable[TensorSpec] = tensors.tensors.values()
        config = tensors.config
    else:
        specs = [TensorSpec(name, "BF16", tuple(shape)) for name, shape in tensors.items()]
    return transform.plan(start(specs, config or {}))


def compress(
    source: str | Path | Checkpoint,
    transform: Transform,
    out: str | Path,
    *,
    recipe: Mapping[str, str] | None = None,
    layout: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Apply a transform to a checkpoint; returns the manifest that stands in the output as halfulp.json.

    >>> compress("smollm2-135m", quantize("int4:g64"), out="out/")  # doctest: +SKIP

    source: a directory or file of safetensors, a GGUF file, a hub id or "smollm2-135m" (see `open_checkpoint`).
    out: a directory that is not there yet. Everything is written to ``OUT.partial`` and renamed at the end; a
    run that was stopped goes on where it was and ends with the same bytes.
    layout: "compressed-tensors" or "halfulp"; None takes the first wherever it can hold every tensor.
    Memory: a tensor's codes and a few chunks of 2 MB, or one whole tensor and its codes where a format or a
    mask spans the tensor. Threads: as many as torch is set to use; the result does not depend on them.

    Raises FileExistsError for an output that exists, ValueError for what cannot be done (see the transforms),
    a tensor with NaN or infinity, or another run's OUT.partial; OSError for a full disk.
    """
    if not hasattr(transform, "plan") or not hasattr(transform, "apply"):
        raise ValueError(f"{transform!r} is no transform: give one such as quantize('int4:g64'), or a chain of them")
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists: pass another -o, or remove it first")
    if quantized := checkpoint.config.get("quantization_config"):
        method = dict(quantized).get("quant_method", dict(quantized).get("format", "an unknown method"))
        raise ValueError(f"{checkpoint.source} is quantized already ({method}): start from the uncompressed checkpoint")
    plan = plan_of(checkpoint, transform)
    if not any(row.touched for row in plan.rows) and plan.kv is None:
        raise ValueError("the recipe touches no tensor of this model: see the plan, and its ignore patterns")
    chosen, why = choose(plan, layout)
    dtype = runtime_dtype(plan, chosen)
    given = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    remarks = []
    if why:
        remarks.append(f"written in the halfulp layout: {why}")
    if plan.kv is not None:
        remarks.append(f"KV cache in {plan.kv}: emulated by halfulp.load, and not known to other readers of the output")
    if warning := caution(plan, chosen):
        remarks.append(warning)
    if dtype not in (None, given):
        remarks.append(f"config.json says {dtype}, not {given}: transformers decodes this layout to {dtype}")
    plan = replace(plan, notes=(*plan.notes, *remarks))
    specs = [spec for row in plan.rows for spec in stored(row, chosen)]
    facts = [version("halfulp"), str(plan), repr(plan.rows), repr(plan.kv), chosen, shard_bytes, dict(recipe or {})]
    run = _hash([_shapes(checkpoint), checkpoint.config, *facts])
    partial = out.with_name(out.name + ".partial")
    if not _complete(partial, run, checkpoint):
        if partial.exists() and not (partial / JOURNAL).exists() and (not partial.is_dir() or any(partial.iterdir())):
            raise ValueError(f"{partial} is no unfinished run of this: delete it or pass another -o")
        with _writing(partial, specs, shard_bytes, _hash([checkpoint.identity(), run])) as writer:
            _write_all(checkpoint, plan, transform, chosen, writer, progress)
            manifest = manifest_for(checkpoint, plan, chosen, writer.done, recipe, run)
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
    return bool(same) and content == content_hash(_hashed(checkpoint, spec) for spec in checkpoint.tensors.values())


def _write_all(
    checkpoint: Checkpoint,
    plan: Plan,
    transform: Transform,
    layout: str | None,
    writer: StreamWriter,
    progress: Callable[[Progress], None] | None,
) -> None:
    total = sum(row.spec.nbytes for row in plan.rows)
    done = 0
    with _pool() as pool:
        for row in plan.rows:
            if row.name not in writer.done:
                if row.touched:
                    tensors, note = _compressed(checkpoint, row, transform, layout, pool)
                    writer.write(row.name, tensors, note)
                else:
                    # the hash is known only after the bytes went by, so the tensor is read twice
                    note = {"sha256": _hashed(checkpoint, row.spec)}
                    writer.write(row.name, {row.name: _pieces(checkpoint, row.spec)}, note)
            done += row.spec.nbytes
            if progress:
                progress(Progress(done, total, row.name))


def _pieces(checkpoint: Checkpoint, spec: TensorSpec) -> Iterator[torch.Tensor]:
    """A tensor some rows at a time."""
    if not spec.shape or spec.nbytes <= _CHUNK_BYTES:
        yield checkpoint.read(spec.name)
        return
    step = max(_ROWS, _CHUNK_BYTES * spec.shape[0] // spec.nbytes // _ROWS * _ROWS)
    for first in range(0, spec.shape[0], step):
        yield checkpoint.read(spec.name, slice(first, min(first + step, spec.shape[0])))


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _source_hash(spec: TensorSpec) -> Any:
    return hashlib.sha256(json.dumps([spec.name, spec.dtype, spec.shape]).encode())


def _hashed(checkpoint: Checkpoint, spec: TensorSpec) -> str:
    digest = _source_hash(spec)
    for piece in _pieces(checkpoint, spec):
        digest.update(_bytes(piece))
    return str(digest.hexdigest())


def _compressed(
    checkpoint: Checkpoint, row: Row, transform: Transform, layout: str | None, pool: ThreadPoolExecutor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row's stored tensors, and its note: the source's hash and the error."""
    parts: dict[str, list[torch.Tensor]] = {}
    digest = _source_hash(row.spec)
    error = norm = zeros = 0.0

    def one(piece: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], tuple[float, float, int]]:
        if not torch.isfinite(piece).all():
            raise ValueError(f"{row.name} holds NaN or infinity, of which nothing can be made: repair the checkpoint")
        weight = transform.apply(Weight(piece), row)
        return piece, _finished(weight, row, layout), _difference(piece, weight, row.weights)

    whole = [checkpoint.read(row.name)] if not rowwise(row) else _pieces(checkpoint, row.spec)
    for piece, tensors, (e, n, z) in _in_order(pool, one, whole):
        digest.update(_bytes(piece))
        for name, tensor in tensors.items():
            parts.setdefault(name, []).append(tensor)
        error, norm, zeros = error + e, norm + n, zeros + z
    fixed = {f"{row.module}.weight_shape", f"{row.module}.weight_global_scale", f"{row.name}.tensor_scale"}
    written = {name: pieces[:1] if name in fixed else pieces for name, pieces in parts.items()}
    relative = math.sqrt(error / norm) if norm else 0.0
    # six digits: more would depend on how many threads the sums were split over
    note = {"sha256": digest.hexdigest(), "relative_error": float(f"{relative:.6g}"), "zeros": int(zeros)}
    return written, note


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has, each with torch to itself.

    Torch's own threads meet after every operation; on a busy machine they spend most of the time waiting.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _in_order(pool: ThreadPoolExecutor, work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in the order of the items, with only a few items on their way at a time."""
    waiting: deque[Future[B]] = deque()
    for item in items:
        waiting.append(pool.submit(work, item))
        if len(waiting) > pool._max_workers:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _finished(weight: Weight, row: Row, layout: str | None) -> dict[str, torch.Tensor]:
    if weight.codes is None:
        return {row.name: weight.value}
    return store(weight.codes, row, layout)


def _difference(
    source: torch.Tensor, weight: Weight, fmt: Format | None, rows: int = 1 << 18
) -> tuple[float, float, int]:
    """Sums of squared error and of squares, and the count of zeros, a cache-sized piece at a time."""
    codes = weight.codes
    result = weight.value if codes is None else decode(codes, None if isinstance(codes, Quantized) else fmt)
    error = norm = 0.0
    zeros = 0
    for a, b in zip(source.reshape(-1).split(rows), result.reshape(-1).split(rows)):
        a, b = a.float(), b.float()
        error, norm = error + _squares(a - b), norm + _squares(a)
        zeros += b.numel() - int(torch.count_nonzero(b))
    return error, norm, zeros


def _squares(a: torch.Tensor) -> float:
    total = float(torch.dot(a, a))
    if 0 < total < math.inf:
        return total
    return float(torch.dot(a.double(), a.double()))  # squares out of float32's range, or none at all


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
