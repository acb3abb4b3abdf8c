"""Read and write safetensors files in bounded memory.

The safetensors package maps a whole file, so its touched pages count as resident memory, and it saves
only from whole tensors held at once. Here a tensor is read into its own buffer, and a checkpoint is
written tensor by tensor at offsets fixed beforehand, so that a killed run goes on where it stopped.

Format: https://huggingface.co/docs/safetensors (8-byte little-endian header length, JSON, then the data).
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

JOURNAL = ".halfulp-journal.jsonl"
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the limit of the reference reader
_CHUNK = 1 << 22

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


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, its first bytes (length and JSON), and its tensors."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.spec.nbytes for entry in self.entries)


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
        if length > _MAX_HEADER:
            _damaged(path, f"its header has {length} bytes, more than the {_MAX_HEADER} allowed")
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
    _require_little_endian()
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


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise OSError("safetensors data is little-endian: use a little-endian machine")


def layout_shards(specs: Sequence[TensorSpec], max_bytes: int) -> list[Shard]:
    """`layout_shards(specs, 5 * 10**9)`: the files to write, each with at most `max_bytes` of tensor data.

    Tensors fill the shards in the order given; a larger one gets a shard of its own. Within a shard wide
    dtypes come first, so that each tensor is aligned to its element although the format allows no holes.
    Raises ValueError on a name given twice.
    """
    if max_bytes < 1:
        raise ValueError(f"the shard size is {max_bytes} bytes: it must be at least 1")
    seen: set[str] = set()
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if spec.name in seen or spec.name == "__metadata__":
            raise ValueError(f"the tensor name {spec.name!r} is given twice or reserved: rename one")
        seen.add(spec.name)
        if groups[-1] and used + spec.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(spec)
        used += spec.nbytes
    total = len(groups)
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    if total == 1:
        names = ["model.safetensors"]
    return [_shard(name, group) for name, group in zip(names, groups)]


def _shard(name: str, specs: list[TensorSpec]) -> Shard:
    specs = sorted(specs, key=lambda spec: -TORCH_DTYPES[spec.dtype].itemsize)
    begins, end = [], 0
    # Readers such as transformers refuse a file without "format".
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec in specs:
        begins.append(end)
        end += spec.nbytes
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begins[-1], end],
        }
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > _MAX_HEADER:
        raise ValueError(f"{name} would need a header of {len(raw)} bytes: give a smaller shard size")
    first = 8 + len(raw)
    entries = tuple(Entry(spec, first + begin) for spec, begin in zip(specs, begins))
    return Shard(name, len(raw).to_bytes(8, "little") + raw, entries)


def require_space(directory: str | Path, nbytes: int) -> None:
    """`require_space("out", 10**9)` raises OSError when the disk of `directory` has fewer bytes free."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise OSError(
            errno.ENOSPC,
            f"{directory} needs {nbytes} bytes and its disk has {free}: free some space or pass another -o",
        )


class StreamWriter:
    """Write a checkpoint group by group, resumable.

    >>> writer = StreamWriter(Path("out.partial"), specs, 5 * 10**9, fingerprint)     # doctest: +SKIP
    >>> for key, names in groups.items():                                             # doctest: +SKIP
    ...     if key not in writer.done:
    ...         writer.write(key, {name: tensor(name) for name in names}, note={"seconds": 1.5})
    >>> writer.finish()                                                               # doctest: +SKIP

    A journal in the directory records each group after its bytes: names, the note, and a SHA-256. Opening
    the directory again with the same fingerprint and specs re-hashes the groups, keeps those before the first
    that differs (their notes are in `done`), and leaves the rest to be written again. A directory with shards
    and no journal is a finished one and is refused. No fsync per group: after a power cut the hash tells.

    Raises ValueError for another run's directory, a name, dtype or shape that was not announced, and OSError
    with the bytes needed when the disk is full; the directory stays resumable.
    """

    def __init__(self, directory: str | Path, specs: Sequence[TensorSpec], shard_bytes: int, fingerprint: str) -> None:
        _require_little_endian()
        self.directory = Path(directory)
        self.done: dict[str, Any] = {}
        self._shards = layout_shards(specs, shard_bytes)
        self._places = {e.spec.name: (self.directory / s.name, e) for s in self._shards for e in s.entries}
        self._written: set[str] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        layout = hashlib.sha256()
        for shard in self._shards:
            layout.update(shard.name.encode() + shard.header)
        journal = os.open(self.directory / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        self._journal: int | None = journal
        self._close = weakref.finalize(self, os.close, journal)
        try:
            self._lock(journal)
            self._resume(journal, {"halfulp_journal": 1, "fingerprint": fingerprint, "layout": layout.hexdigest()})
        except BaseException:
            self.close()
            raise

    @property
    def remaining(self) -> int:
        """Bytes of the tensors not yet written."""
        return sum(e.spec.nbytes for name, (_, e) in self._places.items() if name not in self._written)

    def write(self, key: str, tensors: Mapping[str, torch.Tensor | Iterable[Any]], note: Mapping[str, Any]) -> None:
        """`writer.write("layer 0", {"w": tensor, "big": chunks}, {"error": 0.1})`.

        A value is a tensor, or an iterable of bytes-like objects (or tensors) that together are its bytes.
        """
        journal = self._check_group(key, tensors)
        try:
            note = json.loads(json.dumps(note))  # what a resumed run will see
        except (TypeError, ValueError) as error:
            raise ValueError(f"the note of group {key!r} cannot be written as JSON: {error}") from None
        digest = _digest(key, list(tensors), note)
        for name, value in tensors.items():
            self._write_tensor(name, value, digest)
        record = {"key": key, "names": list(tensors), "note": note, "sha256": digest.hexdigest()}
        line = json.dumps(record).encode() + b"\n"
        try:
            self._put(journal, memoryview(line), self._end, JOURNAL)
        except OSError:
            os.ftruncate(journal, self._end)
            raise
        self._end += len(line)
        self._written.update(tensors)
        self.done[key] = note

    def finish(self) -> None:
        """Check that every tensor was written, write the index, sync to disk, and remove the journal."""
        missing = [name for name in self._places if name not in self._written]
        if missing:
            count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
            raise ValueError(f"{count} not written yet: {some_names(missing)}; write them, then finish")
        if self._journal is None:
            raise ValueError(f"{self.directory} is finished already")
        files = [self.directory / shard.name for shard in self._shards]
        if len(files) > 1:
            files.append(self.directory / INDEX)
            weight_map = {name: path.name for name, (path, _) in sorted(self._places.items())}
            total = sum(entry.spec.nbytes for _, entry in self._places.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
            fd = os.open(files[-1], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self._put(fd, memoryview(text), 0, INDEX)
            finally:
                os.close(fd)
        for path in files:
            _fsync(path)
        _fsync(self.directory)
        (self.directory / JOURNAL).unlink()
        _fsync(self.directory)
        self.close()

    def close(self) -> None:
        """Let go of the directory without finishing it; a new writer can go on."""
        self._journal = None
        self._close()

    def _lock(self, journal: int) -> None:
        import fcntl  # POSIX only, like os.pwrite

        try:
            # A POSIX lock belongs to the process: a second writer of this process is let in, so that a caller
            # may catch an error and go on. It goes when any descriptor of the file is closed.
            fcntl.lockf(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"another process is writing in {self.directory}: wait for it, or pass another -o"
                ) from None
            # else a file system without locks, such as some NFS: go on without

    def _resume(self, journal: int, first: dict[str, Any]) -> None:
        raw = os.pread(journal, os.fstat(journal).st_size, 0)
        lines = raw.split(b"\n")[:-1]  # what follows the last newline is torn, or nothing
        if not lines:
            if found := sorted(path.name for path in self.directory.glob("*.safetensors")):
                (self.directory / JOURNAL).unlink()
                raise ValueError(
                    f"{self.directory} holds {some_names(found)} and no journal of an unfinished run: "
                    "delete it or pass another -o"
                )
            lines = [json.dumps(first).encode()]
            os.ftruncate(journal, 0)
            self._put(journal, memoryview(lines[0] + b"\n"), 0, JOURNAL)
        if _json_line(lines[0]) != first:
            raise ValueError(
                f"the partial directory {self.directory} belongs to another run "
                "(other source, recipe or version): delete it or pass another -o"
            )
        for shard in self._shards:
            self._prepare(shard)
        self._end = len(lines[0]) + 1
        for line in lines[1:]:
            record = _json_line(line)
            if not self._verify(record):
                break
            self._end += len(line) + 1
            self._written.update(record["names"])
            self.done[record["key"]] = record["note"]
        os.ftruncate(journal, self._end)

    def _prepare(self, shard: Shard) -> None:
        fd = os.open(self.directory / shard.name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if os.fstat(fd).st_size != shard.nbytes:
                os.ftruncate(fd, shard.nbytes)
            self._put(fd, memoryview(shard.header), 0, shard.name)
        finally:
            os.close(fd)

    def _verify(self, record: Any) -> bool:
        """Whether a journal line is whole and the bytes on disk are those it recorded."""
        if not isinstance(record, dict) or record.keys() != {"key", "names", "note", "sha256"}:
            return False
        names = record["names"]
        if not set(names) <= self._places.keys() - self._written:
            return False
        digest = _digest(record["key"], names, record["note"])
        buffer = memoryview(bytearray(_CHUNK))
        for path, entry in (self._places[name] for name in names):
            with path.open("rb", buffering=0) as file:
                file.seek(entry.offset)
                for start in range(0, entry.spec.nbytes, _CHUNK):
                    view = buffer[: min(_CHUNK, entry.spec.nbytes - start)]
                    read_into(file, view, str(path))
                    digest.update(view)
        return digest.hexdigest() == record["sha256"]

    def _check_group(self, key: str, tensors: Mapping[str, Any]) -> int:
        if self._journal is None:
            raise ValueError(f"{self.directory} is finished or closed: group {key!r} cannot be written")
        if key in self.done:
            raise ValueError(f"group {key!r} is written already: skip the keys in .done")
        for name, value in tensors.items():
            if name not in self._places:
                near = get_close_matches(name, self._places)
                raise ValueError(f"tensor {name!r} was not announced; near names: {near or 'none'}")
            if name in self._written:
                raise ValueError(f"tensor {name!r} was written by another group")
            spec = self._places[name][1].spec
            if isinstance(value, torch.Tensor) and (
                value.dtype != TORCH_DTYPES[spec.dtype] or tuple(value.shape) != spec.shape
            ):
                raise ValueError(
                    f"tensor {name!r} is {value.dtype} {list(value.shape)}, and was announced as "
                    f"{spec.dtype} {list(spec.shape)}"
                )
        return self._journal

    def _write_tensor(self, name: str, value: Any, digest: Any) -> None:
        path, entry = self._places[name]
        done, nbytes = 0, entry.spec.nbytes
        fd = os.open(path, os.O_RDWR)
        try:
            for view in _byte_views(name, value):
                if done + len(view) <= nbytes:
                    self._put(fd, view, entry.offset + done, path.name)
                    digest.update(view)
                done += len(view)
        finally:
            os.close(fd)
        if done != nbytes:
            raise ValueError(f"tensor {name!r} was announced with {nbytes} bytes, and {done} were given")

    def _put(self, fd: int, view: memoryview, offset: int, what: str) -> None:
        try:
            while view:
                count = os.pwrite(fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OSError(
                error.errno,
                f"the disk of {self.directory / what} is full and {self.remaining} bytes are still to be "
                "written: free that much, then run the same command again to go on from here",
            ) from error


def _byte_views(name: str, value: Any) -> Iterator[memoryview]:
    """The bytes of a tensor, a bytes-like, or an iterable of either, in flat views without a large copy."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_views(name, value.detach().resolve_conj().resolve_neg())
    elif isinstance(value, bytes | bytearray | memoryview):
        view = memoryview(value)
        if view.nbytes:  # a view with a zero in its shape cannot be cast
            yield view.cast("B")
    else:
        for part in value:
            yield from _byte_views(name, part if isinstance(part, torch.Tensor) else memoryview(part))


def _tensor_views(name: str, tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ValueError(f"tensor {name!r} is {tensor.layout} on {tensor.device}: give a dense one with data")
    size = tensor.numel() * tensor.element_size()
    if size <= _CHUNK or (tensor.is_contiguous() and tensor.device.type == "cpu"):
        flat = tensor.contiguous().cpu().reshape(-1)
        if size:
            data = flat.view(torch.uint8).numpy().data
            for start in range(0, size, _CHUNK):
                yield data[start : start + _CHUNK]
        return
    # Not contiguous, or on a device: copied a few rows at a time, never whole.
    for part in tensor.split(max(1, _CHUNK * len(tensor) // size)):
        yield from _tensor_views(name, part if len(tensor) > 1 else part[0])


def _digest(key: str, names: list[str], note: Any) -> Any:
    """The hash of a group before its bytes: it covers the journal line too, so that damaged notes show."""
    return hashlib.sha256(json.dumps([key, names, note]).encode())


def _json_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def some_names(names: list[str]) -> str:
    """The first five, and how many more, for an error message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
