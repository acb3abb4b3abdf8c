"""Write safetensors checkpoints in bounded memory, resumable.

The safetensors package saves only from whole tensors held at once. Here a checkpoint is written tensor by
tensor at offsets fixed beforehand, so that a killed run goes on where it stopped.
"""

import errno
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from ._safetensors import (
    INDEX,
    JOURNAL,
    MAX_HEADER,
    TORCH_DTYPES,
    Entry,
    TensorSpec,
    read_into,
    read_tensor,
    require_little_endian,
    some_names,
)

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Shard:
    """One file to be written: its name, its first bytes (length and JSON), and its tensors."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.spec.nbytes for entry in self.entries)


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
    if len(raw) > MAX_HEADER:
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
        require_little_endian()
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

    def read(self, name: str) -> torch.Tensor:
        """A tensor that is written already."""
        if name not in self._written:
            raise ValueError(f"tensor {name!r} is not written yet")
        return read_tensor(*self._places[name])

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
            fsync_path(path)
        fsync_path(self.directory)
        (self.directory / JOURNAL).unlink()
        fsync_path(self.directory)
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


def fsync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
