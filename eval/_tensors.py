"""Open whatever holds tensors, as names, shapes and a way to read rows: checkpoints, safetensors, npz, npy."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..compress import open_checkpoint
from ..compress._plan import kind_of, matcher
from ..compress._safetensors import TORCH_DTYPES, read_header, read_tensor


@dataclass(frozen=True)
class Spec:
    """A tensor's name, dtype in words, shape, and whether its numbers are floats."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    floats: bool

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, eq=False)
class Tensors:
    """A source's tensors in its own order; ``read(name, rows)`` gives rows of one, numpy or torch."""

    source: str
    specs: tuple[Spec, ...]
    read: Callable[[str, slice], Any] = field(repr=False)
    config: Mapping[str, Any] | None = field(repr=False, default=None)

    def axis(self, spec: Spec) -> int:
        """The axis that a matmul sums over, along which a compressed checkpoint has its blocks."""
        return -1 if self.config is None else kind_of(spec.name, spec.shape, self.config)[1]

    def select(self, patterns: tuple[str, ...] = ()) -> tuple[Spec, ...]:
        """The float tensors that patterns match, as in a recipe's targets; without any, all of two axes or more
        (or all, where none has two). Raises ValueError for a pattern that matches none, with near names."""
        floats = [spec for spec in self.specs if spec.floats and spec.count]
        if not patterns:
            chosen = [spec for spec in floats if len(spec.shape) > 1] or floats
            if not chosen:
                raise ValueError(f"{self.source} has no tensors of floating-point numbers")
            return tuple(chosen)
        found: dict[str, Spec] = {}
        for pattern in patterns:
            expression = matcher(pattern)
            matched = [s for s in self.specs if expression.fullmatch(s.name) or expression.fullmatch(_module(s.name))]
            if not matched:
                names = [spec.name for spec in self.specs]
                near = get_close_matches(pattern, [*names, *map(_module, names)], n=3, cutoff=0.4) or names[:3]
                raise ValueError(f"{pattern!r} matches no tensor of {self.source}; near names: {', '.join(near)}")
            if not (kept := [spec for spec in matched if spec.floats and spec.count]):
                raise ValueError(f"{pattern!r} matches only {matched[0].name} of {matched[0].dtype}: no floats")
            found.update({spec.name: spec for spec in kept})
        return tuple(spec for spec in self.specs if spec.name in found)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def open_tensors(source: str | Path) -> Tensors:
    """`open_tensors("smollm2-135m")`: a checkpoint as `halfulp.open_checkpoint` takes it, a .safetensors file of
    whatever, an .npz or an .npy file.

    Only headers are read here, and rows of one tensor at a time later; an array of an .npz file is read whole.
    Raises ValueError and FileNotFoundError as `open_checkpoint`, and for arrays that only pickle can load.
    """
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".npy":
        return _open_npy(str(source), path)
    if path.is_file() and path.suffix == ".npz":
        return _open_npz(str(source), path)
    if path.is_file() and path.suffix == ".safetensors" and not (path.parent / "config.json").exists():
        entries = read_header(path)[0]
        return _from_torch(
            str(source),
            {name: entry.spec for name, entry in entries.items()},
            lambda name, rows: read_tensor(path, entries[name], rows),
        )
    checkpoint = open_checkpoint(source)
    return _from_torch(str(source), checkpoint.tensors, checkpoint.read, checkpoint.config)


def _from_torch(
    source: str, specs: Mapping[str, Any], read: Callable[[str, slice | None], Any], config: Any = None
) -> Tensors:
    def rows_of(name: str, rows: slice) -> Any:
        return read(name, rows) if specs[name].shape else read(name, None).reshape(1)

    found = tuple(
        Spec(name, spec.dtype, spec.shape or (1,), TORCH_DTYPES[spec.dtype].is_floating_point)
        for name, spec in specs.items()
    )
    return Tensors(source, found, rows_of, config)


def _open_npy(source: str, path: Path) -> Tensors:
    try:
        array = np.atleast_1d(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no array that can be read: {error}") from None
    return Tensors(source, (_array_spec(path.stem, array.dtype, array.shape),), lambda name, rows: array[rows])


def _open_npz(source: str, path: Path) -> Tensors:
    specs = []
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    version = np.lib.format.read_magic(member)
                    read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}[version[0]]
                    shape, _, dtype = read(member)
                specs.append(_array_spec(name.removesuffix(".npy"), dtype, shape))
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no npz file that can be read: {error}") from None
    last: dict[str, np.ndarray] = {}

    def read_rows(name: str, rows: slice) -> np.ndarray:
        if name not in last:
            last.clear()
            with np.load(path, allow_pickle=False) as arrays:
                last[name] = np.atleast_1d(arrays[name])
        return last[name][rows]

    return Tensors(source, tuple(specs), read_rows)


def _array_spec(name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Spec:
    if dtype.hasobject or dtype.kind == "V":
        raise ValueError(f"array {name!r} is of {dtype}, which numpy files cannot hold as numbers: save it as float32")
    return Spec(name, str(dtype), tuple(shape) or (1,), dtype.kind == "f")
