"""Accuracy against sums done by hand and in float64: every token once, and no NaN let through."""

import json
import math
import types
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfulp.eval import _accuracy
from halfulp.eval._accuracy import Accuracy, Estimate, compare, mean, perplexity
from halfulp.eval._windows import Window, windows

Model = Callable[[torch.Tensor], Any]


def bigram(table: Any) -> Model:
    """A model whose logits at token t are row t of `table`."""
    table = torch.as_tensor(table)

    def model(ids: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=table[ids])

    return model


def noisy(seed: int, vocabulary: int = 40, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, vocabulary, generator=generator) * scale


def ids(n: int, vocabulary: int = 40) -> list[int]:
    return np.random.default_rng(0).integers(0, vocabulary, n).tolist()


def oracle(model: Model, baseline: Model, cut: list[Window]) -> tuple[np.ndarray, ...]:
    """One row per window: tokens, sums of -ln q, -ln p, KL, agreement; and every token's KL, in float64."""

    def log_probabilities(which: Model, window: Window) -> np.ndarray:
        logits = which(torch.tensor([window.ids])).logits[0].double().numpy()
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    rows, every = [], []
    for window in cut:
        log_q, log_p = log_probabilities(model, window), log_probabilities(baseline, window)
        row = np.zeros(5)
        for i in range(window.first_scored, len(window.ids)):
            q, p, token = log_q[i - 1], log_p[i - 1], window.ids[i]
            kl = (np.exp(p) * (p - q)).sum()
            row += [1, -q[token], -p[token], kl, q.argmax() == p.argmax()]
            every.append(kl)
        rows.append(row)
    return np.array(rows), np.array(every)


# EVL-03: P(next | this) over three tokens, in eighths
TABLE = np.array([[4, 2, 2], [1, 6, 1], [2, 5, 1]]) / 8
SIX = [0, 1, 1, 2, 0, 2]  # 2/8, 6/8, 1/8, 2/8, 2/8


def test_bigram_by_hand() -> None:
    cut = windows(SIX, window=4, stride=2)
    got = perplexity(bigram(np.log(TABLE)), cut)
    by_hand = (2 * 6 * 1 * 2 * 2 / 8**5) ** (-1 / 5)
    assert got.tokens == 5
    assert got.window_tokens == (3, 2)
    assert got.perplexity.value == pytest.approx(by_hand, rel=1e-6)
    assert got.window_nll == pytest.approx((-math.log(2 * 6 * 1 / 8**3), -math.log(2 * 2 / 8**2)), rel=1e-6)
    # logits at i against token i, the fault of lighteval #1252, would be another number
    assert got.perplexity.value != pytest.approx(np.exp(-np.mean(np.log(TABLE[SIX, SIX]))), rel=0.01)
    assert compare(bigram(np.log(TABLE)), bigram(np.log(TABLE)), cut).perplexity == got.perplexity


@given(window=st.integers(2, 9), data=st.data())
def test_the_overlap_changes_no_bigram_score(window: int, data: st.DataObject) -> None:
    """A bigram model needs one token of context, so that every split that scores each token once agrees."""
    stride = data.draw(st.integers(1, window - 1))
    tokens, model = ids(23), bigram(noisy(1))
    whole = perplexity(model, windows(tokens, window=23))
    parts = perplexity(model, windows(tokens, window=window, stride=stride))
    assert parts.tokens == whole.tokens == 22
    assert parts.perplexity.value == pytest.approx(whole.perplexity.value, rel=1e-6)


@pytest.mark.parametrize("chunk", [1 << 22, 120, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_against_a_direct_float64_computation(monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(_accuracy, "CHUNK", chunk)
    base = noisy(1).to(dtype)
    model, baseline = bigram(base + noisy(2, scale=0.3).to(dtype)), bigram(base)
    cut = windows(ids(100), window=17, stride=13)
    got = compare(model, baseline, cut)
    rows, every = oracle(model, baseline, cut)
    n, nll, base_nll, kl, agree = rows.T
    assert got.window_tokens == tuple(n)
    assert got.tokens == n.sum() == 99
    assert got.windows == len(cut)
    assert got.window_nll == pytest.approx(nll, rel=1e-6)
    assert got.window_baseline_nll == pytest.approx(base_nll, rel=1e-6)
    assert got.window_kl == pytest.approx(kl, rel=1e-5)
    assert got.window_agree == tuple(agree)
    assert 0 < agree.sum() < n.sum()

    def want(sums: np.ndarray) -> tuple[float, float]:
        m, w = sums.sum() / n.sum(), len(n)
        return m, np.sqrt(w / (w - 1) * ((sums - m * n) ** 2).sum()) / n.sum()

    assert got.kl is not None
    assert got.log_ratio is not None
    assert got.top1 is not None
    assert got.baseline_perplexity is not None
    assert (got.kl.value, got.kl.se) == pytest.approx(want(kl), rel=1e-5)
    assert got.kl_p99 == pytest.approx(np.quantile(every, 0.99), rel=1e-5)
    assert (got.top1.value, got.top1.se) == pytest.approx(want(agree))
    assert (got.log_ratio.value, got.log_ratio.se) == pytest.approx(want(nll - base_nll), rel=1e-4)
    for estimate, sums in ((got.perplexity, nll), (got.baseline_perplexity, base_nll)):
        value, se = want(sums)
        assert estimate.value == pytest.approx(np.exp(value), rel=1e-6)
        assert estimate.se == pytest.approx(np.exp(value) * se, rel=1e-5)
    alone = perplexity(model, cut)
    assert alone.perplexity.value == pytest.approx(got.perplexity.value, rel=1e-12)
    assert alone.kl is None


def test_a_model_is_exactly_itself() -> None:
    model = bigram(noisy(3))
    got = compare(model, model, windows(ids(60), window=10))
    assert got.kl == Estimate(0.0, 0.0)
    assert got.kl_p99 == 0.0
    assert got.top1 == Estimate(1.0, 0.0)
    assert got.log_ratio == Estimate(0.0, 0.0)


def test_small_divergence_is_not_lost_in_the_rounding_of_large_logits() -> None:
    """The normalisers of float32 log-probabilities are off by 1e-6 here, and KL is smaller than that."""
    table = noisy(4, 2000, 8.0)
    other = table * (1 + 2.0**-13)
    cut = windows(ids(64, 2000), window=64)
    got = compare(bigram(other), bigram(table), cut)
    _, every = oracle(bigram(other), bigram(table), cut)
    assert 0 < every.mean() < 1e-6
    assert got.kl is not None
    assert got.kl.value == pytest.approx(every.mean(), abs=2e-8)


def test_paired_error_is_smaller_than_the_error_of_either() -> None:
    model, baseline = bigram(noisy(5) + noisy(6, scale=0.1)), bigram(noisy(5))
    got = compare(model, baseline, windows(ids(400), window=20))
    assert got.log_ratio is not None
    assert got.log_ratio.se is not None
    assert got.perplexity.se is not None
    assert got.log_ratio.se < 0.2 * got.perplexity.se / got.perplexity.value


def test_the_clustered_error_covers_the_truth() -> None:
    """Ragged windows whose tokens move together: 2 SE hold the mean in about 95 of 100 draws."""
    rng = np.random.default_rng(7)
    held = naive = 0
    for _ in range(300):
        counts = rng.integers(5, 15, 40)
        sums = counts * rng.normal(3.0, 1.0, 40) + rng.normal(0, 1, 40) * np.sqrt(counts)
        got = mean(sums.tolist(), counts.tolist())
        assert got.se is not None
        held += abs(got.value - 3) < 2 * got.se
        naive += abs(got.value - 3) < 2 * math.sqrt(2 / counts.sum())  # as if tokens were independent
    assert 270 <= held <= 297
    assert naive < 240


def test_one_window_has_no_error_bar() -> None:
    got = compare(bigram(noisy(1)), bigram(noisy(2)), windows(ids(9), window=9))
    assert {got.perplexity.se, got.kl.se, got.top1.se, got.log_ratio.se} == {None}  # type: ignore[union-attr]
    assert mean([3.0], [2]) == Estimate(1.5, None)
    assert mean([2.0, 4.0], [1, 1]) == Estimate(3.0, 1.0)


def test_only_scored_tokens_count() -> None:
    model = bigram(noisy(1))
    late = perplexity(model, [Window(tuple(SIX), 4)])
    assert late.tokens == 2
    assert late.window_nll[0] == pytest.approx(perplexity(model, [Window(tuple(SIX[3:]), 1)]).window_nll[0])


def test_results_are_plain_json() -> None:
    cut = windows(ids(40), window=10)
    for got in (perplexity(bigram(noisy(1)), cut), compare(bigram(noisy(1)), bigram(noisy(2)), cut)):
        back = json.loads(json.dumps(asdict(got), allow_nan=False))
        assert back["perplexity"] == asdict(got.perplexity)
        assert back["window_nll"] == list(got.window_nll)
        assert isinstance(got, Accuracy)


def test_progress_is_told_and_inference_mode_is_on() -> None:
    seen, grad = [], []
    inner = bigram(noisy(1))

    def model(tokens: torch.Tensor) -> Any:
        grad.append(torch.is_inference_mode_enabled())
        return inner(tokens)

    compare(model, model, windows(ids(30), window=10), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert all(grad)
    assert len(grad) == 6


def test_a_model_that_is_surely_wrong_has_infinite_perplexity() -> None:
    table = torch.tensor([[0.0, -1e4], [0.0, -1e4]])
    assert perplexity(bigram(table), [Window((0, 1, 1), 1)]).perplexity.value == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_name_the_window_and_the_model(bad: float) -> None:
    table = noisy(1)
    table[17, 3] = bad
    broken, fine = bigram(table), bigram(noisy(1))
    cut = [Window((1, 2, 3), 1), Window((4, 17, 6), 1), Window((7, 8, 9), 1)]
    with pytest.raises(ValueError, match="the model's logits in window 1 hold NaN or infinity"):
        compare(broken, fine, cut)
    with pytest.raises(ValueError, match="the baseline's logits in window 1 hold NaN or infinity"):
        compare(fine, broken, cut)
    with pytest.raises(ValueError, match="the model's logits in window 1"):
        perplexity(broken, cut)
    compare(broken, fine, [Window((4, 6, 17), 1)])  # its row predicts nothing that is scored


def test_mismatches_are_told() -> None:
    cut = windows(ids(10, 30), window=5)
    with pytest.raises(ValueError, match="vocabulary of 30 and the baseline one of 40"):
        compare(bigram(noisy(1, 30)), bigram(noisy(1, 40)), cut)
    with pytest.raises(ValueError, match="no windows"):
        compare(bigram(noisy(1)), bigram(noisy(1)), [])

    def last_only(tokens: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=torch.zeros(1, 1, 40))

    with pytest.raises(ValueError, match=r"the model returned logits of shape \(1, 1, 40\) .* \[1, 5, vocabulary"):
        perplexity(last_only, cut)

    def small(tokens: torch.Tensor) -> Any:
        return types.SimpleNamespace(logits=torch.zeros(1, tokens.shape[1], 3))

    with pytest.raises(ValueError, match="vocabulary of 3; use the tokenizer"):
        perplexity(small, [Window((1, 3), 1)])


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=48,
    )
    return LlamaForCausalLM(config)


def test_a_model_of_transformers() -> None:
    model, other = tiny_llama(), tiny_llama()
    cut = windows(ids(100, 64), window=16, stride=9)
    with pytest.raises(ValueError, match=r"the model is in training mode.*\.eval\(\)"):
        compare(model, other, cut)
    model.eval()
    with pytest.raises(ValueError, match="the baseline is in training mode"):
        compare(model, other, cut)
    other.eval()
    assert compare(model, other, cut).kl == Estimate(0.0, 0.0)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.3)
    got = compare(model, other, cut)
    rows, _ = oracle(lambda x: _detached(model, x), lambda x: _detached(other, x), cut)
    assert got.window_nll == pytest.approx(rows[:, 1], rel=1e-5)
    assert got.window_kl == pytest.approx(rows[:, 3], rel=1e-4)
    assert got.kl is not None
    assert got.kl.value > 1e-4
    # what it cannot take is told before it runs
    with pytest.raises(ValueError, match="token 64 is asked for, and the model has a vocabulary of 64"):
        perplexity(model, [Window((64, 1), 1)])
    with pytest.raises(ValueError, match="49 tokens at once are asked for, and the model has 48 positions"):
        perplexity(model, [Window((1,) * 49, 1)])


def _detached(model: Any, tokens: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(tokens)


def test_memory_is_bounded_by_the_chunk() -> None:
    """No float64 or second float32 copy of all logits: the largest tensor that scoring makes is one chunk."""
    vocabulary, length = 50_000, 600
    table = noisy(1, 8, 1.0).repeat(1, vocabulary // 8).bfloat16()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype in (torch.float32, torch.float64):
                largest = max(largest, out.numel())
            return out

    with Watch():
        compare(bigram(table), bigram(table), [Window(tuple(i % 8 for i in range(length)), 1)])
    assert 0 < largest <= _accuracy.CHUNK < vocabulary * length / 5
