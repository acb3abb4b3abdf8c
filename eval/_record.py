"""The one JSON record that a run writes, and everything a report needs to be reproduced."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

VERSION: Literal[1] = 1
KEY = "halfulp_record"
_PACKAGES = ("halfulp", "torch", "numpy", "transformers", "safetensors", "compressed-tensors", "gguf", "jax")


def _utc(text: str) -> str:
    if datetime.fromisoformat(text).utcoffset() != timedelta(0):
        raise ValueError(f"expected an ISO time in UTC such as 2026-01-31T12:00:00Z, got {text!r}")
    return text


class _Frozen(BaseModel):
    # Infinity and NaN are honest results of a broken recipe. JSON has no such numbers, so they go as
    # the strings "Infinity" and "NaN", which pydantic reads back as floats.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class ModelId(_Frozen):
    """The uncompressed model that the recipe was applied to; `sha256` is of its weights, if known."""

    source: str
    sha256: str | None = None
    parameters: int


class RecipeId(_Frozen):
    """A recipe by name, hash and full text."""

    name: str
    sha256: str
    text: str


class Size(_Frozen):
    """What the model takes.

    `bytes_on_disk`: every file of the checkpoint's weights; of a GGUF file, what its weights take as read and
    scored. `weight_bytes`: all tensors in them.
    `bits_per_weight`: over the compressed tensors only, with scales, zero points and metadata; None where no
    tensor is compressed. `bits_per_parameter`: over the whole model.
    """

    bytes_on_disk: int
    weight_bytes: int
    quantized_parameters: int
    bits_per_weight: float | None
    bits_per_parameter: float


class TensorResult(_Frozen):
    """What was done to one tensor: `relative_error` is ||w - w'|| / ||w||; `action`: "keep", "int4:g128"."""

    name: str
    shape: list[int]
    action: str
    reason: str = ""
    bits_per_weight: float
    relative_error: float | None
    sqnr_db: float | None = None


class Estimate(_Frozen):
    """A mean and its standard error (None: not known)."""

    value: float
    se: float | None = None


class Accuracy(_Frozen):
    """Scores of one candidate on one text.

    `kl`: mean over tokens of KL(baseline || candidate), nats; `kl_p99`: its 99th percentile. `top1`: share of
    tokens with the same most likely next token, 0 to 1. `log_perplexity_ratio`: ln(perplexity / baseline's),
    its error that of the paired difference. All of these are None where nothing was scored as baseline.
    """

    text: str
    text_sha256: str
    tokens: int
    windows: int
    window: int
    stride: int
    bos: str
    perplexity: Estimate
    baseline_perplexity: Estimate | None = None
    log_perplexity_ratio: Estimate | None = None
    kl: Estimate | None = None
    top1: Estimate | None = None
    kl_p99: float | None = None


class Timing(_Frozen):
    """A median in seconds with its confidence interval, of `n` repeats; `why`: what makes it unstable."""

    median_s: float
    low_s: float
    high_s: float
    n: int
    confidence: float | None = None  # of low_s..high_s; few repeats reach less than 0.95
    unstable: bool = False
    why: str = ""


class Latency(_Frozen):
    """Measured time on one execution path.

    `path` names what really ran, such as "dequantized to float32, eager torch". `prefill`: seconds for the
    whole prompt of `prompt` tokens; `decode`: seconds per generated token, over `new` tokens.
    """

    path: str
    threads: int
    prompt: int
    new: int
    prefill: Timing
    decode: Timing


class Record(_Frozen):
    """One run: `Record(kind="score", name="out", ...)`; `recipe` is None for the uncompressed model."""

    halfulp_record: Literal[1] = VERSION
    kind: Literal["compress", "score"]
    name: str
    created: Annotated[str, AfterValidator(_utc)]
    command: list[str]
    versions: dict[str, str]
    machine: dict[str, str | int]
    seed: int
    model: ModelId
    recipe: RecipeId | None = None
    seconds: dict[str, float] = {}
    peak_rss_bytes: int | None = None
    size: Size | None = None
    baseline_size: Size | None = None
    tensors: list[TensorResult] = []
    accuracy: Accuracy | None = None
    latency: Latency | None = None
    baseline_latency: Latency | None = None
    notes: list[str] = []


def write_atomic(text: str, path: Path) -> None:
    """Write `text` so that `path` holds either its old content or all of the new, even after a power cut."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"expected the name of a file to write, got the folder {path}; add a file name")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_record(record: Record, path: Path) -> None:
    """`write_record(record, Path("out/halfulp.json"))`: JSON, atomically; creates the folder where needed."""
    write_atomic(record.model_dump_json(indent=2) + "\n", path)


def _where(error: ValidationError) -> str:
    first, more = error.errors()[0], error.error_count() - 1
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg'].lower()}" + (f" (and {more} more)" if more else "")


def _parse(path: Path, *, named: bool) -> Record | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"no file or folder {path}; give records (*.json) or folders of them") from None
    if KEY.encode() not in raw and not named:
        return None  # a config.json, a tokenizer.json: not worth parsing
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}); delete it or run again") from None
    if not isinstance(data, dict) or KEY not in data:
        if named:
            raise ValueError(f'{path} is not a halfulp record: it has no "{KEY}" key at its top')
        return None
    if data[KEY] != VERSION:
        raise ValueError(
            f"{path} is a record of version {data[KEY]!r}, and this halfulp reads version {VERSION}; "
            "use the halfulp that wrote it"
        )
    try:
        return Record.model_validate(data)
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid record: {_where(error)}") from None


def read_records(paths: Iterable[Path]) -> list[Record]:
    """`read_records([Path("runs/")])`: records from files, and from folders searched all the way down.

    In a folder, JSON files that are not records are passed over and hidden files are not read; a file named
    directly must be a record. Order: as given, and by path within a folder; a file given twice is read once.

    Raises ValueError for a malformed record (with the file and the field) or where there is none at all,
    FileNotFoundError for a path that does not exist.
    """
    given = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    found: dict[Path, Record | None] = {}
    for path in given:
        inside = path.is_dir()
        for file in sorted(path.rglob("*.json")) if inside else [path]:
            hidden = inside and any(part.startswith(".") for part in file.relative_to(path).parts)
            if not hidden and (file.is_file() or not inside) and file.resolve() not in found:
                found[file.resolve()] = _parse(file, named=not inside)
    records = [record for record in found.values() if record is not None]
    if not records:
        looked = ", ".join(map(str, given)) or "an empty list"
        raise ValueError(f"no halfulp record in {looked}; `halfulp compress` and `halfulp score` write them")
    return records


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def environment() -> tuple[dict[str, str], dict[str, str | int]]:
    """`versions, machine = environment()`: package versions and the machine, without host or user names."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that this run did without
    machine: dict[str, str | int] = {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }
    if hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
        machine["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return versions, machine


def peak_rss_bytes() -> int | None:
    """Return the most resident memory that this process has held, in bytes; None where nothing tells."""
    try:
        # VmHWM first: ru_maxrss on Linux also carries over the peak of the process that started this one
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
