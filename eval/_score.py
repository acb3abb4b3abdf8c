"""Score a candidate against its baseline: one record with accuracy, size and latency."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

from ..compress import Checkpoint, Text, load, manifest_of, open_checkpoint, short_name, text
from ..compress._adapter import base_of, is_adapter, read_adapter
from ..compress._tokens import tokens_of
from . import _accuracy, _latency
from ._record import (
    Accuracy,
    Estimate,
    Latency,
    ModelId,
    RecipeId,
    Record,
    Size,
    TensorResult,
    Timing,
    environment,
    peak_rss_bytes,
)
from ._windows import windows


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to score: the text cut in ``windows`` of ``window`` tokens (None: all of it), and what to time.

    ``text``: a source for `halfulp.text`. ``stride`` None makes disjoint windows. ``prompt`` and ``new`` are
    the tokens of the latency measurement, which ``latency=False`` leaves out.
    """

    text: str = "embedded"
    window: int = 512
    stride: int | None = None
    windows: int | None = 8
    latency: bool = True
    prompt: int = 128
    new: int = 8
    repeats: int = 7
    threads: int | None = None
    seed: int = 0


Stage = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Baseline:
    """A loaded baseline and its latency, to score any number of candidates against; see `load_baseline`."""

    checkpoint: Checkpoint
    model: Any
    latency: Latency | None


def load_baseline(source: str | Path, settings: Settings, stage: Stage | None = None) -> Baseline:
    """Load the uncompressed model and, if the settings say so, time it.

    >>> base = load_baseline("smollm2-135m", Settings())  # doctest: +SKIP
    """
    say = stage or _silent
    say("loading", 0, 1)
    checkpoint = open_checkpoint(source)
    model = load(checkpoint)
    say("timing", 0, 1)
    timed = _timed(model, settings) if settings.latency else None
    say("ready", 1, 1)
    return Baseline(checkpoint, model, timed)


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""


def score(
    candidate: str | Path,
    baseline: str | Path | Baseline | None = None,
    settings: Settings | None = None,
    *,
    command: Sequence[str] = (),
    stage: Stage | None = None,
) -> Record:
    """Perplexity, KL and top-1 agreement, size and latency of a model beside its baseline's.

    >>> record = score("out/", "smollm2-135m", Settings(window=1024, windows=16))  # doctest: +SKIP

    candidate: a checkpoint, compressed by halfulp or plain, or an adapter's folder, scored with the model that it is
    for. baseline: the uncompressed model, or what
    `load_baseline` made of it; None scores the candidate alone. Both run in float32; the record says which
    execution path that is. stage is called with
    (what is going on, steps done, steps in all).

    Raises ValueError for a text that is too short, models whose vocabularies differ, and what `load` refuses.
    """
    settings = settings or Settings()
    say = stage or _silent
    started = time.monotonic()
    seconds: dict[str, float] = {}

    def clock(part: str, since: float) -> float:
        seconds[part] = seconds.get(part, 0.0) + time.monotonic() - since
        return time.monotonic()

    adapter = candidate if is_adapter(candidate) else None
    checkpoint = open_checkpoint(candidate if adapter is None else base_of(adapter))
    if baseline is not None and not isinstance(baseline, Baseline):
        baseline = load_baseline(baseline, settings, stage)
    reference = baseline.checkpoint if baseline else None
    source = text(settings.text)
    ids, bos = tokens_of(reference or checkpoint, source.content)
    cut = windows(ids, window=settings.window, stride=settings.stride, count=settings.windows, bos=bos)
    say("loading", 0, 1)
    now = time.monotonic()
    model = load(checkpoint, adapter=adapter)
    now = clock("load", now)

    def step(done: int, total: int) -> None:
        say("scoring", done, total)

    if baseline is not None:
        result = _accuracy.compare(model, baseline.model, cut, progress=step)
    else:
        result = _accuracy.perplexity(model, cut, progress=step)
    now = clock("accuracy", now)
    latency = None
    if settings.latency:
        say("timing", 0, 1)
        latency = _timed(model, settings)
        say("timing", 1, 1)
        clock("latency", now)
    seconds["total"] = time.monotonic() - started
    manifest = manifest_of(checkpoint)
    versions, machine = environment()
    return Record(
        kind="score",
        name=Path(short_name(candidate)).name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=list(command),
        versions=versions,
        machine=machine,
        seed=settings.seed,
        model=model_id(checkpoint, manifest),
        recipe=recipe_id(manifest),
        seconds={part: round(value, 3) for part, value in seconds.items()},
        peak_rss_bytes=peak_rss_bytes(),
        size=size_of(checkpoint, manifest, adapter),
        baseline_size=size_of(reference, None) if reference is not None else None,
        tensors=tensor_results(manifest),
        accuracy=_accuracy_record(result, source, settings, bos),
        latency=latency,
        baseline_latency=baseline.latency if baseline else None,
        notes=[*(manifest["notes"] if manifest else []), *(packed_note(reference) if reference else [])],
    )


def _timed(model: Any, settings: Settings) -> Latency:
    timed = _latency.latency(
        model,
        model.config.vocab_size,
        prompt=settings.prompt,
        new=settings.new,
        repeats=settings.repeats,
        threads=settings.threads,
        seed=settings.seed,
    )
    return Latency(
        path=model.halfulp_path,
        threads=timed.threads,
        prompt=timed.prompt,
        new=timed.new,
        prefill=_timing(timed.prefill),
        decode=_timing(timed.decode),
    )


def _timing(timing: _latency.Timing) -> Timing:
    return Timing(**{key: getattr(timing, key) for key in Timing.model_fields})


def _estimate(estimate: _accuracy.Estimate | None) -> Estimate | None:
    return None if estimate is None else Estimate(value=estimate.value, se=estimate.se)


def _accuracy_record(result: _accuracy.Accuracy, source: Text, settings: Settings, bos: int | None) -> Accuracy:
    perplexity = _estimate(result.perplexity)
    assert perplexity is not None
    return Accuracy(
        text=source.source,
        text_sha256=source.sha256,
        tokens=result.tokens,
        windows=result.windows,
        window=settings.window,
        stride=settings.stride or settings.window - (bos is not None),
        bos="none added, the tokenizer adds none" if bos is None else f"id {bos} in every window",
        perplexity=perplexity,
        baseline_perplexity=_estimate(result.baseline_perplexity),
        log_perplexity_ratio=_estimate(result.log_ratio),
        kl=_estimate(result.kl),
        top1=_estimate(result.top1),
        kl_p99=result.kl_p99,
    )


def parameters_of(checkpoint: Checkpoint, manifest: dict[str, Any] | None) -> int:
    """Parameters of the uncompressed model."""
    if manifest is None:
        return sum(spec.numel for spec in checkpoint.tensors.values())
    return sum(prod(entry["shape"]) for entry in manifest["tensors"].values())


def model_id(checkpoint: Checkpoint, manifest: dict[str, Any] | None) -> ModelId:
    """The uncompressed model behind a checkpoint."""
    parameters = parameters_of(checkpoint, manifest)
    if manifest is None:
        return ModelId(source=checkpoint.source, parameters=parameters)
    return ModelId(source=manifest["source"]["name"], sha256=manifest["source"]["sha256"], parameters=parameters)


def recipe_id(manifest: dict[str, Any] | None) -> RecipeId | None:
    """The recipe that made a checkpoint."""
    recipe = (manifest or {}).get("recipe")
    return RecipeId(**recipe) if recipe else None


def size_of(checkpoint: Checkpoint, manifest: dict[str, Any] | None, adapter: str | Path | None = None) -> Size:
    """Bytes and bits of a checkpoint, scales and shapes counted, and those of an adapter with it.

    A file that is packed tighter than its tensors are read (GGUF) counts as what is read and scored.
    """
    added = 0 if adapter is None else sum(p.nbytes for p in read_adapter(adapter).parameters().values())
    weight_bytes = sum(spec.nbytes for spec in checkpoint.tensors.values()) + added
    entries = [e for e in (manifest or {"tensors": {}})["tensors"].values() if "format" in e]
    quantized = sum(prod(e["shape"]) for e in entries)
    bits = sum(e["bits_per_weight"] * prod(e["shape"]) for e in entries) + 8 * added
    return Size(
        bytes_on_disk=max(weight_bytes, _file_bytes(checkpoint) + added),
        weight_bytes=weight_bytes,
        quantized_parameters=quantized,
        bits_per_weight=bits / quantized if quantized else None,
        bits_per_parameter=8 * weight_bytes / parameters_of(checkpoint, manifest),
    )


def _file_bytes(checkpoint: Checkpoint) -> int:
    return sum(path.stat().st_size for path in checkpoint.weight_files)


def packed_note(checkpoint: Checkpoint) -> list[str]:
    """A remark on a baseline whose own file is smaller than the weights that are scored."""
    packed, read = _file_bytes(checkpoint), sum(spec.nbytes for spec in checkpoint.tensors.values())
    if packed >= read:
        return []
    return [
        f"the baseline's own file is quantized and takes {packed / 1e6:.1f} MB; its size here is that of the "
        f"weights as they are read and scored, {read / 1e6:.1f} MB"
    ]


def tensor_results(manifest: dict[str, Any] | None) -> list[TensorResult]:
    """What was done to each tensor, from the manifest."""
    results = []
    for name, entry in (manifest or {"tensors": {}})["tensors"].items():
        error = entry.get("relative_error")
        results.append(
            TensorResult(
                name=name,
                shape=entry["shape"],
                action=entry["action"],
                reason=entry.get("why", ""),
                bits_per_weight=entry["bits_per_weight"],
                relative_error=error,
                sqnr_db=-20 * math.log10(error) if error else None,
            )
        )
    return results
