"""The token sequences that a model is calibrated on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._checkpoint import Checkpoint
from .._text import Text, text
from .._tokens import tokens_of


@dataclass(frozen=True)
class Calibration:
    """What to calibrate on; see `calibration`."""

    text: Text | None
    sequences: int
    length: int
    ids: tuple[tuple[int, ...], ...] = ()

    def tokens(self, checkpoint: Checkpoint) -> list[torch.Tensor]:
        """The sequences for a model, int64 [length] each: spread evenly over the text, the first at its start.

        Raises ValueError for a text that is too short for one sequence, and for ids beyond the vocabulary.
        """
        if self.text is None:
            cut = [torch.tensor(ids) for ids in self.ids]
        else:
            ids, bos = tokens_of(checkpoint, self.text.content)
            head, body = ([bos], ids[1:]) if bos is not None else ([], ids)
            room = self.length - len(head)
            if len(body) < room:
                raise ValueError(
                    f"the calibration text {self.text.source} has {len(body)} tokens, fewer than one sequence of "
                    f"{self.length}: give a longer text or a smaller length"
                )
            last = len(body) - room
            starts = [i * last // max(self.sequences - 1, 1) for i in range(self.sequences)]
            cut = [torch.tensor(head + body[start : start + room]) for start in dict.fromkeys(starts)]
        places = checkpoint.config.get("max_position_embeddings", checkpoint.config.get("n_positions"))
        longest = max(len(ids) for ids in cut)
        if isinstance(places, int) and longest > places:
            raise ValueError(
                f"a calibration sequence has {longest} tokens, and the model takes {places}: give a smaller length"
            )
        size = checkpoint.config.get("vocab_size")
        most = max(int(ids.max()) for ids in cut)
        if isinstance(size, int) and most >= size:
            raise ValueError(f"the calibration has the token id {most}, and the model's vocabulary has {size}")
        return cut

    def __str__(self) -> str:
        source = "token ids" if self.text is None else self.text.source
        return f"{self.sequences} sequences of at most {self.length} tokens of {source}"


def calibration(
    source: Text | str | Path | Iterable[Any] = "embedded",
    *,
    sequences: int = 64,
    length: int = 512,
    split: str = "train",
    mask: Any = None,
) -> Calibration:
    """What a model is calibrated on: a text, or token ids.

    >>> calibration("embedded", sequences=8, length=128).length
    128
    >>> batch, mask = torch.tensor([[5, 6, 7], [0, 0, 8]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    >>> calibration(batch, mask=mask).ids
    ((5, 6, 7), (8,))

    source: what `halfulp.text` takes (its ``split`` is "train" here), a `Text`, or sequences of ids, as lists or as
    a batch [sequences, length] with its attention ``mask``, 0 where a token is padding. Padding is taken out before
    anything runs, and each sequence runs alone, so neither padding nor the size of a batch has any effect.
    sequences, length: how many pieces of a text, and their tokens each; fewer where the text has no more.

    Raises ValueError for counts below 1, empty sequences and masks of another shape.
    """
    for name, value in (("sequences", sequences), ("length", length)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number from 1")
    if mask is not None and isinstance(source, (Text, str, Path)):
        raise ValueError("a mask belongs to token ids: a text has no padding")
    if isinstance(source, Text):
        return Calibration(source, sequences, length)
    if isinstance(source, (str, Path)):
        return Calibration(text(str(source), split=split), sequences, length)
    rows = [torch.as_tensor(row) for row in source]
    for row in rows:
        if row.ndim != 1:
            shape = list(row.shape)
            raise ValueError(f"a calibration sequence of shape {shape}: give sequences, or a batch [sequences, length]")
    if mask is not None:
        masks = [torch.as_tensor(row).reshape(-1) for row in mask]
        if [row.shape for row in masks] != [row.shape for row in rows]:
            raise ValueError(f"the mask has another shape than the ids: {len(masks)} rows for {len(rows)} sequences")
        rows = [row[keep != 0] for row, keep in zip(rows, masks, strict=True)]
    rows = [row for row in rows if len(row)]
    if not rows or any(row.is_floating_point() or int(row.min()) < 0 for row in rows):
        raise ValueError("calibration needs at least one sequence of token ids, whole numbers from 0")
    ids = tuple(tuple(int(token) for token in row) for row in rows)
    return Calibration(None, len(ids), max(map(len, ids)), ids)
