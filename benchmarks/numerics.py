"""How fast numbers are rounded, against copying them: ``python benchmarks/numerics.py``.

Pinned to one core unless ``--threads`` says otherwise; normal random float32. "of memcpy" is the time that
`numpy.copyto` takes to copy the numbers into memory that is already there over the time of the row, both medians
of the same rounds, in which every row has its turn, so that a busy machine slows all of them. "target" is what
the row should reach. Peers: ml_dtypes in the same rounds; microxcaling where ``--microxcaling FOLDER`` has its
checkout (one run on all the numbers).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from halfulp import numerics as hn

ELEMENTWISE = ["e4m3fn", "e5m2", "e3m2", "e2m1", "bf16", "fp16", "int8", "fixed16.9", "nf4", "posit8", "posit16"]
ELEMENTWISE += ["log4.3", "e8m0", "ue5m3", "int4sm"]
BLOCKS = ["mxfp4", "mxfp8", "nvfp4", "int4:g128", "int8:channel", "e4m3fn:tensor", "e4m3fn:128x128"]


class Row(NamedTuple):
    """One thing that is timed, and what part of a copy's speed it should reach."""

    name: str
    work: Callable[[], Any]
    target: float | None = None


def rows(x: np.ndarray) -> list[Row]:
    """Everything that is timed, the copy first."""
    out, tensor = np.empty_like(x), torch.from_numpy(x.copy())
    place = torch.empty_like(tensor)
    rule = hn.Stochastic(seed=1)

    def cast(name: str, source: Any, to: Any, **policy: Any) -> Callable[[], Any]:
        return lambda: hn.cast(source, name, out=to, **policy)

    found = [Row("copy", lambda: np.copyto(out, x)), Row("multiply", lambda: np.multiply(x, np.float32(2), out=out))]
    found += [Row(f"cast {name}", cast(name, x, out), 0.5) for name in ELEMENTWISE]
    found += [Row(f"cast {name}, torch", cast(name, tensor, place), 0.5) for name in ("e4m3fn", "bf16")]
    found += [Row("cast e4m3fn, toward zero", cast("e4m3fn", x, out, rounding="toward_zero"))]
    found += [Row(f"cast {name}, stochastic", cast(name, x, out, rounding=rule), 0.3) for name in ("e4m3fn", "bf16")]
    found += [Row(f"cast {name}", cast(name, x, out), 0.4 if name in ("mxfp4", "nvfp4") else None) for name in BLOCKS]
    found += [Row("cast mxfp4, torch", cast("mxfp4", tensor, place), 0.4)]
    found += [Row(f"encode {name}", lambda name=name: hn.encode(x, name)) for name in ("e4m3fn", "mxfp4", "int4:g128")]
    codes = hn.encode(x, "int4:g128")
    found += [Row("decode int4:g128", lambda: hn.decode(codes))]
    found += [Row("ml_dtypes: encode e4m3fn", lambda: x.astype(ml_dtypes.float8_e4m3fn))]
    return found + jax_rows(x)


def jax_rows(x: np.ndarray) -> list[Row]:
    """In place inside `jax.jit` by donation, and eagerly, where jax is installed."""
    try:
        import jax
    except ImportError:
        return []
    state = {"x": jax.numpy.asarray(x)}
    donated = jax.jit(lambda v: hn.cast(v, "e4m3fn"), donate_argnums=0)

    def in_place() -> None:
        state["x"] = donated(state["x"])
        state["x"].block_until_ready()

    other = jax.numpy.asarray(x)
    return [
        Row("cast e4m3fn, jax.jit, donated", in_place, 0.5),
        Row("cast mxfp4, jax, fresh result", lambda: hn.cast(other, "mxfp4").block_until_ready()),
    ]


def medians(found: list[Row], repeats: int) -> dict[str, float]:
    """Median seconds of each row; the first call, which compiles and builds tables, does not count."""
    times: dict[str, list[float]] = {row.name: [] for row in found}
    for row in found:
        row.work()
    for _ in range(repeats):
        for row in found:
            start = time.perf_counter()
            row.work()
            times[row.name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def microxcaling(folder: str, x: np.ndarray) -> float:
    """Seconds that microxcaling's Python path takes for MXFP4."""
    sys.path.insert(0, folder)
    from mx.mx_ops import quantize_mx_op
    from mx.specs import finalize_mx_specs

    specs = finalize_mx_specs({"scale_bits": 8, "w_elem_format": "fp4", "block_size": 32, "custom_cuda": False})
    tensor = torch.from_numpy(x)
    work = Row("mx", lambda: quantize_mx_op(tensor, specs, elem_format="fp4_e2m1", block_size=32, axes=[-1]))
    return medians([work], 1)["mx"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", type=int, default=2**24, help="numbers to round (default 2**24)")
    parser.add_argument("--repeats", type=int, default=7, help="the median of so many rounds (default 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads, and cores to run on (default 1)")
    parser.add_argument("--microxcaling", metavar="FOLDER", help="a checkout of microxcaling, to compare with")
    options = parser.parse_args()
    if options.size < 2**20 or options.size % 2**12:
        parser.error(f"--size {options.size}: give a multiple of 4096 from 2**20 on, 4096 being the length of a row")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    torch.set_num_threads(options.threads)
    hn.set_threads(options.threads)

    x = np.random.default_rng(0).standard_normal((options.size // 2**12, 2**12), dtype=np.float32)
    found = rows(x)
    seconds = medians(found, options.repeats)
    copy = seconds["copy"]
    print(f"{options.size} float32, {options.threads} thread(s)")
    print(f"{'':32} {'ms':>8} {'of memcpy':>10} {'target':>7}")
    for row in found:
        share = copy / seconds[row.name]
        mark = "" if row.target is None else f"{row.target:7.1f} {'ok' if share >= row.target else 'MISSED'}"
        print(f"{row.name:32} {1e3 * seconds[row.name]:8.1f} {share:10.2f} {mark}")
    peer = seconds["ml_dtypes: encode e4m3fn"] / seconds["encode e4m3fn"]
    print(f"codes of e4m3fn: {peer:.1f} times as fast as ml_dtypes (target 10)")
    if options.microxcaling:
        theirs = microxcaling(options.microxcaling, x)
        for name in ("mxfp4", "nvfp4"):
            print(f"{name}: {theirs / seconds[f'cast {name}']:.0f} times as fast as microxcaling's MXFP4 (target 100)")


if __name__ == "__main__":
    main()
