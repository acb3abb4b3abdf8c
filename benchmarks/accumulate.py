"""How fast sums are emulated: ``OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/accumulate.py``.

A product of two square matrices of normal deviates under each accumulator, one thread, the whole call from float32
operands (their formats are checked, exponents taken) to the float32 result. MAC/s counts a multiplication with its
addition once; "of sgemm" is that rate over that of numpy's float32 product, measured just before. Times are the best
of some, so that a busy machine disturbs them least. With ``--mma-sim`` (a checkout of github.com/microsoft/MMA-Sim)
Hopper's FP8 instruction is timed there too, on one instruction's worth of operands, and its result compared.
"""

import argparse
import os
import sys
import time
from dataclasses import replace

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # before numpy reads it

import numpy as np  # noqa: E402

from halfulp import numerics as hn  # noqa: E402

# accumulator and the format of its operands
CASES = [
    ("hopper-fp8", "e4m3fn"),
    ("hopper-fp8-fp16", "e4m3fn"),
    ("chunked:128:hopper-fp8", "e4m3fn"),
    ("hopper-mma-fp8", "e4m3fn"),
    ("ada-fp8", "e4m3fn"),
    ("blackwell-fp8", "e4m3fn"),
    ("hopper-fp16", "fp16"),
    ("hopper-bf16", "bf16"),
    ("hopper-tf32", "fp32"),
    ("ampere-fp16", "fp16"),
    ("volta-fp16", "fp16"),
    ("blackwell-mxfp8", "mxfp8"),
    ("blackwell-nvfp4", "nvfp4"),
    ("cdna1-fp16", "fp16"),
    ("cdna2-bf16", "bf16"),
    ("cdna3-fp16", "fp16"),
    ("cdna3-fp8", "e4m3fnuz"),
    ("fp32", "fp32"),
    ("fp32:product=fp32", "fp32"),
    ("fp32:toward_zero", "fp32"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("pairwise:fp32", "fp32"),
    ("chunked:128", "fp32"),
    ("exact", "e4m3fn"),
    ("exact", "bf16"),
    ("exact", "fp32"),
    ("int32", "int8"),
    ("int16:saturate", "int8"),
]


def best(work, repeats):
    """The shortest time of a call after the first, which compiles."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def operands(rng, fmt, n):
    """Two matrices in a format; blocks encoded along the inner axis."""
    a, b = (rng.standard_normal((n, n)).astype(np.float32) * (20 if fmt == "int8" else 1) for _ in range(2))
    if isinstance(hn.format(fmt), hn.Block):
        return hn.encode(a, fmt), hn.encode(b, replace(hn.format(fmt), axis=-2))
    return hn.cast(a, fmt), hn.cast(b, fmt)


def against_mma_sim(path, repeats):
    """Print the time of one Hopper FP8 instruction there and here."""
    import torch

    sys.path.insert(0, path)
    from mmasim.simulator import nv_ptx

    model = nv_ptx.wgmma("Hopper", "m64n8k32.f32.e4m3.e4m3")
    a, b = operands(np.random.default_rng(1), "e4m3fn", 64)
    a, b = a[:, :32].copy(), b[:32, :8].copy()
    x, y = (torch.from_numpy(v).to(torch.float8_e4m3fn) for v in (a, b))
    c = torch.zeros(64, 8)
    equal = np.array_equal(model(x, y, c).numpy(), hn.matmul(a, b, "hopper-fp8"))
    macs = 64 * 8 * 32
    there = best(lambda: model(x, y, c), repeats)
    print(f"\nMMA-Sim, wgmma m64n8k32 of FP8: {macs / there:.3g} MAC/s; the results are {'' if equal else 'NOT '}equal")
    return macs / there


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=512, help="rows, columns and products of a sum (default 512)")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many runs (default 7)")
    parser.add_argument("--mma-sim", help="path to a checkout of microsoft/MMA-Sim, to compare with")
    options = parser.parse_args()
    rng, n = np.random.default_rng(0), options.size
    slow = against_mma_sim(options.mma_sim, 3) if options.mma_sim else None
    a, b = operands(rng, "fp32", n)
    print(f"\n{n} x {n} x {n}, one thread\n")
    print(f"{'accumulator':24} {'operands':10} {'ms':>8} {'MAC/s':>10} {'of sgemm':>9}" + " of MMA-Sim" * bool(slow))
    for name, fmt in [("sgemm (numpy)", "fp32"), *CASES]:
        x, y = operands(rng, fmt, n)
        plain = best(lambda: a @ b, options.repeats)
        work = (lambda: x @ y) if name.startswith("sgemm") else (lambda: hn.matmul(x, y, name))  # noqa: B023
        took = best(work, options.repeats)
        rate = n**3 / took
        ratio = f" {rate / slow:10.0f}" if slow else ""
        print(f"{name:24} {fmt:10} {took * 1e3:8.2f} {rate:10.2e} {plain / took:9.4f}{ratio}")


if __name__ == "__main__":
    main()
