"""The schedule's cycles against what is known: ``python benchmarks/lowering.py``, with libtpu installed.

Two references: the times of bfloat16 matmuls on a v5e that jax publishes with its guide to Pallas matmuls
(docs/pallas/tpu/matmul.ipynb, jax 0.10.2), less 105 microseconds of dispatch, which is what its smallest XLA matmul
has beyond its own work; and ``estimated_cycles``, XLA's own figure for a fusion, in the compiled text.
"""

import re
import sys
from pathlib import Path

from halfulp.compress.lowering import Job, compile_jobs, execute, target

DISPATCH = 105.0
# sides of the matrices, the kernel's tiles or None for XLA's own, and the published microseconds
PUBLISHED = [
    (1024, (128, 128, 128), 298),
    (4096, (128, 128, 128), 11771),
    (4096, (512, 1024, 1024), 889),
    (8192, (512, 1024, 1024), 6099),
    (4096, None, 827),
    (8192, None, 6047),
]


def matmul(side, tiles):
    """A bfloat16 matmul of square matrices, by a kernel with tiles (m, k, n) or by XLA."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shapes = [jax.ShapeDtypeStruct((side, side), jnp.bfloat16)] * 2
    if tiles is None:
        return lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.bfloat16), shapes
    m, k, n = tiles

    def kernel(x, w, out, total):
        @pl.when(pl.program_id(2) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == side // k - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(side // m, side // n, side // k),
        in_specs=[pl.BlockSpec((m, k), lambda i, j, s: (i, s)), pl.BlockSpec((k, n), lambda i, j, s: (s, j))],
        out_specs=pl.BlockSpec((m, n), lambda i, j, s: (i, j)),
        out_shape=shapes[0],
        scratch_shapes=[pltpu.VMEM((m, n), jnp.float32)],
        name="matmul",
    )
    return call, shapes


def measured():
    """Rows: side, tiles, microseconds by the schedule, published less dispatch, cycles, XLA's own estimate."""
    v5e = target("v5e")
    jobs = [
        Job(f"matmul{i}", "lowering:matmul", v5e, {"side": side, "tiles": tiles})
        for i, (side, tiles, _) in enumerate(PUBLISHED)
    ]
    rows = []
    for (side, tiles, published), compiled in zip(PUBLISHED, compile_jobs(jobs, path=Path(__file__).parent)):
        if compiled.error is not None:
            sys.exit(f"{side} {tiles}: {compiled.error}")
        cycles = sum(execute(program, v5e).cycles for name, program in compiled.programs.items() if name != "TLP")
        estimate = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.text))) or None
        rows.append((side, tiles, cycles / v5e.clock * 1e6, published - DISPATCH, cycles, estimate))
    return rows


def main():
    """Print the table."""
    print("| matmul of bfloat16, v5e | schedule, us | published, us | ratio | cycles | XLA's estimate | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for side, tiles, found, published, cycles, estimate in measured():
        what = f"{side}^3, " + ("XLA" if tiles is None else f"tiles {'x'.join(map(str, tiles))}")
        own = "| | |" if estimate is None else f"| {estimate} | {cycles / estimate:.3f} |"
        print(f"| {what} | {found:.0f} | {published:.0f} | {found / published:.3f} | {cycles} {own}")


if __name__ == "__main__":
    main()
