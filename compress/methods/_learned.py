"""Rounding learned by gradients of a decoder block's output error, for any block format.

All layers of a block are learned together. A step runs it, with the weights that free variables make, on some of the
calibration's sequences, and moves the variables down the gradient: AutoRound's (`_Signed`) or BRECQ's (`_Soft`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.func import functional_call
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from ._gptq import Rounded
from ._learning import Learning

Tensor = torch.Tensor
Run = Callable[[int], Tensor]
Layers = Mapping[str, torch.nn.Linear]
_LOW, _HIGH = -0.1, 1.1  # gamma and zeta, between which AdaRound's sigmoid is stretched (arXiv 2004.10568, equation 23)
_ADAM = (0.9, 0.999, 1e-10)  # the last far below any gradient, which are as small as a weight's share of the loss


def learn(
    run: Run,
    count: int,
    layers: Layers,
    start: Mapping[str, Rounded],
    targets: Run,
    options: Learning,
    keep: Mapping[str, np.ndarray] | None = None,
) -> dict[str, Rounded]:
    """Roundings of a block's layers under which its output is nearer to the targets, or those of the start.

    >>> from ._gptq import gptq
    >>> from ._grid import grid_of
    >>> generator = torch.Generator().manual_seed(0)
    >>> layer, mix = torch.nn.Linear(16, 16, bias=False), torch.randn(16, 16, generator=generator)
    >>> _ = torch.nn.init.normal_(layer.weight, generator=generator)
    >>> x = torch.randn(2, 48, 16, generator=generator) @ mix
    >>> goal = [layer(v).detach() for v in x]
    >>> nearest = {"up": gptq(layer.weight.detach().numpy(), np.eye(16), grid_of("int3:g8").fmt)}
    >>> block = lambda i: layer(x[i]), 2, {"up": layer}
    >>> found = learn(*block, nearest, goal.__getitem__, Learning("soft", steps=100, every=50))
    >>> block_loss(*block, found, goal.__getitem__) < block_loss(*block, nearest, goal.__getitem__)
    True

    run: the whole block's forward for calibration sequence i of ``count``, a tensor, differentiable with respect to
    the weights of the ``layers``, which are modules with ``weight`` [out, n] inside of it. targets: the original
    block's output for sequence i, of the same shape. start: each layer's rounding to begin with, by GPTQ or to
    nearest (GPTQ with the identity for a Hessian). keep: by layer, False for weights that are zero in the start and
    stay so.

    A weight w lies at p = w / s + z in its grid, s being the start's scale, but never further than 0.45 gaps ("soft":
    0.1) from the number that the start gave it, so that both rules begin at the start.
    "sign" (AutoRound): it becomes the number nearest to p + V, V from -0.5 to 0.5 in units of the gap between the
    grid's numbers there. V follows the sign of its gradient, which passes the rounding straight through.
    "soft" (BRECQ, with AdaRound's variables, by Adam): it lies a share h of the gap above the number below p, and a
    penalty that sharpens with the steps drives h to 0 or 1. Its gradients are true ones, and its steps do not go far
    from the start: it is the choice from a start by GPTQ, "sign" from one to nearest.
    With both, each group's scale becomes s times 2^t, t from -1 to 1 by the sign of its gradient, rounded to its format
    straight through; unlike AutoRound's it does not change which numbers are chosen. Zero points, tensor scales stay.

    The mean squared error of the result, over the sequences that are checked, is never above the start's; if none is
    below it, the start itself comes back. The same seed, inputs and number of threads give the same bits.

    The layers' own weights are not touched: others take their place within each forward, in the weights' dtype.
    Gradients are on, even within torch.inference_mode; tensors made under it (hidden states, masks, norms) are cloned
    as they are used, parameters once. In memory are, for each weight, 20 bytes ("soft": 32) and one layer's
    intermediates, and what one sequence's forward keeps for its gradient; the sequences of a batch come one by one.

    Raises ValueError for layers without a start, shapes that do not belong together, weights or outputs with NaN or
    infinity, and masked weights that are not zero in the start.
    Sources: Cheng et al., "Optimize weight rounding via signed gradient descent" (arXiv 2309.05516), equation 3 and
    algorithm 1; Li et al., "BRECQ" (arXiv 2102.05426), without weights from Fisher's diagonal; Nagel et al., "Up or
    down?" (arXiv 2004.10568), equations 21 to 24.
    """
    masks = keep or {}
    _check(count, layers, start, masks)
    generator, checked = torch.Generator().manual_seed(options.seed), list(range(count))
    if options.check is not None:
        checked = sorted(torch.randperm(count, generator=generator)[: options.check].tolist())
    # every sequence comes once before any comes again
    epochs = options.steps // -(-count // options.batch) + 1
    orders = [torch.randperm(count, generator=generator).split(options.batch) for _ in range(epochs)]
    batches = [batch.tolist() for order in orders for batch in order]
    kind = _Soft if options.rule == "soft" else _Signed
    with torch.inference_mode(False), torch.enable_grad(), _Ordinary():
        block = _Block(run, layers, targets)
        first = least = block.loss(_tensors(start, layers), checked)
        block.loss(_tensors(start, layers), sorted(set(range(count)) - set(checked)))  # is any of them not finite?
        best = dict(start)
        free = {name: kind.of(layer.weight, start[name], masks.get(name)) for name, layer in layers.items()}
        for t in range(options.steps if first > 0 else 0):
            gradients, size = block.gradients({name: v.weight() for name, v in free.items()}, batches[t])
            for name in free:
                free[name] = free[name].step(gradients.pop(name).float() / (size * first), t, options)
            if (t + 1) % options.every == 0 or t + 1 == options.steps:
                rounded = {name: v.rounded() for name, v in free.items()}
                loss = block.loss(_tensors(rounded, layers), checked, later=True)
                if loss < least:
                    best, least = rounded, loss
    return best


def block_loss(run: Run, count: int, layers: Layers, rounded: Mapping[str, Rounded], targets: Run) -> float:
    """The mean squared error of a block's outputs with these roundings of its layers; arguments as in `learn`."""
    _check(count, layers, rounded, {})
    return _Block(run, layers, targets).loss(_tensors(rounded, layers), list(range(count)))


def _check(count: int, layers: Mapping[str, Any], start: Mapping[str, Rounded], keep: Mapping[str, np.ndarray]) -> None:
    if count < 1 or not layers:
        raise ValueError(f"{count} sequences and {len(layers)} layers: give at least one of each")
    if odd := sorted((set(layers) ^ set(start)) | (set(keep) - set(layers))):
        where = [n for n, m in (("layers", layers), ("start", start), ("keep", keep)) if odd[0] in m]
        raise ValueError(f"{odd[0]} is only in {', '.join(where)}: give layer and start")
    for name, layer in layers.items():
        shape = tuple(layer.weight.shape)
        for what, given in (("start", start[name].index.shape), ("mask", np.shape(keep.get(name, layer.weight)))):
            if tuple(given) != shape:
                raise ValueError(f"{name} has a weight of shape {list(shape)} and a {what} of {list(given)}")
        if not torch.isfinite(layer.weight).all():
            raise ValueError(f"{name} holds NaN or infinity, of which no rounding can be learned")
        if name in keep and start[name].values()[~np.asarray(keep[name], bool)].any():
            raise ValueError(f"{name}: keep masks weights that are not zero in the start")


class _Ordinary(TorchFunctionMode):
    """Tensors made in inference mode, which no gradient can be kept for, are cloned as they are used."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a getter tells of a tensor and keeps nothing of it
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        return func(*self._ordinary(args), **{k: self._ordinary(v) for k, v in (kwargs or {}).items()})

    def _ordinary(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._clone(x) if x.is_inference() else x
        return type(x)(self._ordinary(v) for v in x) if type(x) in (tuple, list) else x

    def _clone(self, x: Tensor) -> Tensor:
        if isinstance(x, torch.nn.Parameter) and id(x) not in self._kept:
            self._kept[id(x)] = x, x.detach().clone()
        return self._kept[id(x)][1] if id(x) in self._kept else x.clone()


class _Block(torch.nn.Module):
    """A block of which nothing is known but the layers and how it runs, with other weights in their place."""

    def __init__(self, run: Run, layers: Layers, targets: Run) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers.values())
        self._keys = {name: f"layers.{j}.weight" for j, name in enumerate(layers)}
        self.forward, self._targets = run, targets

    def _error(self, weights: Mapping[str, Tensor], i: int) -> tuple[Tensor, int]:
        """The squared error of sequence i, and over how many numbers it is a sum."""
        goal = self._targets(i)
        out = functional_call(self, {self._keys[name]: w for name, w in weights.items()}, (i,))
        if out.shape != goal.shape:
            raise ValueError(f"sequence {i}: the block gives {list(out.shape)}, the target is {list(goal.shape)}")
        return (out.float() - goal.to(out.device).float()).square().sum(dtype=torch.float64), out.numel()

    @torch.no_grad()
    def loss(self, weights: Mapping[str, Tensor], sequences: list[int], later: bool = False) -> float:
        """The mean squared error. Only ``later``, after the start, may it be infinite or NaN."""
        total, size = 0.0, 0
        for i in sequences:
            error, numbers = self._error(weights, i)
            if not later and not torch.isfinite(error):
                whose = "output" if torch.isfinite(self._targets(i)).all() else "target"
                raise ValueError(f"sequence {i}: the block's {whose} holds NaN or infinity, or what squares to it")
            total, size = total + float(error), size + numbers
        return total / max(size, 1)

    def gradients(self, weights: Mapping[str, Tensor], batch: list[int]) -> tuple[dict[str, Tensor], int]:
        """Of the summed squared error with respect to each weight, and over how many numbers it is a sum."""
        dtypes = {name: self.get_parameter(key).dtype for name, key in self._keys.items()}
        leaves = {name: w.to(dtypes[name]).requires_grad_() for name, w in weights.items()}
        size = 0
        for i in batch:
            error, numbers = self._error(leaves, i)
            # what overflows now has nothing to say of the way back
            if error.requires_grad and torch.isfinite(error):
                error.backward()
                size += numbers
        # a layer that these tokens never reached, an expert, has none
        found = {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}
        return {name: g.nan_to_num_(0, 0, 0) for name, g in found.items()}, max(size, 1)


def _tensors(rounded: Mapping[str, Rounded], layers: Layers) -> dict[str, Tensor]:
    return {name: torch.as_tensor(rounded[name].values()).to(layer.weight) for name, layer in layers.items()}


@dataclass(frozen=True, eq=False)
class _Held:
    """What stays while a layer [out, n] in groups of ``per`` columns is learned.

    position [out, n]: where each weight lies in the grid, as an index with a fraction: 2.5 is half-way between the
    third number and the fourth. So offsets count in gaps, and the nearest number's index is the position rounded.
    scale, float64, and shift [out, groups]; scales: all that there may be; free [out, n]: False for masked weights.
    """

    start: Rounded
    levels: Tensor
    gaps: Tensor
    position: Tensor
    scale: Tensor
    scales: Tensor
    shift: Tensor
    per: int
    free: Tensor | None

    def spread(self, x: Tensor) -> Tensor:
        """[out, groups] to [out, n]."""
        return x.repeat_interleave(self.per, 1)[:, : self.position.shape[1]]

    def masked(self, x: Tensor) -> Tensor:
        return x if self.free is None else torch.where(self.free, x, 0)

    def nearest(self, position: Tensor) -> Tensor:
        """The index that a position rounds to; a tie takes the lower, as in the loops of GPTQ."""
        return (position.clamp(0, len(self.levels) - 1) - 0.5).ceil().int()

    def scaled(self, octaves: Tensor) -> Tensor:
        """The start's scales times 2^octaves, in the format of scales, float64."""
        wanted = self.scale * octaves.double().exp2()
        if len(self.scales):
            return self.scales[torch.bucketize(wanted, (self.scales[1:] * self.scales[:-1]).sqrt())]
        single = wanted.float().double()
        return torch.where((single > 0) & single.isfinite(), single, self.scale)

    def weight(self, level: Tensor, octaves: Tensor) -> Tensor:
        return self.masked((level - self.spread(self.shift)) * self.spread(self.scaled(octaves).float()))

    def turned(self, octaves: Tensor, g: Tensor, rate: float) -> Tensor:
        """Octaves after a step; the sum of g [out, n] over a group is the gradient of its scale."""
        slope = pad(g, (0, -g.shape[1] % self.per)).unflatten(1, (-1, self.per)).sum(2)
        return (octaves - rate * slope.sign()).clamp(-1, 1)

    def rounded(self, place: Tensor, octaves: Tensor) -> Rounded:
        index = place.cpu().numpy()
        if self.free is not None:
            index = np.where(self.free.cpu().numpy(), index, self.start.index)
        return replace(self.start, index=index, scale=self.scaled(octaves).cpu().numpy())


def _held(weight: Tensor, start: Rounded, keep: Any, width: float) -> _Held:
    """A layer at its start; positions are moved to no further than ``width`` from those of the start's numbers."""
    grid, device = start.grid, weight.device
    levels, shift = (torch.as_tensor(a, dtype=torch.float32, device=device) for a in (grid.values, start.shift))
    tables = start.scale, grid.scales * start.tensor_scale
    scale, scales = (torch.as_tensor(a, dtype=torch.float64, device=device) for a in tables)
    gaps = levels.diff() if len(levels) > 1 else torch.ones_like(levels)
    free = None if keep is None else torch.as_tensor(np.array(keep, bool), device=device)
    per = grid.fmt.size if isinstance(grid.fmt.size, int) else weight.shape[1]
    held = _Held(start, levels, gaps, weight, scale, scales, shift, per, free)
    x = weight.detach().float() / held.spread(scale.float().clamp(min=torch.finfo(torch.float32).tiny))
    x = (x + held.spread(shift)).clamp(levels[0], levels[-1])
    low = torch.bucketize(x, levels[1:-1], right=True, out_int32=True)
    cell = torch.as_tensor(start.index, dtype=torch.float32, device=device)
    position = (low + (x - levels[low]) / gaps[low]).clamp(cell - width, cell + width)
    return replace(held, position=position.clamp(0, len(levels) - 1))


@dataclass(frozen=True, eq=False)
class _Signed:
    """AutoRound's: offset [out, n], V of its equation 3, and octaves [out, groups]."""

    held: _Held
    offset: Tensor
    octaves: Tensor

    @classmethod
    def of(cls, weight: Tensor, start: Rounded, keep: Any) -> _Signed:
        held = _held(weight, start, keep, 0.45)
        return cls(held, torch.zeros_like(held.position), torch.zeros_like(held.shift))

    def _place(self) -> Tensor:
        return self.held.nearest(self.held.position + self.offset)

    def weight(self) -> Tensor:
        return self.held.weight(self.held.levels[self._place()], self.octaves)

    def step(self, gradient: Tensor, t: int, options: Learning) -> _Signed:
        held, g = self.held, self.held.masked(gradient)
        rates, at = options.rates(t, held.start.grid.fmt.scale), held.position + self.offset
        inside = (at >= 0) & (at <= len(held.levels) - 1)
        offset = (self.offset - rates[0] * (g * inside).sign()).clamp(-0.5, 0.5)
        slope = g * (held.levels[self._place()] - held.spread(held.shift))
        return replace(self, offset=offset, octaves=held.turned(self.octaves, slope, rates[1]))

    def rounded(self) -> Rounded:
        return self.held.rounded(self._place(), self.octaves)


@dataclass(frozen=True, eq=False)
class _Soft:
    """AdaRound's: level ``low`` and a share h(logit) of the gap above it; mean and square are Adam's moments."""

    held: _Held
    low: Tensor
    logit: Tensor
    octaves: Tensor
    mean: Tensor
    square: Tensor

    @classmethod
    def of(cls, weight: Tensor, start: Rounded, keep: Any) -> _Soft:
        held = _held(weight, start, keep, 0.1)
        low = held.position.floor().clamp(0, max(len(held.levels) - 2, 0))
        logit = ((held.position - low).clamp(0, 1) - _LOW).div_(_HIGH - _LOW).logit()
        return cls(held, low.int(), logit, *(torch.zeros_like(x) for x in (held.shift, logit, logit)))

    def _share(self) -> Tensor:
        return self.logit.sigmoid() * (_HIGH - _LOW) + _LOW

    def weight(self) -> Tensor:
        level = self.held.levels[self.low] + self._share().clamp(0, 1) * self.held.gaps[self.low]
        return self.held.weight(level, self.octaves)

    def step(self, gradient: Tensor, t: int, options: Learning) -> _Soft:
        held, free = self.held, self._share()
        share, gap, rates = free.clamp(0, 1), held.gaps[self.low], options.rates(t, held.start.grid.fmt.scale)
        g, sigmoid = held.masked(gradient), self.logit.sigmoid()
        slope = g * (held.levels[self.low] + share * gap - held.spread(held.shift))
        # equation 24: the mean over weights of 1 - |2h - 1|^beta is added to the loss, with beta falling from 20 to 2
        beta, off = 20 - 18 * t / options.steps, 2 * share - 1
        drive = options.penalty / g.numel() * 2 * beta * off.abs() ** (beta - 1) * off.sign()
        g = g * held.spread(held.scaled(self.octaves).float()) * gap - drive
        g = g * (free == share) * (_HIGH - _LOW) * sigmoid * (1 - sigmoid)
        mean, square = self.mean.lerp(g, 1 - _ADAM[0]), self.square.lerp(g * g, 1 - _ADAM[1])
        root = (square / (1 - _ADAM[1] ** (t + 1))).sqrt() + _ADAM[2]
        logit = self.logit - rates[0] / (1 - _ADAM[0] ** (t + 1)) * mean / root
        return replace(self, logit=logit, octaves=held.turned(self.octaves, slope, rates[1]), mean=mean, square=square)

    def rounded(self) -> Rounded:
        above = (self._share() > 0.5) & (len(self.held.levels) > 1)
        return self.held.rounded(self.low + above, self.octaves)
