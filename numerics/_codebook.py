"""Codebooks: any table of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ._float import check


@dataclass(frozen=True)
class Codebook:
    """Any table of values: code ``i`` means ``values[i]``.

    >>> Codebook((-1.0, 0.0, 1.0)).bits
    2

    Values are distinct finite numbers in ascending order. A tie goes to the even code; `to_odd` takes the odd
    code of two neighbours; ``toward_zero`` between values on either side of zero takes the smaller magnitude,
    the even code where these are equal. What lies beyond the ends becomes the value there, NaN the value
    nearest to zero. `learn_codebook` finds values for data.
    Raises ValueError for values that are none of this.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        values = tuple(float(v) for v in self.values)
        ordered = all(a < b for a, b in pairwise(values))
        check(
            2 <= len(values) <= 2**16 and ordered and all(map(math.isfinite, values)),
            "a codebook is 2 to 65536 finite values in ascending order",
        )
        object.__setattr__(self, "values", values)

    def __str__(self) -> str:
        from ._names import name

        return name(self)

    @property
    def bits(self) -> int:
        """Width of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Largest magnitude, which a block's scale maps its largest element to."""
        return max(abs(v) for v in self.values)
