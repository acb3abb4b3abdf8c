"""Weights and optimizer state that live in given formats: w <- round(w + update), without a master copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .._format import Format
from .._random import Stochastic
from ._roles import Cast, cast_of

STEPS = "quantized_steps"


def quantize_optimizer(
    optimizer: Any,
    *,
    weights: Format | str | Cast | None = None,
    state: Mapping[str, Format | str | Cast] | None = None,
    rounding: str | Stochastic = Stochastic(),  # noqa: B008  # a frozen value
) -> Any:
    """Make a torch optimizer keep its weights and state in given formats; the same optimizer is returned.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.full((4, 4), 0.3))
    >>> optimizer = quantize_optimizer(torch.optim.Adam([w]), weights="bf16", state={"exp_avg_sq": "e5m2"})
    >>> w.sum().backward()
    >>> optimizer.step()
    >>> bool((w == w.bfloat16().float()).all())
    True

    weights: what each weight is rounded to after every step, w <- round(w - lr u), with the sum formed in the
    tensor's own dtype; they are also rounded when this is called. A parameter group with a key "weights" of its
    own (a format, or None for none) has that instead. state: the same for entries of the optimizer's state by
    name, such as {"exp_avg": "e4m3fn:g128", "exp_avg_sq": Cast("e4m3fn:g128", rounding="up")}.
    rounding: of those given as formats; a `Cast` brings its own. Stochastic roundings draw from a stream for each
    tensor and step. Block formats keep their own axis.

    The number of steps is in the parameter groups, so ``state_dict`` holds it, and a run that goes on from a
    checkpoint (call this first, then load the model's and the optimizer's states) ends with the same bits.
    Weights are in float32 or float64 tensors that hold only numbers of the format: torch would round the
    update of a narrower tensor by itself, and those are refused. Learning rate schedulers work as ever.

    Raises ValueError for narrower weights, a name that the optimizer's state has not (at its first step), a
    second call, or nothing to do.
    """
    casts = {name: _with(cast_of(fmt, f"state[{name!r}]"), fmt, rounding) for name, fmt in (state or {}).items()}
    own = _with(cast_of(weights, "weights=..."), weights, rounding)
    groups = optimizer.param_groups
    if own is None and not casts and not any(group.get("weights") for group in groups):
        raise ValueError("nothing to quantize: give weights or state")
    if getattr(optimizer, "quantized", None):
        raise ValueError("this optimizer has been quantized: call quantize_optimizer once")
    fresh = not any(STEPS in group for group in groups)
    for group in groups:
        group.setdefault(STEPS, 0)
        if (kind := _short(group, own, rounding)) is not None:
            raise ValueError(
                f"a weight of {kind}: the update is rounded once, from float32 or float64; keep weights in such "
                f"tensors, the format says what they hold"
            )
    if fresh:
        _round_weights(optimizer, own, rounding, lambda p: True)
    optimizer.register_step_post_hook(lambda optimizer, *_: _after_step(optimizer, own, casts, rounding))
    optimizer.quantized = (own, casts)
    return optimizer


def _with(how: Cast | None, given: Any, rounding: str | Stochastic) -> Cast | None:
    """A cast given as a format takes the common rounding."""
    return how if how is None or isinstance(given, Cast) else Cast(how.format, rounding)


def _weights_of(group: Mapping[str, Any], own: Cast | None, rounding: Any) -> Cast | None:
    if "weights" not in group:
        return own
    return _with(cast_of(group["weights"], "a parameter group's weights"), group["weights"], rounding)


def _short(group: Mapping[str, Any], own: Cast | None, rounding: Any) -> Any:
    if _weights_of(group, own, rounding) is None:
        return None
    return next((p.dtype for p in group["params"] if p.dtype.itemsize < 4), None)


def _round_weights(optimizer: Any, own: Cast | None, rounding: Any, wanted: Callable[[Any], bool]) -> None:
    place = 0
    for group in optimizer.param_groups:
        how = _weights_of(group, own, rounding)
        for p in group["params"]:
            if how is not None and wanted(p):
                p.data.copy_(how.stream(f"weight/{place}", group[STEPS])(p.data))
            place += 1


def _after_step(optimizer: Any, own: Cast | None, casts: Mapping[str, Any], rounding: Any) -> None:
    for group in optimizer.param_groups:
        group[STEPS] = group.get(STEPS, 0) + 1  # a group that was added later begins here
    _round_weights(optimizer, own, rounding, lambda p: p.grad is not None)
    place = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            entries = optimizer.state.get(p, {})
            for name, how in casts.items():
                if p.grad is None:
                    continue
                if name not in entries:
                    names = ", ".join(entries) or "nothing, it is empty"
                    raise ValueError(f"the optimizer's state has no {name!r}: choose from {names}")
                if entries[name] is not None:
                    entries[name].copy_(how.stream(f"{name}/{place}", group[STEPS])(entries[name]))
            place += 1


class QuantizedState(NamedTuple):
    """The state of a transform's own optimizer, and the number of steps."""

    inner: Any
    steps: Any


class Transform(NamedTuple):
    """A pair of pure functions: ``init(params) -> (params, state)`` and
    ``step(gradients, state, params, finite=True) -> (params, state)``."""

    init: Callable[..., Any]
    step: Callable[..., Any]


def quantize_updates(
    inner: Any,
    *,
    weights: Format | str | Cast | None = None,
    state: Mapping[str, Format | str | Cast] | None = None,
    rounding: str | Stochastic = Stochastic(),  # noqa: B008  # a frozen value
) -> Transform:
    """What `quantize_optimizer` does, for jax: a pair of pure functions around an optax-like transform.

    >>> import jax.numpy as jnp
    >>> from typing import NamedTuple
    >>> class Sgd(NamedTuple):
    ...     init = staticmethod(lambda params: ())
    ...     update = staticmethod(lambda g, state, params: (-0.5 * g, state))
    >>> init, step = quantize_updates(Sgd(), weights="e4m3fn", rounding="nearest_even")
    >>> w, state = init(jnp.float32([1.03, 2.0]))
    >>> step(jnp.float32([0.2, 0.1]), state, w)[0]
    Array([0.875, 2.   ], dtype=float32)

    inner: anything with ``init(params)`` and ``update(gradients, state, params)``, such as an optax optimizer;
    params and state are any pytrees. weights: what w + update is rounded to. state: formats by name: every
    array below a field or key of that name (optax's Adam has "mu" and "nu"). rounding: as there.

    Where ``finite`` (a bool, traced or not; see `LossScale`) is false, the step changes nothing but the count.
    Raises ValueError for a name that the state has not, or nothing to do.
    """
    casts = {name: _with(cast_of(fmt, f"state[{name!r}]"), fmt, rounding) for name, fmt in (state or {}).items()}
    own = _with(cast_of(weights, "weights=..."), weights, rounding)
    if own is None and not casts:
        raise ValueError("nothing to quantize: give weights or state")
    import jax
    import jax.numpy as jnp

    def is_real(x: Any) -> bool:
        return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)

    def round_weights(params: Any, steps: Any) -> Any:
        def one(path: Any, w: Any) -> Any:
            if own is None or not is_real(w):
                return w
            if w.dtype.itemsize < 4:
                raise ValueError(f"a weight of {w.dtype}: the update is rounded once, from float32 or float64")
            return own.stream(f"weight/{jax.tree_util.keystr(path)}", steps)(w)

        return jax.tree_util.tree_map_with_path(one, params)

    def round_state(inner_state: Any, steps: Any) -> Any:
        seen: set[str] = set()

        def one(path: Any, x: Any) -> Any:
            words = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
            name = next((word for word in words if word in casts), None)
            if name is None or not is_real(x):
                return x
            seen.add(name)
            return casts[name].stream(f"{name}/{jax.tree_util.keystr(path)}", steps)(x)  # type: ignore[union-attr]

        rounded = jax.tree_util.tree_map_with_path(one, inner_state)
        if missing := [name for name in casts if name not in seen]:
            raise ValueError(f"the optimizer's state has no {missing[0]!r}: it is {inner_state}")
        return rounded

    def init(params: Any) -> tuple[Any, QuantizedState]:
        params, steps = round_weights(params, jnp.int32(0)), jnp.int32(0)
        return params, QuantizedState(round_state(inner.init(params), steps), steps)

    def step(gradients: Any, state: QuantizedState, params: Any, finite: Any = True) -> tuple[Any, QuantizedState]:
        steps = state.steps + 1
        updates, new = inner.update(gradients, state.inner, params)
        weights = round_weights(jax.tree.map(lambda w, u: w + u, params, updates), steps)
        kept = (weights, round_state(new, steps)), (params, state.inner)
        weights, new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), *kept)
        return weights, QuantizedState(new, steps)

    return Transform(init, step)
