"""Which tokens of a text a model sees and is scored on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any


@dataclass(frozen=True)
class Window:
    """`ids` is what the model sees; the tokens from index `first_scored` on are what it is scored on.

    Invariant: 1 <= first_scored < len(ids), for a token is predicted from those before it.
    """

    ids: tuple[int, ...]
    first_scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.first_scored < len(self.ids):
            raise ValueError(
                f"first_scored={self.first_scored} in a window of {len(self.ids)} tokens: expected "
                f"1 <= first_scored < {len(self.ids)}, since a token is predicted from those before it"
            )

    @property
    def scored(self) -> int:
        """How many tokens are scored."""
        return len(self.ids) - self.first_scored


def windows(
    tokens: Sequence[int],
    *,
    window: int,
    stride: int | None = None,
    count: int | None = None,
    bos: int | None = None,
) -> list[Window]:
    """Windows of a tokenized text, with what is scored in each.

    >>> windows([10, 11, 12, 13, 14, 15], window=4, stride=2)
    [Window(ids=(10, 11, 12, 13), first_scored=1), Window(ids=(12, 13, 14, 15), first_scored=2)]
    >>> windows([10, 11, 12], window=3, bos=1)
    [Window(ids=(1, 10, 11), first_scored=1), Window(ids=(1, 12), first_scored=1)]

    tokens: the ids of one text, [n]. window: the most tokens that the model sees at once.
    stride: how far each window moves. None, or `window`, makes disjoint windows, whose first token is context
    only. A smaller stride scores every token but the text's first exactly once, each with at least
    `window - stride` tokens before it (the first window's apart). The last window may be shorter.
    count: that many full windows, evenly spread, for i = 0 ... count - 1. Disjoint ones start at text token
    floor(i (n - room) / (count - 1)), room = what a window holds of the text; of m overlapping ones these are
    number floor(i (m - 1) / (count - 1)). The first alone for count=1.
    bos: where given, the rule is "bos in every window": it comes first in each, takes one of its `window`
    places and is never scored, so a disjoint window scores its first text token too. `bos` at the start of
    `tokens` is dropped first, so that it is never doubled. Without `bos` nothing is added or dropped.

    Raises ValueError for a text that is too short (with its token count), or an impossible window or stride.
    """
    ids = _ids(tokens)
    window = whole("window", window, 2)
    if bos is not None:
        bos = whole("bos", bos, 0)
        ids = ids[next((i for i, token in enumerate(ids) if token != bos), len(ids)) :]
    head = () if bos is None else (bos,)
    room = window - len(head)
    step = room if stride is None or stride == window else whole("stride", stride, 1)
    if step > room:
        raise ValueError(
            f"stride {stride} would skip tokens: a window of {window} holds {room} of the text; "
            f"give stride <= {room}, or None for disjoint windows"
        )
    if len(ids) + len(head) < 2:
        raise ValueError(
            f"the text has {len(ids)} tokens{' besides bos' if head else ''} and none of them can be scored; "
            f"give a text of at least {2 - len(head)}"
        )
    begins: Sequence[int] = range(0, len(ids), step)
    if count is not None:
        count = whole("count", count, 1)
        full = (len(ids) - room) // step + 1  # 0 or less where not even one fits
        if count > full:
            raise ValueError(
                f"the text has {len(ids)} tokens, enough for {max(full, 0)} full windows of {window}, and "
                f"{count} were asked for; give a longer text, a smaller window or a smaller count"
            )
        # disjoint windows are free to start anywhere: they reach the end of the text, and never overlap
        begins = range(len(ids) - room + 1) if step == room else begins[:full]
        begins = [begins[i * (len(begins) - 1) // max(count - 1, 1)] for i in range(count)]
    cut = []
    for begin in begins:
        piece = ids[begin : begin + room]
        # after what the window `step` earlier has scored; without bos, never its own first token
        first = max(1, len(head) + (room - step if begin else 0))
        if first < len(head) + len(piece):
            cut.append(Window(head + piece, first))
    return cut


def _ids(tokens: Any) -> tuple[int, ...]:
    shape = getattr(tokens, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(f"tokens of shape {tuple(shape)}: expected the ids of one text, shape [n]; pass tokens[0]")
    values = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        ids = tuple(index(value) for value in values)
    except TypeError:
        raise ValueError(
            f"tokens of type {type(tokens).__name__}: expected a sequence of integer ids, such as "
            'tokenizer(text)["input_ids"]'
        ) from None
    if min(ids, default=0) < 0:
        raise ValueError(f"tokens hold the negative id {min(ids)}; expected ids of a vocabulary, from 0 on")
    return ids


def whole(name: str, value: int, least: int) -> int:
    try:
        whole = index(value)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise ValueError(f"{name}={value!r}: expected a whole number >= {least}")
    return whole
