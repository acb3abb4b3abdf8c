"""Tensor by tensor from a checkpoint to an output, in bounded memory: all that needs no calibration."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..numerics import Format, Quantized, decode
from ._checkpoint import Checkpoint
from ._layouts import rowwise, store
from ._plan import Plan, Row
from ._safetensors import TensorSpec
from ._stream import StreamWriter
from ._transforms import Transform, Weight

_CHUNK_BYTES = 1 << 21  # source bytes that one thread works on at a time
_ROWS = 32  # zero points are packed along the rows, 32 at a time

A = TypeVar("A")
B = TypeVar("B")


def write_tensors(
    checkpoint: Checkpoint,
    plan: Plan,
    transform: Transform,
    layout: str | None,
    writer: StreamWriter,
    later: frozenset[str],
    told: Callable[[Row], None],
) -> None:
    with _pool() as pool:
        for row in plan.rows:
            if row.name in later:
                continue
            if row.name not in writer.done:
                if row.touched:
                    tensors, note = _compressed(checkpoint, row, transform, layout, pool)
                    writer.write(row.name, tensors, note)
                else:
                    # the hash is known only after the bytes went by, so the tensor is read twice
                    note = {"sha256": source_hash(checkpoint, row.spec)}
                    writer.write(row.name, {row.name: _pieces(checkpoint, row.spec)}, note)
            told(row)


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


def _digest_of(spec: TensorSpec) -> Any:
    return hashlib.sha256(json.dumps([spec.name, spec.dtype, spec.shape]).encode())


def with_shared_amax(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """The plan with the largest magnitude of those tensors that share a scale; they are read for it."""
    alone = {
        name: max((float(piece.abs().max()) for piece in _pieces(checkpoint, row.spec) if piece.numel()), default=0.0)
        for name, row in ((row.name, row) for row in plan.rows)
        if row.shares
    }
    rows = {r.name: replace(r, amax=max(alone[name] for name in r.shares)) for r in plan.rows if r.shares}
    return plan.update(rows)


def source_hash(checkpoint: Checkpoint, spec: TensorSpec) -> str:
    digest = _digest_of(spec)
    for piece in _pieces(checkpoint, spec):
        digest.update(_bytes(piece))
    return str(digest.hexdigest())


def _compressed(
    checkpoint: Checkpoint, row: Row, transform: Transform, layout: str | None, pool: ThreadPoolExecutor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row's stored tensors, and its note: the source's hash and the error."""
    parts: dict[str, list[torch.Tensor]] = {}
    digest = _digest_of(row.spec)
    error = norm = zeros = 0.0

    def one(piece: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], tuple[float, float, int]]:
        if not torch.isfinite(piece).all():
            raise ValueError(f"{row.name} holds NaN or infinity, of which nothing can be made: repair the checkpoint")
        weight = transform.apply(Weight(piece), row)
        return piece, finished(weight, row, layout), difference(piece, weight, row.weights)

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


def finished(weight: Weight, row: Row, layout: str | None) -> dict[str, torch.Tensor]:
    if weight.codes is None:
        return {row.name: weight.value}
    tensors = store(weight.codes, row, layout)
    if weight.input_scale is not None:
        tensors[f"{row.module}.input_scale"] = weight.input_scale
    return tensors


def difference(
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
