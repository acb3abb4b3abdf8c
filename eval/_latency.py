"""How long a step takes, measured: warm, waited for, and marked where the noise is too large to trust."""

from __future__ import annotations

import inspect
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ._accuracy import check_model
from ._record import environment
from ._windows import whole

NOISE = 0.10  # interquartile range / median above it: unstable
DRIFT = 0.10  # change of the median from the first half to the second / median above it: unstable
CROWD = 0.10  # share of the asked-for cores that other processes took: unstable
SHORTEST_WATCH = 0.2  # seconds; the machine counts CPU time in steps of 0.01
MOST_SECONDS = 20.0  # for the prefill, and as much again for the decoding; a slow model gets fewer repeats
FEWEST = 3  # fewer repeats say nothing about noise
SETTLED = 0.05  # warm once the last SETTLED_CALLS warm-up calls lie within this share of the shortest
SETTLED_CALLS = 3
MOST = 10_000  # timed calls, whatever `min_seconds` asks for
CONFIDENCE = 0.95
# what versions and families of transformers call the cache, in the output and as an argument alike
CACHES = ("cache", "past_key_values", "cache_params")

DEFINITIONS = (
    "Batch of 1. Prefill: seconds of one forward of {prompt} random token ids that fills the cache and gives "
    "the logits of the next token: the time to first token, without tokenizing and sampling. Decode: seconds "
    "per token, the mean over {new} forwards of one token each on a cache that starts with {prompt} tokens; "
    "every repeat starts from a cache of that length. Each time ends when the result is there. Median over "
    "repeats after warm-up, with the interval between two order statistics that holds the true median at the "
    "confidence stated."
)


@dataclass(frozen=True)
class Timing:
    """Seconds of one step over `n` timed calls, after `warmup` others, of which the first is timed apart.

    low_s, high_s: interval for the median from order statistics, which assumes independent calls and nothing
    else; `confidence` is its exact coverage: at least 0.95 where n >= 6, and less where n is smaller.
    q1_s, q3_s: quartiles. first_s: the very first call, with whatever it compiled or allocated.
    unstable: the noise or the drift is larger than `NOISE` or `DRIFT`, or n < `FEWEST`; from `latency` on
    Linux also that other processes took more than `CROWD` of the cores. `why` says which.
    """

    median_s: float
    low_s: float
    high_s: float
    confidence: float
    min_s: float
    q1_s: float
    q3_s: float
    first_s: float
    n: int
    warmup: int
    unstable: bool
    why: str
    samples_s: tuple[float, ...]


@dataclass(frozen=True)
class Latency:
    """Measured time of a causal language model; `definitions` says what `prefill` and `decode` are."""

    prefill: Timing
    decode: Timing
    prompt: int
    new: int
    threads: int
    dtype: str
    machine: str
    definitions: str


def measure(
    step: Callable[[], object],
    *,
    warmup: int = 10,
    repeats: int = 20,
    min_seconds: float = 0.5,
    most_seconds: float = math.inf,
    prepare: Callable[[], object] | None = None,
    per: int = 1,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Timing:
    """Time a step: `measure(lambda: model(ids)).median_s`.

    The first call is timed apart. Warm-up goes on until the last three calls after it agree within 5 %, or
    to `warmup` calls in all. Then come `repeats` timed calls, and more until they add up to `min_seconds`
    (10,000 at most). Once all calls together took `most_seconds`, warm-up ends and so do the repeats, from the
    third on. A result of torch on a GPU or of jax is waited for.
    prepare: called before each call, outside the time. per: units of work in a step, by which its time is
    divided. clock: nanoseconds, an int.

    Raises ValueError for warmup, repeats or per < 1, or a negative min_seconds.
    """
    for name, value, least in (("warmup", warmup, 1), ("repeats", repeats, 1), ("per", per, 1)):
        whole(name, value, least)
    if not 0 <= min_seconds < math.inf:
        raise ValueError(f"min_seconds={min_seconds!r}: expected a number of seconds >= 0")

    def once() -> int:
        if prepare is not None:
            wait(prepare())
        start = clock()
        wait(step())
        return clock() - start

    warm = [once()]
    timed: list[int] = []

    def late() -> bool:
        return sum(warm) + sum(timed) >= most_seconds * 1e9

    # the first call compiles: it settles nothing
    while len(warm) < warmup and not _settled(warm[1:]) and not late():
        warm.append(once())
    while len(timed) < repeats or (sum(timed) < min_seconds * 1e9 and len(timed) < max(MOST, repeats)):
        if late() and len(timed) >= FEWEST:
            break
        timed.append(once())
    return _timing([ns / per / 1e9 for ns in timed], warm[0] / per / 1e9, len(warm))


def _settled(ns: Sequence[int]) -> bool:
    last = ns[-SETTLED_CALLS:]
    return len(last) == SETTLED_CALLS and max(last) - min(last) <= SETTLED * min(last)


def _timing(samples: Sequence[float], first: float, warmup: int) -> Timing:
    n, ordered = len(samples), sorted(samples)
    rank, confidence = median_ranks(n)
    q1, median, q3 = statistics.quantiles(ordered, n=4, method="inclusive") if n > 1 else ordered * 3
    why = _why(samples, q1, median, q3)
    return Timing(
        median_s=median,
        low_s=ordered[rank],
        high_s=ordered[n - 1 - rank],
        confidence=confidence,
        min_s=ordered[0],
        q1_s=q1,
        q3_s=q3,
        first_s=first,
        n=n,
        warmup=warmup,
        unstable=bool(why),
        why=why,
        samples_s=tuple(samples),
    )


def _why(samples: Sequence[float], q1: float, median: float, q3: float) -> str:
    n = len(samples)
    if n < FEWEST:
        return f"{n} repeats cannot show noise: at least {FEWEST} are needed"
    if median <= 0:
        return "the step is shorter than the clock can tell"
    reasons = []
    if (noise := (q3 - q1) / median) > NOISE:
        reasons.append(f"interquartile range is {noise:.0%} of the median (limit {NOISE:.0%})")
    before, after = statistics.median(samples[: n // 2]), statistics.median(samples[-(n // 2) :])
    if abs(drift := (after - before) / median) > DRIFT:
        reasons.append(f"from first to second half the median moved by {drift:+.0%} (limit {DRIFT:.0%})")
    return "; ".join(reasons)


def median_ranks(n: int) -> tuple[int, float]:
    """`median_ranks(6)` is (0, 0.96875): the interval x[k], x[n - 1 - k] of sorted samples holds the median.

    k is the largest for which the coverage 1 - 2 P(Binomial(n, 1/2) <= k), computed in integers, is at least
    0.95, or 0 where none is.
    """
    below, count, rank, coverage = 0, 1, 0, 0.0
    for k in range((n + 1) // 2):  # count is C(n, k), an exact integer
        below += count
        inside = (2**n - 2 * below) / 2**n
        if k and inside < CONFIDENCE:
            break
        rank, coverage = k, inside
        count = count * (n - k) // (k + 1)
    return rank, coverage


def wait(result: object) -> None:
    """Return when `result`, or whatever is inside it, has been computed."""
    if isinstance(result, torch.Tensor):
        if result.is_cuda:
            torch.cuda.synchronize(result.device)
    elif hasattr(result, "block_until_ready"):
        result.block_until_ready()
    elif isinstance(result, Mapping):
        wait(tuple(result.values()))
    elif isinstance(result, (tuple, list)):
        for part in result:
            wait(part)


def latency(
    model: torch.nn.Module,
    vocab_size: int,
    *,
    prompt: int = 512,
    new: int = 32,
    repeats: int = 5,
    threads: int | None = None,
    seed: int = 0,
) -> Latency:
    """Time to first token and time per token: `latency(model, model.config.vocab_size).decode.median_s`.

    model: called as the causal models of transformers are, `model(ids [1, T], use_cache=True, cache=...)`;
    returns `.logits` and `.cache` (or `past_key_values`, under which name it is then passed back); in
    evaluation mode. Where its forward knows `logits_to_keep`, the prefill computes the last position's logits
    only, as generation does.
    threads: of torch on the CPU, set while measuring and put back after; None leaves them.
    Raises ValueError for counts below 1, a model in training mode or without a cache, or more tokens than
    the model has positions.
    """
    counts = {"vocab_size": vocab_size, "prompt": prompt, "new": new, "repeats": repeats}
    for name, value in counts.items():
        whole(name, value, 1)
    if threads is not None:
        whole("threads", threads, 1)
    check_model("the model", model, prompt + new, vocab_size - 1)
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (1, prompt + new), generator=generator).to(device)
    steps = _Steps(model, ids[:, :prompt], ids[:, prompt:].split(1, dim=1))
    with torch.inference_mode(), _threads(threads) as used:
        budget: dict[str, Any] = {"warmup": 5, "repeats": repeats, "min_seconds": 0, "most_seconds": MOST_SECONDS}
        busy = used if device.type == "cpu" else 1  # a GPU is fed by one thread
        prefill = _watched(lambda: measure(steps.prefill, **budget), busy)
        decode = _watched(lambda: measure(steps.decode, prepare=steps.restore, per=new, **budget), busy)
    return Latency(
        prefill=prefill,
        decode=decode,
        prompt=prompt,
        new=new,
        threads=used,
        dtype=_dtype(list(model.parameters()) or tensors),
        machine=_machine(device),
        definitions=DEFINITIONS.format(prompt=prompt, new=new),
    )


class _Steps:
    """The two things that are timed, and the cache that goes from one to the other."""

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        self.model, self.ids, self.new = model, ids, new
        self.cache: Any = None
        self.cache_name = ""
        known = inspect.signature(model.forward).parameters
        self.last_only: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def prefill(self) -> torch.Tensor:
        out = self.model(self.ids, use_cache=True, **self.last_only)
        self.cache_name = next((name for name in CACHES if getattr(out, name, None) is not None), "")
        if not self.cache_name:
            raise ValueError(
                f"the model returned none of {', '.join(CACHES)} with use_cache=True, and without a cache "
                "there is no time per token; give a causal language model with a cache"
            )
        self.cache = getattr(out, self.cache_name)
        return out.logits

    def decode(self) -> torch.Tensor:
        for token in self.new:
            out = self.model(token, use_cache=True, **{self.cache_name: self.cache})
            self.cache = getattr(out, self.cache_name)
        return out.logits

    def restore(self) -> torch.Tensor | None:
        """Bring the cache back to the prompt's length: cut where it can be, else filled again."""
        prompt = self.ids.shape[1]
        try:
            if (extra := self.cache.get_seq_length() - prompt) > 0:
                self.cache.crop(-extra)  # a negative length, "tokens to remove", is what every version takes
            if self.cache.get_seq_length() == prompt:
                return None
        # no such method, a window of attention that has moved on, a state that cannot be undone
        except (AttributeError, RuntimeError, ValueError):
            pass
        return self.prefill()


@contextmanager
def _threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _cpu_seconds() -> tuple[float, float, float] | None:
    """Seconds so far: on the clock, of CPU by the whole machine, and by this process; None off Linux."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    idle, waiting = ticks[3:5]
    busy = (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, time.process_time()


def _watched(timed: Callable[[], Timing], threads: int) -> Timing:
    """Mark a timing during which others held the cores: such times can be steady, and ten times too long."""
    before, timing, after = _cpu_seconds(), timed(), _cpu_seconds()
    if before is None or after is None:
        return timing
    wall, machine, own = (b - a for a, b in zip(before, after))
    why = _crowded((machine - own) / wall, threads, os.cpu_count() or 1) if wall > SHORTEST_WATCH else ""
    return replace(timing, unstable=True, why="; ".join(filter(None, (timing.why, why)))) if why else timing


def _crowded(others: float, threads: int, cores: int) -> str:
    if others - (cores - threads) <= CROWD * threads:
        return ""
    return f"other processes kept {others:.1f} of {cores} cores busy, too many beside {threads} threads"


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    """Return the floating dtypes of the parameters, the one with most elements first."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            name = str(tensor.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + tensor.numel()
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name])) or "none"


def _machine(device: torch.device) -> str:
    _, machine = environment()
    parts = [f"{machine['cpu']}, {machine['cores']} cores, {machine['system']} {machine['architecture']}"]
    if device.type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join([*parts, f"torch {torch.__version__}"])
