"""How rounding is learned: options alone, without the loops that use them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["sign", "soft"]
RULES = ("sign", "soft")
_FINE = 6  # bits of mantissa from which scales are learned as if they were continuous


@dataclass(frozen=True)
class Learning:
    """How rounding is learned; see `learn` for the rules.

    >>> Learning("soft", steps=100)
    Learning(rule='soft', steps=100, batch=8, lr=None, scale_lr=None, penalty=10.0, seed=0, every=10, check=None)

    steps: of the optimizer, each on ``batch`` sequences, which come in an order drawn from ``seed``. lr: of the
    rounding, by default 20 / steps for "soft" and, in gaps, 1 / steps for "sign". scale_lr: of the scales, in octaves,
    by default 0.5 / steps and 1 / steps; but 0, which leaves them alone, for "soft" where the scale's format has fewer
    than 6 bits of mantissa. Both fall to zero linearly. penalty: for "soft", how strongly weights are driven to one
    side, as a share of the start's loss. every: how many steps go by before the rounding is judged by its loss on
    ``check`` sequences (as many drawn from the seed; None: all). Raises ValueError for what is out of range.
    """

    rule: Rule = "sign"
    steps: int = 200
    batch: int = 8
    lr: float | None = None
    scale_lr: float | None = None
    penalty: float = 10.0
    seed: int = 0
    every: int = 10
    check: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rule={self.rule!r}: choose {', '.join(map(repr, RULES))}")
        for name, least in {"steps": 1, "batch": 1, "seed": 0, "every": 1, "check": 1}.items():
            given = getattr(self, name)
            if (given is not None or name != "check") and (type(given) is not int or given < least):
                raise ValueError(f"{name}={given!r}: give a whole number from {least}")
        for name in ("lr", "scale_lr", "penalty"):
            given = getattr(self, name)
            number = isinstance(given, float | int) and 0 <= given < math.inf
            if not (number or (given is None and name != "penalty")):
                raise ValueError(f"{name}={given!r}: give a number from 0")

    def rates(self, t: int, scale: Any) -> tuple[float, float]:
        """The learning rates in step t, of rounding and of scales, which are numbers of the format ``scale``."""
        soft, left = self.rule == "soft", 1 - t / self.steps
        lr = (20 if soft else 1) / self.steps if self.lr is None else self.lr
        usual = 1 / self.steps if not soft else 0.5 / self.steps if scale.mantissa >= _FINE else 0.0
        return lr * left, (usual if self.scale_lr is None else self.scale_lr) * left
