"""Timing on a clock that the test turns by hand: what is counted, and when it cannot be trusted."""

import json
import math
import time
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest
import torch

from halfulp.eval import _latency
from halfulp.eval._latency import latency, measure, median_ranks, wait

MS = 1_000_000


class Clock:
    """Nanoseconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0
        self.calls = 0

    def __call__(self) -> int:
        return self.now

    def step(self, milliseconds: Iterable[float]) -> Callable[[], object]:
        """A step that takes these times, call after call."""
        times = iter(milliseconds)

        def run() -> None:
            self.calls += 1
            self.now += round(next(times) * MS)

        return run


def test_first_call_and_warm_up_are_kept_apart() -> None:
    clock = Clock()
    got = measure(clock.step(chain([900, 30, 12, 10, 10, 10], repeat(10))), repeats=5, min_seconds=0, clock=clock)
    assert got.first_s == 0.9
    assert got.warmup == 6  # the first, two that were not yet warm, three that agree
    assert (got.n, clock.calls) == (5, 11)
    assert got.samples_s == (0.01,) * 5
    assert {got.median_s, got.low_s, got.high_s, got.min_s, got.q1_s, got.q3_s} == {0.01}
    assert not got.unstable
    assert got.why == ""


def test_the_first_call_settles_nothing_and_warm_up_ends_at_its_maximum() -> None:
    clock = Clock()
    got = measure(clock.step(repeat(10)), repeats=3, min_seconds=0, clock=clock)
    assert got.warmup == 4  # three that agree, after the first
    clock = Clock()
    got = measure(clock.step(2.0**i for i in range(99)), warmup=4, repeats=3, min_seconds=0, clock=clock)
    assert (got.warmup, got.n) == (4, 3)
    assert got.samples_s == (0.016, 0.032, 0.064)
    clock = Clock()
    assert measure(clock.step(repeat(1)), warmup=1, repeats=3, min_seconds=0, clock=clock).warmup == 1
    assert clock.calls == 4


def test_short_steps_are_repeated_up_to_min_seconds_and_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert measure(clock.step(repeat(10)), repeats=5, min_seconds=0.5, clock=clock).n == 50
    monkeypatch.setattr(_latency, "MOST", 200)
    assert measure(lambda: None, repeats=5, min_seconds=0.5, clock=Clock()).n == 200
    assert measure(lambda: None, repeats=300, min_seconds=0.5, clock=Clock()).n == 300


def test_numbers_against_numpy() -> None:
    times = np.random.default_rng(0).gamma(20, 1, 24).round(3)
    clock = Clock()
    got = measure(clock.step([1, *times]), warmup=1, repeats=24, min_seconds=0, clock=clock)
    assert got.median_s == pytest.approx(np.median(times) / 1e3)
    assert (got.q1_s, got.q3_s) == pytest.approx(tuple(np.quantile(times, [0.25, 0.75]) / 1e3))
    assert got.min_s == pytest.approx(times.min() / 1e3)
    ordered = np.sort(times) / 1e3
    assert (got.low_s, got.high_s) == pytest.approx((ordered[6], ordered[17]))  # ranks 7 and 18 of 24, in any table


@pytest.mark.parametrize(
    ("n", "rank", "confidence"),
    [
        (1, 0, 0.0),
        (2, 0, 0.5),
        (5, 0, 0.9375),
        (6, 0, 0.96875),
        (9, 1, 0.9609375),
        (20, 5, 0.958610534667969),
    ],
)
def test_median_interval_against_the_tables(n: int, rank: int, confidence: float) -> None:
    assert median_ranks(n) == (rank, pytest.approx(confidence, abs=1e-15))


def test_median_interval_against_scipy_and_is_the_narrowest() -> None:
    binom = pytest.importorskip("scipy.stats").binom
    for n in (7, 12, 33, 100, 1001, 10_000):
        rank, confidence = median_ranks(n)
        assert confidence == pytest.approx(1 - 2 * binom.cdf(rank, n, 0.5), abs=1e-9)
        assert confidence >= 0.95 > 1 - 2 * binom.cdf(rank + 1, n, 0.5)


def test_noise_is_flagged() -> None:
    clock = Clock()
    got = measure(clock.step([1, *[9, 10, 11, 12] * 5]), warmup=1, repeats=20, min_seconds=0, clock=clock)
    assert got.unstable
    assert got.why == "interquartile range is 14% of the median (limit 10%)"
    clock = Clock()
    got = measure(clock.step([1, *[10, 10.2, 10.4, 10.6] * 5]), warmup=1, repeats=20, min_seconds=0, clock=clock)
    assert not got.unstable


def test_one_outlier_does_not_hide_a_steady_step() -> None:
    clock = Clock()
    got = measure(clock.step([1, *[10] * 19, 500]), warmup=1, repeats=20, min_seconds=0, clock=clock)
    assert (got.median_s, got.unstable) == (0.01, False)


def test_drift_is_flagged_in_either_direction() -> None:
    slower = [10.0] * 9 + [10.5, 11.5] + [11.5] * 9
    for times, sign in ((slower, "+"), (slower[::-1], "-")):
        clock = Clock()
        got = measure(clock.step([1, *times]), warmup=1, repeats=20, min_seconds=0, clock=clock)
        assert got.unstable
        assert f"from first to second half the median moved by {sign}14%" in got.why


def test_too_few_or_too_short_is_flagged() -> None:
    for n in (1, 2):
        clock = Clock()
        got = measure(clock.step(repeat(10)), repeats=n, min_seconds=0, clock=clock)
        assert got.unstable
        assert got.why == f"{n} repeats cannot show noise: at least 3 are needed"
        assert (got.n, got.median_s) == (n, 0.01)
    got = measure(lambda: None, repeats=5, min_seconds=0, clock=Clock())
    assert got.why == "the step is shorter than the clock can tell"


def test_what_is_prepared_is_not_timed_and_per_divides() -> None:
    clock = Clock()
    prepared = []

    def prepare() -> None:
        prepared.append(clock.now)
        clock.now += 1000 * MS

    got = measure(clock.step(repeat(8)), repeats=4, min_seconds=0, prepare=prepare, per=4, clock=clock)
    assert got.samples_s == (0.002,) * 4
    assert got.first_s == 0.002
    assert len(prepared) == clock.calls == got.warmup + 4


def test_the_result_is_waited_for() -> None:
    """EVL-06: the time of an asynchronous call is that of its result, wherever in the output it is."""
    clock = Clock()

    class Later:
        def block_until_ready(self) -> None:
            clock.now += 70 * MS

    for wrap in (lambda x: x, lambda x: (1, [x]), lambda x: {"logits": x}):
        got = measure(lambda: wrap(Later()), repeats=3, min_seconds=0, clock=clock)  # noqa: B023
        assert got.median_s == 0.07
    for plain in (None, 3, "text", torch.zeros(2), types.SimpleNamespace()):
        wait(plain)


@pytest.mark.slow
def test_a_jitted_chain_is_waited_for_and_its_compilation_kept_apart() -> None:
    """EVL-06 on jax itself."""
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((1000, 1000)) / 1000

    @jax.jit
    def several(x: Any) -> Any:
        for _ in range(20):
            x = jax.numpy.tanh(x @ x)
        return x

    def unwaited() -> None:
        several(x)

    waited = measure(lambda: several(x), repeats=5, min_seconds=0)
    dispatched = measure(unwaited, repeats=5, min_seconds=0)
    small = jax.numpy.ones((8, 8))  # a new shape compiles anew, and then takes microseconds
    assert (compiled := measure(lambda: several(small), repeats=5, min_seconds=0)).first_s > 5 * compiled.median_s
    assert dispatched.min_s < 0.5 * waited.min_s


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats=0: expected a whole number >= 1"),
        ({"warmup": 0}, "warmup=0"),
        ({"per": 0}, "per=0"),
        ({"repeats": 2.5}, "repeats=2.5"),
        ({"min_seconds": -1}, "min_seconds=-1"),
        ({"min_seconds": math.inf}, "min_seconds=inf"),
        ({"min_seconds": math.nan}, "min_seconds=nan"),
    ],
)
def test_impossible_counts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(lambda: None, **options)


class Cache:
    """A cache that counts its tokens, and may refuse to be cut, aloud or in silence."""

    def __init__(self, croppable: bool | None) -> None:
        self.length, self.croppable = 0, croppable

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, length: int) -> None:
        if self.croppable is None:
            return
        if not self.croppable:
            raise RuntimeError("the window has moved on")
        assert length < 0
        self.length += length


class Counting(torch.nn.Module):
    """A causal language model in outline, which writes down each forward: tokens seen and cached."""

    def __init__(self, croppable: bool | None = True, cached: bool = True) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.croppable, self.cached = croppable, cached
        self.seen: list[tuple[int, int]] = []
        self.ids: list[int] = []
        self.threads = 0
        self.eval()

    def forward(self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert use_cache
        assert torch.is_inference_mode_enabled()
        assert ids.shape[0] == 1
        cache = past_key_values or Cache(self.croppable)
        self.seen.append((ids.shape[1], cache.length))
        self.ids += ids[0].tolist()
        self.threads = torch.get_num_threads()
        cache.length += ids.shape[1]
        out = {"logits": torch.zeros(1, ids.shape[1], 7), "past_key_values": cache if self.cached else None}
        return types.SimpleNamespace(**out)


@pytest.mark.parametrize("croppable", [True, False, None])
def test_every_decode_starts_from_a_cache_of_the_prompts_length(croppable: bool | None) -> None:
    model = Counting(croppable)
    got = latency(model, 7, prompt=6, new=3, repeats=4)
    prefills, decodes = got.prefill.warmup + 4, got.decode.warmup + 4
    one = [(1, 6), (1, 7), (1, 8)]
    # the first follows the last prefill; the rest a cut cache, or one filled again where it cannot be cut
    again = [] if croppable else [(6, 0)]
    assert model.seen == [(6, 0)] * prefills + one + (again + one) * (decodes - 1)
    assert got.prefill.n == got.decode.n == 4
    assert set(model.ids) <= set(range(7))
    assert (got.prompt, got.new, got.dtype) == (6, 3, "bfloat16")


def test_time_per_token_is_the_mean_over_the_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setitem(measure.__kwdefaults__, "clock", clock)  # type: ignore[arg-type]

    class Slow(Counting):
        def forward(self, ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = False) -> Any:
            clock.now += (100 if ids.shape[1] > 1 else 7) * MS
            return super().forward(ids, past_key_values, use_cache)

    got = latency(Slow(croppable=False), 7, prompt=6, new=4, repeats=3)
    assert got.prefill.samples_s == (0.1,) * 3
    assert got.decode.samples_s == pytest.approx((0.007,) * 3)  # nothing of the prefills that refill the cache


def test_threads_are_set_and_put_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    model = Counting()
    other = 2 if before == 1 else 1
    assert latency(model, 7, prompt=2, new=1, repeats=1, threads=other).threads == other
    assert model.threads == other
    assert torch.get_num_threads() == before
    assert latency(model, 7, prompt=2, new=1, repeats=1).threads == before
    with pytest.raises(ValueError, match="returned none of cache, past_key_values"):
        latency(Counting(cached=False), 7, prompt=2, new=1, repeats=1, threads=other)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("others", "threads", "cores", "crowded"),
    [(0.1, 2, 2, False), (0.3, 2, 2, True), (1.0, 1, 2, False), (1.2, 1, 2, True), (50, 8, 64, False)],
)
def test_cores_taken_by_others_are_flagged(
    monkeypatch: pytest.MonkeyPatch, others: float, threads: int, cores: int, crowded: bool
) -> None:
    clock = Clock()
    steady = measure(clock.step(repeat(10)), repeats=20, min_seconds=0, clock=clock)
    seconds = iter([(100.0, 5000.0, 7.0), (110.0, 5000.0 + 10 * others + 9.0, 16.0)])
    monkeypatch.setattr(_latency, "_cpu_seconds", lambda: next(seconds))
    monkeypatch.setattr(_latency.os, "cpu_count", lambda: cores)
    got = _latency._watched(lambda: steady, threads)
    assert got.unstable == crowded
    assert got.why.startswith(f"other processes kept {others:.1f} of {cores} cores busy" if crowded else "")
    assert got.median_s == steady.median_s
    monkeypatch.setattr(_latency, "_cpu_seconds", lambda: None)
    assert _latency._watched(lambda: steady, threads) == steady


def test_the_machines_cpu_time_holds_that_of_this_process() -> None:
    before = _latency._cpu_seconds()
    if before is None:
        pytest.skip("no /proc/stat here")
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    after = _latency._cpu_seconds()
    assert after is not None
    assert after[2] - before[2] >= 0.2
    assert after[1] - before[1] >= 0.15  # counted in steps of 0.01 s on each core


def test_the_same_seed_gives_the_same_tokens() -> None:
    def tokens(seed: int) -> list[int]:
        model = Counting()
        latency(model, 1000, prompt=8, new=2, repeats=1, seed=seed)
        return model.ids[:8]

    assert tokens(0) == tokens(0) != tokens(1)


@pytest.mark.parametrize("option", ["vocab_size", "prompt", "new", "repeats", "threads"])
def test_counts_below_one_are_refused(option: str) -> None:
    options = {"vocab_size": 7, "prompt": 2, "new": 1, "repeats": 1, option: 0}
    with pytest.raises(ValueError, match=f"{option}=0: expected a whole number >= 1"):
        latency(Counting(), **options)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="training mode"):
        latency(Counting().train(), 7, prompt=2, new=1, repeats=1)


def test_a_model_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=40,
    )
    model = LlamaForCausalLM(config).eval()
    lengths: list[tuple[int, int]] = []

    def note(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        lengths.append((out.logits.shape[1], out.cache.get_seq_length()))

    with model.register_forward_hook(note, with_kwargs=True):
        got = latency(model, 64, prompt=20, new=5, repeats=3)
    prefills, decodes = got.prefill.warmup + 3, got.decode.warmup + 3
    # one row of logits each; the cache is cut, not filled again
    assert lengths == [(1, 20)] * prefills + [(1, 21 + i) for i in range(5)] * decodes
    assert got.prefill.median_s > 0
    assert got.decode.low_s <= got.decode.median_s <= got.decode.high_s
    assert got.dtype == "float32"
    assert "torch " in got.machine
    assert "cores" in got.machine
    assert "20 random token ids" in got.definitions
    assert json.loads(json.dumps(asdict(got), allow_nan=False))["decode"]["n"] == 3
    with pytest.raises(ValueError, match="41 tokens at once are asked for, and the model has 40 positions"):
        latency(model, 64, prompt=36, new=5)
    with pytest.raises(ValueError, match="token 99 is asked for, and the model has a vocabulary of 64"):
        latency(model, 100, prompt=6, new=5)


def test_a_cut_cache_predicts_what_an_uncut_one_does() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        steps = _latency._Steps(model, ids[:, :8], ids[:, 8:].split(1, dim=1))
        steps.prefill()
        first = steps.decode()
        assert steps.restore() is None
        again = steps.decode()
        want = model(ids).logits[:, -1:]
    assert torch.equal(first, again)
    torch.testing.assert_close(first, want)
