"""Many forwards of one module, all paused at the same inner module until it has been dealt with.

To calibrate the layers of a block one after the other, each on what the compressed ones before it give, a plain
walk runs the block again for every layer. Here each sequence's forward is a coroutine (of the package greenlet) that
stops where an inner module is called; when all that can come have come, the caller sees their inputs, replaces the
weights, and the forwards go on. Every matmul is done once, and only what a forward itself still needs is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from greenlet import getcurrent, greenlet

Inputs = dict[int, torch.Tensor]


class _Run:
    """One forward, which runs only while it is let go."""

    def __init__(self, index: int, work: Callable[[int], Any]) -> None:
        self.index = index
        self.at: str | None = None
        self.input: torch.Tensor | None = None
        self.forward = greenlet(lambda: work(index))

    def go_on(self) -> Any:
        """Run until the next pause or the end; what the forward returns. Raises what it raises."""
        self.at = self.input = None
        return self.forward.switch()

    def pause(self, name: str, x: torch.Tensor) -> None:
        self.at, self.input = name, x
        self.forward.parent.switch()


def lockstep(
    work: Callable[[int], Any], count: int, modules: Mapping[str, torch.nn.Module], results: Callable[[int, Any], None]
) -> Iterator[tuple[str, Inputs]]:
    """Each of ``modules`` once, with the inputs that it is about to be called with, while its callers wait.

    >>> layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> x = torch.ones(3, 1, 2)
    >>> outputs = {}
    >>> for name, inputs in lockstep(lambda i: layer(x[i]), 3, dict(layer.named_children()), outputs.__setitem__):
    ...     print(name, sorted(inputs))
    0 [0, 1, 2]
    1 [0, 1, 2]
    >>> sorted(outputs)
    [0, 1, 2]

    work: called as ``work(i)`` for i in 0 ... count - 1; a forward through some of the modules. modules: by name,
    in the order in which a forward calls them; where forwards wait at several, the first of these is served. A
    module that no forward calls is not yielded; the second call of one goes through. results: called with
    ``(i, work(i))`` as each forward ends. What a forward raises is raised here, and the others are unwound; so
    they are when the iterator is closed.
    """
    rank = {name: k for k, name in enumerate(modules)}
    served: set[str] = set()
    runs: dict[Any, _Run] = {}

    def hook(name: str) -> Callable[..., None]:
        def before(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            run = runs.get(getcurrent())
            if run is not None and name not in served:
                run.pause(name, args[0])

        return before

    def advance(run: _Run) -> None:
        result = run.go_on()
        if run.forward.dead:
            del runs[run.forward]
            results(run.index, result)

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    try:
        for i in range(count):
            run = _Run(i, work)
            runs[run.forward] = run
            advance(run)
        while runs:
            name = min((run.at for run in runs.values() if run.at is not None), key=rank.__getitem__)
            ready = [run for run in runs.values() if run.at == name]
            yield name, {run.index: run.input for run in ready if run.input is not None}
            served.add(name)
            for run in ready:
                advance(run)
    finally:
        for forward in list(runs):
            forward.throw()
        for handle in handles:
            handle.remove()
