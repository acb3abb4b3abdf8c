"""Loss scaling: keep small gradients out of the underflow of short formats. State goes in and comes out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .._backend import Array, backend


class LossScale(NamedTuple):
    """The factor on the loss, and the count of good steps since it last changed.

    >>> state = LossScale.dynamic(1024.0, interval=2)
    >>> state.after(True).after(True).scale, state.after(False).scale
    (2048.0, 512.0)

    Multiply the loss with ``scaled``, divide the gradients with ``unscaled``, leave the step out where these
    are not finite, and go on with ``after(finite)``: ``interval`` good steps in a row multiply the scale by
    ``growth``, a bad one multiplies it by ``backoff``, within ``smallest`` to ``largest``. Being a named tuple,
    it goes through jax.jit. Powers of two round nothing. See `scaled_step` for torch optimizers.
    Source: Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2.
    """

    scale: Any = 65536.0
    good: Any = 0
    growth: Any = 2.0
    backoff: Any = 0.5
    interval: Any = 2000
    smallest: Any = 1.0
    largest: Any = 2.0**24

    @classmethod
    def static(cls, scale: float) -> LossScale:
        """A scale that never changes; ValueError unless it is positive."""
        _check(0 < scale < math.inf, f"a loss scale is a positive number, got {scale}")
        return cls(float(scale), 0, 1.0, 1.0, 2000, float(scale), float(scale))

    @classmethod
    def dynamic(
        cls,
        scale: float = 65536.0,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        smallest: float = 1.0,
        largest: float = 2.0**24,
    ) -> LossScale:
        """A scale that follows the gradients; ValueError for numbers with which it could not."""
        _check(growth > 1, f"growth={growth}: above 1, or use LossScale.static")
        _check(0 < backoff < 1, f"backoff={backoff}: between 0 and 1, or use LossScale.static")
        _check(interval >= 1, f"interval={interval}: at least one step")
        _check(0 < smallest <= scale <= largest < math.inf, f"scale={scale}: from smallest={smallest} to {largest}")
        return cls(float(scale), 0, growth, backoff, interval, smallest, largest)

    def scaled(self, loss: Array) -> Array:
        """The loss times the scale."""
        return loss * self.scale

    def unscaled(self, gradients: Any) -> tuple[Any, Any]:
        """Gradients (a list or dict of arrays, or any pytree of jax) over the scale, and whether all are finite.

        >>> LossScale.static(4.0).unscaled([np.float32([4.0, 8.0])])
        ([array([1., 2.], dtype=float32)], True)
        """
        leaves, rebuild = _leaves(gradients)
        leaves = [leaf / self.scale for leaf in leaves]
        finite: Any = True
        for leaf in leaves:
            finite = _isfinite(leaf) & finite
        return rebuild(leaves), finite

    def after(self, finite: Any) -> LossScale:
        """The state after a step whose gradients were all finite, or were not."""
        xp, flag = backend(finite)
        if not hasattr(xp, "jnp") and not any(hasattr(backend(v)[0], "jnp") for v in self):
            return self._next(bool(flag), lambda mask, a, b: a if mask else b, min, max)
        return self._next(finite, xp.where, xp.minimum, xp.maximum)

    def _next(self, finite: Any, where: Any, minimum: Any, maximum: Any) -> LossScale:
        full = self.good + 1 >= self.interval
        grown = where(full, minimum(self.scale * self.growth, self.largest), self.scale)
        scale = where(finite, grown, maximum(self.scale * self.backoff, self.smallest))
        good = where(finite, where(full, 0, self.good + 1), 0)
        return self._replace(scale=scale, good=good)


def scaled_step(optimizer: Any, state: LossScale) -> LossScale:
    """A step of a torch optimizer whose gradients are those of ``state.scaled(loss)``; the next state.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> optimizer, state = torch.optim.SGD([w], lr=0.5), LossScale.dynamic(8.0)
    >>> state.scaled(w.sum()).backward()
    >>> state = scaled_step(optimizer, state)
    >>> w.data
    tensor([0.5000, 0.5000])

    The gradients are divided by the scale in place. Where one is not finite, no step is taken.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for p in parameters:
        p.grad.div_(state.scale)
    finite = all(_isfinite(p.grad) for p in parameters)
    if finite:
        optimizer.step()
    return state.after(finite)


def _isfinite(x: Array) -> Any:
    """Whether all numbers are finite: a bool, or one of jax, which may be traced."""
    xp, x = backend(x)
    if hasattr(xp, "jnp"):
        return xp.jnp.isfinite(x).all()
    return bool(xp.torch.isfinite(x).all() if hasattr(xp, "torch") else np.isfinite(x).all())


def _leaves(tree: Any) -> tuple[list[Any], Any]:
    if isinstance(tree, dict) and not any(isinstance(v, (dict, list, tuple)) for v in tree.values()):
        return list(tree.values()), lambda leaves: dict(zip(tree, leaves))
    if isinstance(tree, (list, tuple)) and not any(isinstance(v, (dict, list, tuple)) for v in tree):
        return list(tree), type(tree)
    import jax

    leaves, structure = jax.tree.flatten(tree)
    return leaves, lambda leaves: jax.tree.unflatten(structure, leaves)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
