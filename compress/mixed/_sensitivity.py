"""What rounding each group of layers alone does to a model's predictions: a value, and its JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KEEP = "keep"  # the choice that leaves a group's numbers in their own type
_KIND = "halfulp sensitivity"


@dataclass(frozen=True)
class Option:
    """One format for a group, measured.

    ``window_kl``: KL(original || rounded) in nats, summed over the tokens of each window. ``bytes``: of the group's
    codes, scales and zero points, packed; a layout may add a few bytes to each tensor.
    """

    format: str
    bytes: int
    window_kl: tuple[float, ...]


@dataclass(frozen=True)
class Group:
    """Layers that are rounded together.

    ``patterns``: regular expressions for the whole module names, which match the group's layers and no others.
    ``fused``: what groups have in common that must share a format, since runtimes make one matmul of them, or "".
    ``block``: the decoder block, None where the group spans several. ``tensors``, ``weights``: how many.
    """

    name: str
    role: str
    block: int | None
    patterns: tuple[str, ...]
    tensors: int
    weights: int
    fused: str
    options: tuple[Option, ...]

    def option(self, format: str) -> Option:
        """The figures of a format; ValueError for one that was not measured."""
        found = next((option for option in self.options if option.format == format), None)
        if found is None:
            known = ", ".join(option.format for option in self.options)
            raise ValueError(f"{self.name} was not measured in {format!r}, only in {known}")
        return found


@dataclass(frozen=True)
class Sensitivity:
    """How much each group of layers hurts in each format, alone; measured by `halfulp.eval.sensitivity`.

    >>> options = (Option("int4:g64", 34, (0.25, 0.75)), Option("int8:channel", 66, (0.0, 0.0)))
    >>> group = Group("fc", "fc", None, (r"fc",), 1, 64, "", options)
    >>> found = Sensitivity("a model", "a text", (8, 8), "ragged", ("int4:g64", "int8:channel"), (group,))
    >>> found.kl(group, "int4:g64"), found.bits(group, "int4:g64")
    (0.0625, 4.25)
    >>> Sensitivity.from_json(found.to_json()) == found
    True

    ``window_tokens``: how many tokens of each window are scored. ``formats``: the candidates in the order they were
    asked for. ``ragged``: what was done where a block size does not divide (see `quantize`). ``notes``: what was
    otherwise than asked.
    """

    source: str
    text: str
    window_tokens: tuple[int, ...]
    ragged: str
    formats: tuple[str, ...]
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        return sum(group.weights for group in self.groups)

    def kl(self, group: Group, format: str) -> float:
        """Mean KL(original || rounded) in nats per token."""
        return math.fsum(group.option(format).window_kl) / sum(self.window_tokens)

    def bits(self, group: Group, format: str) -> float:
        """Bits for each of the group's weights, scales and all."""
        return 8 * group.option(format).bytes / group.weights

    def worst(self, format: str) -> tuple[Group, ...]:
        """The groups, the one that hurts most first; equals in the model's order."""
        return tuple(sorted(self.groups, key=lambda group: -self.kl(group, format)))

    def to_json(self) -> str:
        """All of it as JSON, a group in a line."""
        fields = {"kind": _KIND, "version": 1, **asdict(self)}
        groups = ",\n".join(json.dumps(group) for group in fields.pop("groups"))
        return json.dumps(fields)[:-1] + f', "groups": [\n{groups}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> Sensitivity:
        """The value again. Raises ValueError for any other text."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ValueError(f"no sensitivities: {error}") from None
        if not isinstance(fields, dict) or fields.pop("kind", None) != _KIND or fields.pop("version", None) != 1:
            raise ValueError(f'no sensitivities: expected a JSON object with "kind": "{_KIND}" and "version": 1')
        try:
            found = Sensitivity(**_tuples(fields, {"groups": _group}))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no sensitivities: {error}") from None
        found._check()
        return found

    @staticmethod
    def read(path: str | Path) -> Sensitivity:
        """The value from a file. Raises ValueError, naming the file, for another kind of file."""
        try:
            return Sensitivity.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _check(self) -> None:
        windows = len(self.window_tokens)
        for group in self.groups:
            names = [option.format for option in group.options]
            if names != list(self.formats):
                raise ValueError(f"{group.name} has the formats {', '.join(names)}, not {', '.join(self.formats)}")
            for option in group.options:
                if len(option.window_kl) != windows or not all(map(math.isfinite, option.window_kl)):
                    raise ValueError(f"{group.name} in {option.format}: expected {windows} finite numbers in window_kl")
        if not self.groups or not windows or group_twice(self.groups):
            raise ValueError("expected at least one group and one window, and no group twice")


def group_twice(groups: Iterable[Group]) -> bool:
    names = [group.name for group in groups]
    return len(set(names)) < len(names)


def _tuples(fields: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as tuples, whose items are made by the functions in ``inner``."""
    out: dict[str, Any] = {}
    for key, value in fields.items():
        out[key] = tuple(inner.get(key, lambda item: item)(item) for item in value) if type(value) is list else value
    return out


def _group(fields: Mapping[str, Any]) -> Group:
    return Group(**_tuples(fields, {"options": lambda option: Option(**_tuples(option, {}))}))
