"""How far a model's predictions are from the text, and from another model's, with error bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ._windows import Window

# logits worked on at a time: a few float32 copies of a chunk, 16 MB each, are all that scoring adds
CHUNK = 1 << 22

Model = Callable[[torch.Tensor], Any]
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; None where one window alone leaves it unknown."""

    value: float
    se: float | None


@dataclass(frozen=True)
class Accuracy:
    """Scores of a model on some windows, in nats, and against a baseline on the same tokens.

    perplexity: exp of the mean -ln p over all `tokens` scored; its SE by the delta method.
    log_ratio: ln(perplexity / baseline perplexity), from the paired differences.
    kl: mean KL(baseline || model) per token; kl_p99: its 99th percentile over tokens.
    top1: share of tokens for which both find the same token most likely (the first of equals).
    All but `perplexity`, `tokens`, `windows`, `window_tokens` and `window_nll` are None without a baseline.

    The `window_` fields hold one number per window, its sum over the scored tokens, and give back every mean
    and SE above. Tokens of one window are not independent, so windows are what counts: with s the sums and
    n the tokens of W windows, mean m = sum(s) / sum(n), SE = sqrt(W / (W - 1) sum((s - m n)^2)) / sum(n)
    (clustered SE, Miller 2024, arXiv 2411.00640).
    """

    perplexity: Estimate
    tokens: int
    windows: int
    window_tokens: tuple[int, ...]
    window_nll: tuple[float, ...]
    baseline_perplexity: Estimate | None = None
    log_ratio: Estimate | None = None
    kl: Estimate | None = None
    kl_p99: float | None = None
    top1: Estimate | None = None
    window_baseline_nll: tuple[float, ...] | None = None
    window_kl: tuple[float, ...] | None = None
    window_agree: tuple[float, ...] | None = None


def mean(sums: Sequence[float], counts: Sequence[int]) -> Estimate:
    """`mean([2.0, 4.0], [1, 1])` is Estimate(3.0, 1.0): sum(sums) / sum(counts), SE as in `Accuracy`."""
    total, clusters = sum(counts), len(counts)
    value = math.fsum(sums) / total
    if clusters < 2:
        return Estimate(value, None)
    spread = math.fsum((s - value * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return Estimate(value, math.sqrt(clusters / (clusters - 1) * spread) / total)


def perplexity(model: Model, windows: Iterable[Window], *, progress: Progress | None = None) -> Accuracy:
    """Perplexity of one model: `perplexity(model, windows(ids, window=1024)).perplexity.value`.

    Takes and raises what `compare` does; the fields of a comparison are None.
    """
    cut = _checked([("the model", model)], windows)
    nll: list[float] = []
    with torch.inference_mode():
        for i, window in enumerate(cut):
            logits = _logits("the model", model, window, i)
            nll.append(_nll(logits, window, i))
            del logits
            if progress is not None:
                progress(i + 1, len(cut))
    counts = tuple(window.scored for window in cut)
    return Accuracy(_exp(mean(nll, counts)), sum(counts), len(cut), counts, tuple(nll))


def compare(model: Model, baseline: Model, windows: Iterable[Window], *, progress: Progress | None = None) -> Accuracy:
    """What a change did to a model: `compare(compressed, original, windows(ids, window=1024)).kl`.

    model, baseline: called with ids [1, T] (int64, on the model's device); each returns an object with
    `.logits` [1, T, V] of any float dtype, as the causal models of transformers do. The logits at position i
    predict token i + 1. Both are in evaluation mode. progress: called with (windows done, windows in all).

    One window is in memory at a time: the baseline's logits, then the model's. Log-probabilities are float32,
    sums float64. A model compared with itself has KL exactly 0 and agreement exactly 1.

    Raises ValueError for no windows, a model in training mode, ids or windows beyond what the model takes,
    logits that are NaN or infinite (naming the window) or of another shape, and vocabularies of two sizes.
    """
    cut = _checked([("the model", model), ("the baseline", baseline)], windows)
    sums: list[tuple[float, float, float, float]] = []  # -ln p, baseline's -ln p, KL, agreement
    kls: list[np.ndarray] = []
    with torch.inference_mode():
        for i, window in enumerate(cut):
            reference = _logits("the baseline", baseline, window, i)
            logits = _logits("the model", model, window, i)
            scores = _scores(logits, reference.to(logits.device), window, i)
            del logits, reference
            nll, base, kl, agree = (one.double() for one in scores)
            sums.append((nll.sum().item(), base.sum().item(), kl.sum().item(), agree.sum().item()))
            kls.append(kl.cpu().numpy())
            if progress is not None:
                progress(i + 1, len(cut))
    counts = tuple(window.scored for window in cut)
    all_nll, all_base, all_kl, all_agree = (tuple(column) for column in zip(*sums, strict=True))
    return Accuracy(
        perplexity=_exp(mean(all_nll, counts)),
        tokens=sum(counts),
        windows=len(cut),
        window_tokens=counts,
        window_nll=all_nll,
        baseline_perplexity=_exp(mean(all_base, counts)),
        log_ratio=mean([a - b for a, b in zip(all_nll, all_base, strict=True)], counts),
        kl=mean(all_kl, counts),
        kl_p99=float(np.quantile(np.concatenate(kls), 0.99)),
        top1=mean(all_agree, counts),
        window_baseline_nll=all_base,
        window_kl=all_kl,
        window_agree=all_agree,
    )


def _exp(log: Estimate) -> Estimate:
    try:
        value = math.exp(log.value)
    except OverflowError:  # beyond 709 nats a token: a model that is sure, and wrong
        value = math.inf
    return Estimate(value, None if log.se is None else value * log.se)


def _checked(models: list[tuple[str, Any]], windows: Iterable[Window]) -> list[Window]:
    cut = list(windows)
    if not cut:
        raise ValueError("no windows to score on; make some with halfulp.eval.windows(ids, window=...)")
    longest, largest = max(len(one.ids) for one in cut), max(max(one.ids) for one in cut)
    for name, model in models:
        check_model(name, model, longest, largest)
    return cut


def check_model(name: str, model: Any, tokens: int, largest: int) -> None:
    """Raise ValueError where `model` cannot take `tokens` at once or the id `largest`, or is in training."""
    if isinstance(model, torch.nn.Module) and any(part.training for part in model.modules()):
        raise ValueError(
            f"{name} is in training mode, where dropout makes every result random; call .eval() on it first"
        )
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and largest >= vocabulary:
        raise ValueError(
            f"token {largest} is asked for, and {name} has a vocabulary of {vocabulary}; "
            "use the tokenizer and the vocabulary size of that model"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"{tokens} tokens at once are asked for, and {name} has {positions} positions; ask for {positions} or fewer"
        )


def _logits(name: str, model: Model, window: Window, i: int) -> torch.Tensor:
    """[scored, V]: the rows that predict the scored tokens."""
    device = next((p.device for p in model.parameters()) if isinstance(model, torch.nn.Module) else iter(()), None)
    logits = model(torch.tensor([window.ids], device=device)).logits
    if logits.ndim != 3 or logits.shape[:2] != (1, len(window.ids)):
        raise ValueError(
            f"{name} returned logits of shape {tuple(logits.shape)} for window {i}; "
            f"expected [1, {len(window.ids)}, vocabulary]"
        )
    if max(window.ids) >= logits.shape[2]:
        raise ValueError(
            f"window {i} holds token {max(window.ids)}, and {name} has a vocabulary of {logits.shape[2]}; "
            "use the tokenizer of that model"
        )
    return logits[0, window.first_scored - 1 : -1]


def _targets(window: Window, device: torch.device) -> torch.Tensor:
    return torch.tensor(window.ids[window.first_scored :], device=device)[:, None]


def _log_softmax(name: str, logits: torch.Tensor, i: int) -> torch.Tensor:
    out = logits.float().log_softmax(-1)
    # finite only where all logits are: NaN and +inf make a whole row NaN, -inf stays -inf
    if not bool(out.isfinite().all()):
        raise ValueError(
            f"{name}'s logits in window {i} hold NaN or infinity; look for an overflow in its weights or "
            "scales, or run it in float32"
        )
    return out


def _rows(logits: torch.Tensor) -> int:
    return max(1, CHUNK // logits.shape[1])


def _nll(logits: torch.Tensor, window: Window, i: int) -> float:
    targets, rows = _targets(window, logits.device), _rows(logits)
    return math.fsum(
        -_log_softmax("the model", some, i).gather(1, wanted).double().sum().item()
        for some, wanted in zip(logits.split(rows), targets.split(rows), strict=True)
    )


def _scores(logits: torch.Tensor, reference: torch.Tensor, window: Window, i: int) -> list[torch.Tensor]:
    """-ln p, the baseline's -ln p, KL(baseline || model) and agreement; each [scored]."""
    if logits.shape != reference.shape:
        raise ValueError(
            f"the model has a vocabulary of {logits.shape[1]} and the baseline one of {reference.shape[1]}; "
            "their tokens cannot be compared: give a baseline with the same vocabulary, padding included"
        )
    rows = _rows(logits)
    pieces = zip(logits.split(rows), reference.split(rows), _targets(window, logits.device).split(rows), strict=True)
    parts = []
    for some, other, wanted in pieces:
        log_q, log_p = _log_softmax("the model", some, i), _log_softmax("the baseline", other, i)
        p, q = log_p.exp(), log_q.exp()
        # q - p sums to 0, and takes the first-order error of the float32 normalisers out of the sum
        kl = (p * (log_p - log_q) + (q - p)).sum(-1, dtype=torch.float64)
        agree = some.argmax(-1) == other.argmax(-1)
        parts.append((-log_q.gather(1, wanted)[:, 0], -log_p.gather(1, wanted)[:, 0], kl, agree))
    return [torch.cat(column) for column in zip(*parts, strict=True)]
