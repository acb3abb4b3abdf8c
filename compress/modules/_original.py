"""What the layers of the uncompressed model see of the same batches, in step with the compressed one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from ..calibrate import lockstep

Inputs = Mapping[int, torch.Tensor]


@contextmanager
def originals(
    model: torch.nn.Module, run: Callable[[int], Any], count: int, names: Sequence[str]
) -> Iterator[Callable[[str], Inputs]]:
    """A function that gives the inputs of a layer, by the number of their batch, asked for in the order of the names.

    run: the model on batch i of ``count``. names: of weights, in the order in which their layers run. Layers that are
    not reached when they are asked for have none.
    """
    rank = {name: i for i, name in enumerate(names)}
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    with closing(lockstep(run, count, modules, lambda i, output: None)) as steps:  # type: ignore[type-var]
        at: list[tuple[str, Inputs] | None] = [None]

        def of(name: str) -> Inputs:
            while at[0] is None or rank[at[0][0]] < rank[name]:
                found = next(steps, None)
                if found is None:
                    return {}
                at[0] = found
            return at[0][1] if at[0][0] == name else {}

        yield of
