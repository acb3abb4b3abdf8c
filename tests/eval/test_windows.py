"""Windows: which token of a text is scored when."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfulp.eval._windows import Window, windows


def positions(cut: list[Window], bos: bool) -> list[int]:
    """Text positions scored, for a text whose token at position i is i + 1."""
    for window in cut:
        body = window.ids[1:] if bos else window.ids
        assert list(body) == list(range(body[0], body[0] + len(body)))
        assert not bos or window.ids[0] == 0
    return [token - 1 for window in cut for token in window.ids[window.first_scored :]]


@given(n=st.integers(2, 60), window=st.integers(2, 20), bos=st.booleans(), data=st.data())
def test_every_token_but_the_first_is_scored_exactly_once(n: int, window: int, bos: bool, data: st.DataObject) -> None:
    room = window - bos
    stride = data.draw(st.integers(1, max(1, room - 1)))
    cut = windows(range(1, n + 1), window=window, stride=stride, bos=0 if bos else None)
    scored = positions(cut, bos)
    if stride < room:
        assert scored == list(range(0 if bos else 1, n))
        assert all(one.first_scored >= room - stride + bos for one in cut[1:])
    assert all(len(one.ids) <= window for one in cut)
    assert all(len(one.ids) == window for one in cut[:-1])


@given(n=st.integers(2, 60), window=st.integers(2, 20), bos=st.booleans())
def test_disjoint_windows_score_all_but_the_first_of_each(n: int, window: int, bos: bool) -> None:
    cut = windows(range(1, n + 1), window=window, bos=0 if bos else None)
    room = window - bos
    assert positions(cut, bos) == [i for i in range(n) if bos or i % room]
    assert all(one.first_scored == 1 for one in cut)
    assert cut == windows(range(1, n + 1), window=window, stride=window, bos=0 if bos else None)


@given(
    window=st.integers(2, 12),
    count=st.integers(1, 6),
    extra=st.integers(0, 40),
    bos=st.booleans(),
    data=st.data(),
)
def test_count_spreads_full_windows_over_the_whole_text(
    window: int, count: int, extra: int, bos: bool, data: st.DataObject
) -> None:
    room = window - bos
    n = room * count + extra
    stride = data.draw(st.one_of(st.none(), st.integers(1, room)))
    cut = windows(range(1, n + 1), window=window, count=count, stride=stride, bos=0 if bos else None)
    assert len(cut) == count
    assert all(len(one.ids) == window for one in cut)
    scored = positions(cut, bos)
    assert len(set(scored)) == len(scored)
    if count > 1:
        starts = [one.ids[bos] - 1 for one in cut]
        assert starts[0] == 0
        assert starts[-1] > n - room - (stride or 1)  # no further full window would fit after it
        gaps = np.diff(starts)
        assert gaps.max() - gaps.min() <= (stride or 1)


def test_the_windows_of_the_reference_measurement() -> None:
    cut = windows(range(312_144), window=1024, count=16)
    assert sum(one.scored for one in cut) == 16_368
    assert [one.ids[0] for one in cut[:3]] == [0, 20741, 41482]
    assert cut[-1].ids[-1] == 312_143


def test_bos_is_never_doubled() -> None:
    """EVL-02: a tokenizer that adds BOS gives the same windows as one that adds none."""
    bare = [5, 6, 7, 8, 9]
    for stride in (None, 2):
        want = windows(bare, window=4, stride=stride, bos=1)
        assert windows([1, *bare], window=4, stride=stride, bos=1) == want
        assert windows([1, 1, *bare], window=4, stride=stride, bos=1) == want
        assert all(one.ids[0] == 1 and one.ids.count(1) == 1 for one in want)
        assert [t for one in want for t in one.ids[one.first_scored :]] == bare
    # without bos= nothing is dropped: the text is what it is
    assert windows([1, *bare], window=6) == [Window((1, *bare), 1)]


def test_arrays_and_tensors_are_read_as_lists_are() -> None:
    want = windows([3, 4, 5, 6], window=3)
    assert windows(np.array([3, 4, 5, 6], np.uint16), window=3) == want  # type: ignore[arg-type]
    assert windows(torch.tensor([3, 4, 5, 6]), window=3) == want  # type: ignore[arg-type]
    assert all(type(token) is int for token in want[0].ids)
    assert asdict(want[0]) == {"ids": (3, 4, 5), "first_scored": 1}


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (range(10), {"window": 1}, "window=1: expected a whole number >= 2"),
        (range(10), {"window": 4.0}, "window=4.0: expected a whole number"),
        (range(10), {"window": 4, "stride": 0}, "stride=0: expected a whole number >= 1"),
        (range(10), {"window": 4, "stride": 5}, "stride 5 would skip tokens: .* holds 4 .* stride <= 4"),
        (range(10), {"window": 4, "stride": 5, "bos": 1}, "holds 3 of the text; give stride <= 3"),
        (range(10), {"window": 4, "count": 0}, "count=0"),
        (range(10), {"window": 4, "bos": -1}, "bos=-1"),
        (range(10), {"window": 4, "count": 3}, "10 tokens, enough for 2 full windows of 4, and 3 were asked"),
        (range(3), {"window": 4, "count": 1}, "3 tokens, enough for 0 full windows"),
        ([], {"window": 4}, "0 tokens and none"),
        ([7], {"window": 4}, "1 tokens and none of them can be scored; give a text of at least 2"),
        ([1, 1], {"window": 4, "bos": 1}, "0 tokens besides bos"),
        ([1.5, 2.5], {"window": 4}, "expected a sequence of integer ids"),
        ("words", {"window": 4}, "tokens of type str: expected a sequence of integer ids"),
        (7, {"window": 4}, "tokens of type int"),
        ([1, -100], {"window": 4}, "negative id -100"),
        (torch.zeros(1, 9, dtype=torch.int64), {"window": 4}, r"shape \(1, 9\): .*pass tokens\[0\]"),
    ],
)
def test_impossible_windows_are_refused(tokens: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windows(tokens, **options)


def test_a_window_that_scores_nothing_cannot_be_made() -> None:
    for ids, first in (((1, 2), 0), ((1, 2), 2), ((1,), 1), ((), 1)):
        with pytest.raises(ValueError, match="1 <= first_scored"):
            Window(ids, first)
