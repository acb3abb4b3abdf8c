"""What an emulation did: one row for each operation of each module, the ones that stayed included."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """An operation of a module: how often it ran, and either its roles or the reason why it stayed as it is."""

    module: str
    operation: str
    kind: str
    calls: int
    roles: Any = None
    reason: str = ""

    @property
    def emulated(self) -> bool:
        """Whether the operation ran in given formats."""
        return self.roles is not None


@dataclass(frozen=True)
class Report:
    """All rows, in the order in which they first ran; printed, layers that did the same share a line.

    >>> print(Report((Row("layers.0.up", "linear", "linear", 1), Row("layers.1.up", "linear", "linear", 1))))
    module       operation  calls  becomes
    layers.*.up  linear     2      stays
    """

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def emulated(self) -> tuple[Row, ...]:
        """The rows that ran in given formats."""
        return tuple(row for row in self.rows if row.emulated)

    @property
    def stayed(self) -> tuple[Row, ...]:
        """The rows that did not."""
        return tuple(row for row in self.rows if not row.emulated)

    def __str__(self) -> str:
        lines: dict[tuple[str, str, str], tuple[int, set[str]]] = {}
        for row in self.rows:
            becomes = str(row.roles) if row.emulated else f"stays{row.reason and ': '}{row.reason}"
            module = re.sub(r"(?<![^.])\d+(?![^.])", "*", row.module)
            calls, names = lines.get((module, row.operation, becomes), (0, set()))
            lines[module, row.operation, becomes] = (calls + row.calls, names | {row.module})
        table = [("module", "operation", "calls", "becomes")]
        for (module, operation, becomes), (calls, names) in lines.items():
            name = module if len(names) > 1 else min(names) or "(the model)"
            table.append((name, operation, str(calls), becomes))
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[3]]) for line in table)


def matcher(pattern: str) -> re.Pattern[str]:
    """A pattern as a regular expression for whole module names.

    "re:..." is a regular expression, anything else a name in which ``*`` stands for any text; either must
    match from the first character to the last, or from a dot on: "lm_head" matches "model.lm_head".
    Raises ValueError for a malformed expression.
    """
    text = pattern.removeprefix("re:")
    body = text if pattern.startswith("re:") else fnmatch.translate(text).removesuffix(r"\Z").removesuffix(r"\z")
    try:
        return re.compile(rf"(?:.*\.)?(?:{body})")
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from None


def matches(pattern: str, names: Iterable[str], what: str) -> frozenset[str]:
    """The names that a pattern matches; ValueError with near ones where there is none."""
    expression, names = matcher(pattern), list(names)
    found = frozenset(name for name in names if expression.fullmatch(name))
    if not found:
        near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
        near = near or sorted({name.rsplit(".", 1)[-1] for name in names if name})[:8]
        raise ValueError(f"override {pattern!r} matches no {what}; near names: {', '.join(near)}")
    return found
