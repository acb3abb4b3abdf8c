"""Read safetensors files in bounded memory; `_stream` writes them.

The safetensors package maps a whole file, so its touched pages count as resident memory. Here a tensor is
read into its own buffer.

Format (the safetensors README): 8-byte little-endian header length, JSON, then the data.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

JOURNAL = ".halfulp-journal.jsonl"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the limit of the reference reader

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
# float8_e8m0fnu came with torch 2.7, hence hasattr.
TORCH_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _TORCH_NAMES.items() if hasattr(torch, name)
}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, safetensors dtype code and shape: `TensorSpec("w", "BF16", (2, 3)).nbytes == 12`.

    Raises ValueError on a dtype without a torch counterpart of whole bytes, and on a negative dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in TORCH_DTYPES:
            kind = "sub-byte dtype" if self.dtype in _SUB_BYTE else "dtype"
            raise ValueError(
                f"tensor {self.name!r} has the unsupported {kind} {self.dtype!r}: "
                f"store it as one of {', '.join(TORCH_DTYPES)}"
            )
        if not all(type(size) is int and size >= 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has the shape {self.shape}: sizes must be integers >= 0")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: its spec, and the offset of its first byte from the start of the file."""

    spec: TensorSpec
    offset: int


def read_header(path: str | Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """`entries, metadata = read_header("model.safetensors")`, entries by name in the order of their bytes.

    Raises ValueError, naming the file, for whatever is malformed, and FileNotFoundError.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            _damaged(path, f"it has {size} bytes, and a safetensors file has at least 8")
        length = int.from_bytes(start, "little")
        if length > MAX_HEADER:
            _damaged(path, f"its header has {length} bytes, more than the {MAX_HEADER} allowed")
        if 8 + length > size:
            _damaged(path, f"its header ends at byte {8 + length}, but the file has {size} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"its header is not valid JSON ({error})")
    if not isinstance(header, dict):
        _damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(path, "its __metadata__ does not map strings to strings")
    spans = [_parse_entry(path, name, item) for name, item in header.items()]
    spans.sort(key=lambda span: span[1:])
    end = 0
    for spec, begin, stop in spans:
        if begin != end:
            what = "overlaps the tensor before it" if begin < end else "leaves a hole before it"
            _damaged(path, f"tensor {spec.name!r} starts at {begin}, not {end}, and so {what}")
        end = stop
    if 8 + length + end != size:
        _damaged(path, f"by its header it has {8 + length + end} bytes, but the file has {size}")
    return {spec.name: Entry(spec, 8 + length + begin) for spec, begin, _ in spans}, metadata


def _parse_entry(path: Path, name: str, item: Any) -> tuple[TensorSpec, int, int]:
    """The spec with its first and last byte, relative to the end of the header."""
    try:
        dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
    except (TypeError, KeyError, ValueError):
        _damaged(path, f"tensor {name!r} lacks dtype, shape or two data_offsets")
    if not (isinstance(dtype, str) and isinstance(shape, list) and type(begin) is type(end) is int):
        _damaged(path, f"tensor {name!r} has a dtype, shape or data_offsets of the wrong kind")
    try:
        spec = TensorSpec(name, dtype, tuple(shape))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not 0 <= begin <= end or end - begin != spec.nbytes:
        what = f"is {dtype} {shape}, {spec.nbytes} bytes, but lies at {begin} to {end}"
        _damaged(path, f"tensor {name!r} {what}")
    return spec, begin, end


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {name!r} appears twice")
    return result


def _damaged(path: Path, what: str) -> NoReturn:
    raise ValueError(f"{path} is not a whole safetensors file: {what}. Download or write the file again")


def read_tensor(path: str | Path, entry: Entry, rows: slice | None = None) -> torch.Tensor:
    """`read_tensor(path, entries["w"], slice(0, 4))`: the tensor, or those rows of its first dimension.

    Bit-exact, in a fresh buffer of just that size. Raises ValueError when the file has become shorter, or
    when `rows` is given for a tensor without dimensions or has a step.
    """
    require_little_endian()
    spec, offset, shape = entry.spec, entry.offset, entry.spec.shape
    if rows is not None:
        first, count = row_span(spec, rows)
        offset += first * (spec.nbytes // shape[0] if shape[0] else 0)
        shape = (count, *shape[1:])
    dtype = TORCH_DTYPES[spec.dtype]
    buffer = torch.empty(prod(shape) * dtype.itemsize, dtype=torch.uint8)
    with Path(path).open("rb", buffering=0) as file:
        file.seek(offset)
        read_into(file, buffer.numpy().data, f"{path}: tensor {spec.name!r}")
    return buffer.view(dtype).reshape(shape)


def row_span(spec: TensorSpec, rows: slice) -> tuple[int, int]:
    """First row and number of rows that a slice without step takes of the tensor."""
    if not spec.shape:
        raise ValueError(f"tensor {spec.name!r} has no dimensions: read it without rows")
    first, stop, step = rows.indices(spec.shape[0])
    if step != 1:
        raise ValueError(f"tensor {spec.name!r}: rows {rows} have a step; read a span of rows and index that")
    return first, max(0, stop - first)


def read_into(file: Any, view: memoryview, what: str) -> None:
    """Fill the view from an unbuffered file, or raise ValueError."""
    done = 0
    while done < len(view):  # one call reads at most 2 GiB
        count = file.readinto(view[done:])
        if not count:
            raise ValueError(f"{what}: the file ends {len(view) - done} bytes early: get it again")
        done += count


def require_little_endian() -> None:
    if sys.byteorder != "little":
        raise OSError("safetensors data is little-endian: use a little-endian machine")


def some_names(names: list[str]) -> str:
    """The first five, and how many more, for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
