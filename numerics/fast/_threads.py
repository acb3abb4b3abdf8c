"""Threads that round: pieces of a tensor, each by one thread. The result does not depend on how many there are."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

P = TypeVar("P")

LARGE = 1 << 19  # elements a thread gets at least
_state: dict[str, int | None] = {"threads": None}
_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def set_threads(n: int | None) -> None:
    """How many threads `cast`, `encode` and `decode` of large arrays use on a CPU.

    >>> set_threads(2)
    >>> set_threads(None)

    None, as it is at first: as many as this process may use, but no more than torch is set to
    (`torch.set_num_threads`). The bits are the same for any number. Raises ValueError below 1.
    """
    if n is not None and (not isinstance(n, int) or n < 1):
        raise ValueError(f"threads: a whole number from 1, or None for the default, got {n!r}")
    _state["threads"] = n


def threads() -> int:
    """The number of threads in force."""
    if _state["threads"] is not None:
        return _state["threads"]
    try:
        n = len(os.sched_getaffinity(0))
    except AttributeError:
        n = os.cpu_count() or 1
    torch: Any = sys.modules.get("torch")
    return min(n, torch.get_num_threads()) if hasattr(torch, "get_num_threads") else n


def share(pieces: Sequence[P], size: int, work: Callable[[Sequence[P]], None]) -> None:
    """``work`` on all the pieces of an array of ``size`` elements, some at a time in each thread."""
    n = min(threads(), size // LARGE, len(pieces))
    if n <= 1:
        work(pieces)
        return
    # several shares a thread, so that one that was held up holds up no other
    step = max(1, -(-len(pieces) // (4 * n)))
    shares = [pieces[i : i + step] for i in range(0, len(pieces), step)]
    rest = iter(shares)
    taken = threading.Lock()

    def run() -> None:
        while True:
            with taken:
                mine = next(rest, None)
            if mine is None:
                return
            work(mine)

    others = [_pool(n - 1).submit(run) for _ in range(n - 1)]
    try:
        run()
    finally:
        for other in others:
            other.result()


def _pool(n: int) -> ThreadPoolExecutor:
    """``n`` threads at least; kept, and asleep while there is no work. A fork has none of its parent's threads."""
    with _lock:
        key = os.getpid()
        pool = _pools.get(key)
        if pool is None or pool._max_workers < n:
            _pools.clear()
            pool = _pools[key] = ThreadPoolExecutor(n, thread_name_prefix="halfulp")
        return pool
