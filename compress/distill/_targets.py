"""Which weights of a model a format or an adapter is for."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from .._plan import LINEAR, kind_of, matcher


def weights_of(model: Any, targets: Iterable[str], ignore: Iterable[str] = ()) -> dict[str, int]:
    """Names of the weight matrices that patterns for modules match, each with the axis that its product sums over.

    >>> import torch
    >>> weights_of(torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "lm_head": torch.nn.Linear(4, 8)}), ["linear"])
    {'up.weight': -1}

    "linear" stands for linear layers and experts without the output head; a pattern is one of `quantize`'s.
    Raises ValueError for a pattern that matches none, with near names.
    """
    config = model.config.to_dict() if hasattr(model, "config") else {}
    found: dict[str, tuple[str, int]] = {}
    for name, parameter in model.named_parameters():
        kind, axis = kind_of(name, tuple(parameter.shape), config)
        if kind in (LINEAR, "experts", "head"):
            found[name] = kind, axis
    chosen: dict[str, int] = {}
    for pattern in _list(targets):
        if pattern == LINEAR:
            chosen |= {name: axis for name, (kind, axis) in found.items() if kind != "head"}
        else:
            chosen |= {name: found[name][1] for name in _matches(pattern, found, "target")}
    for pattern in _list(ignore):
        for name in _matches(pattern, found, "ignore"):
            chosen.pop(name, None)
    if not chosen:
        raise ValueError("no weight matrix is left of the targets after ignore")
    return {name: chosen[name] for name in found if name in chosen}


def _list(patterns: Iterable[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _matches(pattern: str, names: Iterable[str], role: str) -> list[str]:
    expression = matcher(pattern)
    modules = {name: name.removesuffix(".weight") for name in names}
    found = [name for name, module in modules.items() if expression.fullmatch(module) or expression.fullmatch(name)]
    if not found:
        tails = sorted({module.rpartition(".")[2] for module in modules.values()})
        near = get_close_matches(pattern, [*modules.values(), *tails], n=3, cutoff=0.5) or tails[:8]
        raise ValueError(
            f"{role} pattern {pattern!r} matches no weight matrix; near names: {', '.join(near) or 'none'}"
        )
    return found
