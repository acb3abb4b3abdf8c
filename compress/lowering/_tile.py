"""The smallest kernel that shows what a matrix unit takes: one tile after the other, multiplied as the operands are."""

from __future__ import annotations

from typing import Any

SIDE, STEPS = 512, 8


def tile(x: str, w: str, way: str) -> tuple[Any, list[Any]]:
    """``STEPS`` tiles of x [512, 512] times one of w, both jax dtypes by name; the function and its shapes.

    way: "direct", or the dtype that both are converted to in the kernel. Sums are int32 for integers, else float32.
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    names = (x, w) if way == "direct" else (way, way)
    total = jnp.int32 if all(name.startswith("int") for name in names) else jnp.float32

    def kernel(left: Any, right: Any, out: Any) -> None:
        a, b = (v[...] if way == "direct" else v[...].astype(way) for v in (left, right))
        out[...] = jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=total)

    call = pl.pallas_call(
        kernel,
        grid=(STEPS,),
        in_specs=[pl.BlockSpec((SIDE, SIDE), lambda i: (i, 0)), pl.BlockSpec((SIDE, SIDE), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((SIDE, SIDE), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((STEPS * SIDE, SIDE), total),
        name="tile",
    )
    return call, [jax.ShapeDtypeStruct((STEPS * SIDE, SIDE), x), jax.ShapeDtypeStruct((SIDE, SIDE), w)]
