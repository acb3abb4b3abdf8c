"""Formats inside attention: of what a layer caches, and of its two products. The value, and the step that gives it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from ..numerics import Block, Fixed, Format, cast, decode, encode
from ..numerics import format as read_format
from ._activations import rounded_input

if TYPE_CHECKING:
    from ._plan import Plan

Static = Literal["tensor", "head"]
MEASURED = {"query": "q_scale", "keys": "k_scale", "values": "v_scale"}
"""What may have static scales, and what a checkpoint calls them."""


@dataclass(frozen=True)
class Attention:
    """The formats of the tensors of attention, None where they stay as they are; see `attention`.

    >>> print(Attention(keys=read_format("int8:token"), values=read_format("int8:token")))
    keys int8:channel, values int8:channel
    """

    query: Format | None = None
    keys: Format | None = None
    values: Format | None = None
    scores: Format | None = None
    probabilities: Format | None = None
    output: Format | None = None
    static: Static | None = None

    @property
    def formats(self) -> dict[str, Format]:
        """Those that are given, by the name of the tensor."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "static"}
        return {name: fmt for name, fmt in found.items() if fmt is not None}

    @property
    def scaled(self) -> tuple[str, ...]:
        """The tensors whose scales a calibration finds."""
        return tuple(name for name in MEASURED if name in self.formats and tensorwide(self.formats[name]))

    @property
    def calibrates(self) -> bool:
        return self.static is not None

    def __str__(self) -> str:
        words = [f"{name} {fmt}" for name, fmt in self.formats.items()]
        if self.static:
            words.append(f"a static scale for each {self.static}")
        return ", ".join(words)

    def plan(self, plan: Plan) -> Plan:
        if plan.attention is not None:
            raise ValueError(f"attention has {plan.attention} by an earlier step; give its formats (kv too) once")
        return plan.update({}, attention=self)

    def apply(self, weight: Any, row: Any, seen: Any = None) -> Any:
        return weight


def attention(
    kv: Format | str | None = None,
    *,
    query: Format | str | None = None,
    keys: Format | str | None = None,
    values: Format | str | None = None,
    scores: Format | str | None = None,
    probabilities: Format | str | None = None,
    output: Format | str | None = None,
    static: Static | None = None,
) -> Attention:
    """Round tensors of attention while the model runs: its KV cache, and what goes in and out of its products.

    >>> print(attention("e4m3fn:tensor", probabilities="e4m3fn", static="tensor"))
    keys e4m3fn:tensor, values e4m3fn:tensor, probabilities e4m3fn, a static scale for each tensor

    Blocks lie along the last axis. In the order in which they come about:
    query: [batch, heads, tokens, head_dim], after rotary embeddings. keys, values: [batch, kv heads, tokens,
    head_dim], rounded once, as they enter the cache; ``kv`` stands for both.
    scores: what queries times keys gives, [batch, heads, tokens, cached tokens], before it is scaled and masked.
    probabilities: what the softmax gives, of the same shape. None is above 1, so that a format such as
    "uint8:tensor" or "e4m3fn:tensor" has the scale at which 1 is its largest number.
    output: what probabilities times values gives, [batch, heads, tokens, head_dim].
    static: "tensor" for one scale for all of a layer's query, keys or values, or "head" for one for each head, from
    the largest magnitudes that a calibration finds, for formats such as "e4m3fn:tensor" and "nvfp4" that have a scale
    of the whole tensor. Checkpoints name them ``k_scale``, ``v_scale`` and ``q_scale``, and say so in the
    ``kv_cache_scheme`` that vLLM reads where keys and values are in one format of 8 bits.
    The softmax itself is computed as the model does. Emulated by `halfulp.load`.

    Raises ValueError for formats that cannot be computed token by token, and where nothing is given.
    """
    given = {"query": query, "keys": kv if keys is None else keys, "values": kv if values is None else values}
    given |= {"scores": scores, "probabilities": probabilities, "output": output}
    made = Attention(**{n: None if f is None else read_format(f) for n, f in given.items()}, static=static)
    if not made.formats:
        raise ValueError(f"attention needs the format of something: {', '.join(('kv', *given))}")
    if static not in (None, *get_args(Static)):
        raise ValueError(f"static={static!r}: choose 'tensor', 'head' or None")
    for name, fmt in made.formats.items():
        _check(name, fmt, static)
    if static and not made.scaled:
        raise ValueError(
            f"static={static!r} is for formats with a scale of the whole tensor, such as e4m3fn:tensor; {made} has none"
        )
    return made


def _check(name: str, fmt: Format, static: Static | None) -> None:
    if isinstance(fmt, Block) and (fmt.axis != -1 or isinstance(fmt.size, tuple)):
        raise ValueError(f"{name}: blocks of {fmt} do not lie along the last axis, of which one token has all")
    if name == "probabilities" and isinstance(fmt, Fixed) and fmt.fraction == 0:
        raise ValueError(f"{name}: numbers from 0 to 1 become 0 or 1 in {fmt}; give {fmt}:tensor or {fmt}:token")
    if not tensorwide(fmt):
        return
    assert isinstance(fmt, Block)
    if fmt.size == "tensor" and fmt.zero_point:
        raise ValueError(f"{name}: a scale of the whole tensor has no zero point here; leave it out of {fmt}")
    if name in MEASURED and static is None:
        raise ValueError(
            f"{name}: the scale of the whole tensor in {fmt} would change with every token; give static='tensor' to "
            f"attention, or a format with scales of its own for each token, such as {fmt.element}:token"
        )
    if name in ("scores", "output"):
        raise ValueError(
            f"{name}: {fmt} has a scale of the whole tensor, which tokens to come would change; give one with scales "
            f"of its own for each token, such as {fmt.element}:token"
        )


def tensorwide(fmt: Format) -> bool:
    """Has the format a scale of the whole tensor?"""
    return isinstance(fmt, Block) and (fmt.size == "tensor" or fmt.tensor_scale is not None)


def scale_for(amax: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The scales of the whole tensor that a format's rule gives largest magnitudes, float32 of their shape; 1 for 0.

    >>> scale_for(torch.tensor([448.0, 0.0, 224.0]), read_format("e4m3fn:tensor")).tolist()
    [1.0, 1.0, 0.5]
    """
    assert isinstance(fmt, Block)
    made = []
    for value in amax.float().flatten().tolist():
        q: Any = encode(torch.tensor([[value or 1.0]]), fmt)
        made.append(q.tensor_scale if fmt.tensor_scale is not None else decode(q.scale, fmt.scale))
        made[-1] = torch.ones(()) if value == 0 else torch.as_tensor(made[-1]).float().reshape(())
    return torch.stack(made).reshape(amax.shape)


def rounded(x: torch.Tensor, fmt: Format, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x in a format, under given scales of the whole tensor, [1] or [heads, 1, 1], where it has such scales."""
    if scale is not None and isinstance(fmt, Block) and fmt.tensor_scale is not None:
        s = scale.to(x.dtype)
        return cast(x / s, replace(fmt, tensor_scale=None)) * s
    return rounded_input(x, fmt, scale)
