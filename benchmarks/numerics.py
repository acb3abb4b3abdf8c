"""How fast numbers are rounded, against copying them: ``python benchmarks/numerics.py``.

One thread, normal random float32. GB/s counts the source's bytes once; "of memcpy" is that rate over the rate
at which `numpy.copyto` copies the float32 numbers into memory that is already there, measured beside it, so
that a busy machine slows both.
"""

import argparse
import statistics
import sys
import time

import ml_dtypes
import numpy as np
import torch

from halfulp import numerics as hn

FORMATS = ["e4m3fn", "e2m1", "bf16", "mxfp4", "nvfp4", "int4:g128"]


def seconds(work, repeats):
    """Median time of a call; the first one, which builds tables, does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=2**24, help="numbers to round (default 2**24)")
    parser.add_argument("--repeats", type=int, default=7, help="the median of so many runs (default 7)")
    options = parser.parse_args()
    if options.size < 2**12 or options.size % 2**12:
        parser.error(f"--size {options.size}: give a multiple of 4096, the length of a row")

    torch.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal((options.size // 2**12, 2**12), dtype=np.float32)
    t = torch.from_numpy(x)
    weights = t.bfloat16()
    copy = np.empty_like(x)

    def cast(name, source):
        return lambda: hn.cast(source, name)

    works = [(f"cast {n}", kind, v, cast(n, v)) for n in FORMATS for kind, v in (("numpy", x), ("torch", t))]
    works += [
        (f"encode {name} of bfloat16", "torch", weights, lambda name=name: hn.encode(weights, name))
        for name in ("int4:g128", "mxfp4")
    ]
    q = hn.encode(weights, "int4:g128")
    works += [
        ("decode int4:g128 to float32", "torch", t, lambda: hn.decode(q)),
        ("pack int4 codes", "torch", t, lambda: hn.pack_codes(q.codes, q.format.element)),
        (
            "astype float8_e4m3fn and back",
            "ml_dtypes",
            x,
            lambda: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        ),
        ("to float8_e4m3fn and back", "torch's own", t, lambda: t.to(torch.float8_e4m3fn).to(torch.float32)),
    ]

    print(f"{options.size} numbers, one thread, median of {options.repeats}")
    print(f"{'':32}{'':12}{'ms':>8}{'GB/s':>8}{'of memcpy':>11}")
    for label, library, source, work in works:
        base = seconds(lambda: np.copyto(copy, x), options.repeats)
        took = seconds(work, options.repeats)
        size = source.numel() * source.element_size() if isinstance(source, torch.Tensor) else source.nbytes
        rate = size / took / 1e9
        print(f"{label:32}{library:12}{took * 1e3:8.1f}{rate:8.2f}{rate / (x.nbytes / base / 1e9):11.3f}")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
