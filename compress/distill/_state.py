"""Checkpoints of a training run that a kill cannot tear, and from which it goes on bit for bit.

A run's directory holds ``run.json`` (what makes it this run), ``step-N/`` (the newest state: weights.safetensors,
optimizer.safetensors, state.json) and ``history.jsonl``, a line for each step.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .._stream import fsync_path

Tensor = torch.Tensor
RUN, HISTORY, LOCK = "run.json", "history.jsonl", ".lock"
_PARTIAL = ".partial"


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes and bits.

    >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.zeros(2)}) != fingerprint({"w": torch.ones(2)})
    True
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def claimed(folder: Path, facts: Mapping[str, Any]) -> Iterator[None]:
    """Hold a run's directory, made for these facts or found with them.

    Raises ValueError for a directory of something else, another run's (with what differs), or one that another
    process trains in.
    """
    facts = json.loads(json.dumps(facts))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: pass another directory")
    if (
        folder.is_dir()
        and not (folder / RUN).exists()
        and any(p.name not in (LOCK, RUN + _PARTIAL) for p in folder.iterdir())
    ):
        raise ValueError(f"{folder} holds something else than a training run: pass another directory, or empty it")
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not (folder / RUN).exists():
            _write(folder / RUN, json.dumps(facts, indent=2))
        found = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if found != facts:
            different = [key for key in {**found, **facts} if found.get(key) != facts.get(key)]
            told = "; ".join(f"{key} {_short(found.get(key))} there, {_short(facts.get(key))} now" for key in different)
            raise ValueError(f"{folder} belongs to another run ({told}): pass another directory, or delete it")
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # POSIX only, as the lock of the checkpoint writer

    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ValueError(
                    f"another process trains in {folder}: wait for it, or pass another directory"
                ) from None
            # else a file system without locks: go on without
        yield
    finally:
        os.close(lock)


def save(folder: Path, step: int, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, rng: Tensor) -> None:
    """Write a state beside the last one, sync it, rename it, and only then remove the older ones."""
    partial = folder / f"step-{step:08d}{_PARTIAL}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    tensors, numbers = _optimizer_state(weights, optimizer)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, partial / "weights.safetensors"
    )
    save_file(tensors | {"rng": rng}, partial / "optimizer.safetensors")
    state = {"step": step, "optimizer": numbers, "torch": torch.__version__}
    (partial / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
    for path in partial.iterdir():
        fsync_path(path)
    fsync_path(partial)
    place = folder / f"step-{step:08d}"
    os.rename(partial, place)
    fsync_path(folder)
    for old in _steps(folder):
        if old != place:
            shutil.rmtree(old)


def restore(folder: Path, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> tuple[int, Tensor | None]:
    """Put the newest state back in place; the number of steps done (0 without a state), and the random state."""
    for torn in folder.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(torn)
    steps = _steps(folder)
    if not steps:
        return 0, None
    place = steps[-1]
    state = json.loads((place / "state.json").read_text(encoding="utf-8"))
    stored = load_file(place / "weights.safetensors")
    if stored.keys() != weights.keys():
        raise ValueError(f"{place} holds other weights than are trained: delete it, or pass another directory")
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(stored[name])
    tensors = load_file(place / "optimizer.safetensors")
    rng = tensors.pop("rng")
    for name, parameter in weights.items():
        entries: dict[str, Any] = dict(state["optimizer"].get(name, {}))
        for key, tensor in tensors.items():
            entry, _, owner = key.partition("/")
            if owner == name:
                # a count of steps stays on the CPU, as optimizers keep it
                entries[entry] = tensor.to(parameter.device) if tensor.ndim else tensor
        if entries:
            optimizer.state[parameter] = entries
    return int(state["step"]), rng


def _optimizer_state(
    weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in weights.items():
        entries = optimizer.state.get(parameter, {})
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
            elif value is None or isinstance(value, int | float | bool | str):
                numbers.setdefault(name, {})[key] = value
            else:
                raise ValueError(
                    f"the optimizer keeps {key} of {name} as {type(value).__name__}, which is neither a tensor nor a "
                    "number and cannot be saved: train without out, or with another optimizer"
                )
    return tensors, numbers


def history(folder: Path, upto: int) -> list[dict[str, Any]]:
    """The lines of the history up to a step; those after it, and a torn one, are removed from the file."""
    path = folder / HISTORY
    kept = []
    if path.exists():
        for line in path.read_bytes().split(b"\n")[:-1]:
            try:
                record = json.loads(line)
            except ValueError:
                break
            if record["step"] > upto:
                break
            kept.append(record)
    _write(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def note(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a line to the history."""
    with open(folder / HISTORY, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _steps(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.is_dir() and not p.name.endswith(_PARTIAL))


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + _PARTIAL)
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    fsync_path(path.parent)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
