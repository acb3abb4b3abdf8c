"""A checkpoint whose tensors are computed from another's when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch

from .._checkpoint import Checkpoint
from .._safetensors import CODES, TORCH_DTYPES, TensorSpec

_TILE = 1 << 18  # numbers that are worked on at a time where rows do not depend on each other
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Step:
    """One step of making a tensor: `apply(x, axis)`, which sees one axis whole and treats all others alike."""

    axis: int
    apply: Callable[[torch.Tensor, int], torch.Tensor]


def scaled(axis: int, factors: Callable[[], torch.Tensor]) -> Step:
    """Multiply along an axis; the factors are read when they are needed."""
    return Step(axis, lambda x, a: x * along(factors(), x, a))


def along(vector: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """A vector shaped such that it meets an axis of x."""
    return vector.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def on_part(axis: int, index: torch.Tensor, step: Step) -> Step:
    """A step for some of an axis only."""
    return Step(axis, lambda x, a: x.index_copy(a % x.ndim, index, step.apply(x.index_select(a % x.ndim, index), a)))


def applied(x: torch.Tensor, steps: Iterable[Step]) -> torch.Tensor:
    """All steps in float64."""
    x = x.double()
    for step in steps:
        x = step.apply(x, step.axis)
    return x


def view(
    checkpoint: Checkpoint,
    edits: Mapping[str, Sequence[Step]],
    *,
    copies: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Checkpoint:
    """The checkpoint with some tensors made by steps in float64, and rounded once to their dtype.

    edits: steps by tensor name. copies: new tensors by name, and the tensor that each starts from. config: entries
    that replace those of config.json. dtype: keep all floating tensors in this one instead of their own.

    Memory of a read: a few MB besides the result where rows do not depend on each other; source and result where
    columns do not; 8 bytes a number a few times where both do (attention's matrices). A result of the latter two
    kinds is kept until the next, for reads of some rows at a time.
    The same bits come for any rows. Raises ValueError for steps on tensors that are no plain floating-point, and
    when a tensor is read that holds NaN or infinity, or leaves the range of its dtype.
    """
    copies = copies or {}
    if checkpoint.config.get("quantization_config"):
        raise ValueError(f"{checkpoint.source} is quantized already: start from the uncompressed checkpoint")
    specs = dict(checkpoint.tensors)
    specs |= {name: replace(specs[source], name=name) for name, source in copies.items()}
    if odd := [name for name in edits if specs[name].dtype not in _FLOATS]:
        raise ValueError(f"{odd[0]} holds {specs[odd[0]].dtype}: only {', '.join(_FLOATS)} tensors can be rewritten")
    if dtype is not None:
        code = CODES.get(dtype)
        if code not in _FLOATS:
            raise ValueError(f"dtype={dtype!r}: choose torch.float64, float32, float16 or bfloat16")
        specs = {n: replace(s, dtype=code) if s.dtype in _FLOATS else s for n, s in specs.items()}
        word = str(dtype).removeprefix("torch.")
        config = {"dtype": word, "torch_dtype": word, **(config or {})}
    kept = _Last()

    def read(name: str, rows: slice | None) -> torch.Tensor:
        spec, steps, source = specs[name], edits.get(name, ()), copies.get(name, name)
        if not steps:
            return checkpoint.read(source, rows).to(TORCH_DTYPES[spec.dtype])
        dims = len(spec.shape)
        if dims > 1 and all(step.axis % dims for step in steps):
            return _by_rows(checkpoint, source, spec, steps, rows)

        def whole() -> torch.Tensor:
            x = checkpoint.read(source)
            if dims == 2 and all(step.axis % dims == 0 for step in steps):
                return _by_columns(x, spec, steps)
            return _rounded(applied(x, steps), spec)

        return whole() if rows is None else kept.get(name, whole)[rows].clone()

    return replace(checkpoint, tensors=specs, config={**checkpoint.config, **(config or {})}, _read=read)


def _by_rows(
    checkpoint: Checkpoint, source: str, spec: TensorSpec, steps: Sequence[Step], rows: slice | None
) -> torch.Tensor:
    """Tiles always begin at the same rows: a matmul may round otherwise for another number of rows."""
    count = spec.shape[0]
    first, last, _ = (rows or slice(None)).indices(count)
    tile = max(1, _TILE // max(1, spec.numel // max(1, count)))
    result = torch.empty((max(0, last - first), *spec.shape[1:]), dtype=TORCH_DTYPES[spec.dtype])
    for start in range(first // tile * tile, last, tile):
        stop = min(start + tile, count)
        done = _rounded(applied(checkpoint.read(source, slice(start, stop)), steps), spec)
        a, b = max(start, first), min(stop, last)
        result[a - first : b - first] = done[a - start : b - start]
    return result


def _by_columns(x: torch.Tensor, spec: TensorSpec, steps: Sequence[Step]) -> torch.Tensor:
    """Columns that do not depend on each other, a few at a time in float64."""
    tile = max(1, _TILE // max(1, spec.shape[0]))
    result = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
    for start in range(0, spec.shape[1], tile):
        result[:, start : start + tile] = _rounded(applied(x[:, start : start + tile], steps), spec)
    return result


def _rounded(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    result = x.to(TORCH_DTYPES[spec.dtype])
    if not torch.isfinite(result).all():
        if bool(torch.isfinite(x).all()):
            raise ValueError(f"{spec.name}, rewritten, leaves the range of {spec.dtype}: choose a wider dtype")
        raise ValueError(f"{spec.name} is made from numbers that hold NaN or infinity: repair the model")
    return result.contiguous()


class _Last:
    """The last tensor that was made, for the next read of other rows of it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._name: str | None = None
        self._value: torch.Tensor | None = None

    def get(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._lock:
            if self._value is None or self._name != name:
                self._value = None
                self._value, self._name = make(), name
            return self._value
