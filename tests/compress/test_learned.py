"""Learned rounding: what it gains over its start on a whole block, what it keeps, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfulp.compress.methods._gptq import Rounded, gptq
from halfulp.compress.methods._grid import grid_of
from halfulp.compress.methods._learned import Learning, _Signed, _Soft, block_loss, learn
from halfulp.numerics import Block as BlockFormat
from halfulp.numerics import Int, decode

HIDDEN, INNER, TOKENS, COUNT = 32, 48, 16, 12
FORMATS = ("int4:g8", "int3:g16", "mxfp4", "nvfp4", "int4:g8:asym", "int4:channel")
RULES: tuple[Any, ...] = ("sign", "soft")


class Block(nn.Module):
    """A decoder block in small: norms, causal attention with two heads, a gated MLP."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
        sizes |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.layers = nn.ModuleDict({name: nn.Linear(n, out, bias=False) for name, (out, n) in sizes.items()})
        for layer in self.layers.values():
            draw = torch.randn(layer.weight.shape, generator=generator)
            layer.weight = nn.Parameter(draw / layer.weight.shape[1] ** 0.5, requires_grad=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.rand(HIDDEN, generator=generator) + 0.5) for _ in range(2)])
        self.norms.requires_grad_(False)

    def _norm(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norms[k]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self._norm(x, 0)
        q, k, v = (self.layers[n](h).unflatten(-1, (2, -1)).transpose(-2, -3) for n in "qkv")
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.layers["o"](mixed.transpose(-2, -3).flatten(-2))
        h = self._norm(x, 1)
        return x + self.layers["down"](nn.functional.silu(self.layers["gate"](h)) * self.layers["up"](h))


class Problem:
    """A block, its inputs, its outputs, and what GPTQ needs to know of its layers."""

    def __init__(self, seed: int = 0) -> None:
        self.block = Block(seed)
        generator = torch.Generator().manual_seed(seed + 100)
        mix = torch.randn(HIDDEN, HIDDEN, generator=generator) * torch.linspace(2, 0.2, HIDDEN)[:, None]
        self.x = [torch.randn(1, TOKENS, HIDDEN, generator=generator) @ mix for _ in range(COUNT)]
        self.layers: dict[str, Any] = dict(self.block.layers.items())
        self.seen: dict[str, np.ndarray] = {}
        handles = [layer.register_forward_pre_hook(self._see(name)) for name, layer in self.layers.items()]
        self.goal = [self.block(x) for x in self.x]
        for handle in handles:
            handle.remove()

    def _see(self, name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).double()
            self.seen[name] = self.seen.get(name, 0) + (x.T @ x).numpy()

        return before

    def run(self, i: int) -> torch.Tensor:
        return self.block(self.x[i])

    def start(self, fmt: Any, keep: dict[str, np.ndarray] | None = None, plain: bool = False) -> dict[str, Rounded]:
        found = {}
        for name, layer in self.layers.items():
            hessian = np.eye(layer.weight.shape[1]) if plain else self.seen[name]
            one = gptq(layer.weight.numpy(), hessian, grid_of(fmt).fmt, keep=None if keep is None else keep[name])
            assert one is not None
            found[name] = one
        return found

    def learn(self, start: dict[str, Rounded], options: Learning, **more: Any) -> dict[str, Rounded]:
        return learn(self.run, COUNT, self.layers, start, self.goal.__getitem__, options, **more)

    def loss(self, rounded: dict[str, Rounded]) -> float:
        return block_loss(self.run, COUNT, self.layers, rounded, self.goal.__getitem__)


@cache
def problem() -> Problem:
    return Problem()


def same(a: dict[str, Rounded], b: dict[str, Rounded]) -> bool:
    return all(np.array_equal(a[n].index, b[n].index) and np.array_equal(a[n].scale, b[n].scale) for n in a)


@pytest.mark.parametrize("fmt", FORMATS)
def test_soft_rounding_beats_gptq_on_the_whole_block(fmt: str) -> None:
    start = problem().start(fmt)
    found = problem().learn(start, Learning("soft", steps=100, every=20))
    assert problem().loss(found) < 0.97 * problem().loss(start)
    for name, one in found.items():
        # what is stored is what was learned
        assert one.index.dtype == np.int32
        np.testing.assert_allclose(decode(one.quantized()).double().numpy(), one.values(), rtol=1e-6)
        np.testing.assert_array_equal(one.shift, start[name].shift)


@pytest.mark.parametrize("fmt", FORMATS)
def test_signed_gradients_beat_nearest(fmt: str) -> None:
    start = problem().start(fmt, plain=True)
    found = problem().learn(start, Learning("sign", steps=60, every=10))
    assert problem().loss(found) < 0.9 * problem().loss(start)


def test_scales_alone_beat_gptq_under_either_rule() -> None:
    start = problem().start("int4:g8")
    for rule in RULES:
        found = problem().learn(start, Learning(rule, steps=30, batch=12, lr=0.0, scale_lr=0.01, penalty=0.0))
        assert problem().loss(found) < 0.8 * problem().loss(start)
        assert all(np.array_equal(found[n].index, start[n].index) for n in found)


def test_scales_stay_by_default_where_their_format_is_coarse() -> None:
    for fmt in ("mxfp4", "nvfp4"):
        start = problem().start(fmt)
        found = problem().learn(start, Learning("soft", steps=100, every=50))
        assert not same(found, start)
        assert all(np.array_equal(found[n].scale, start[n].scale) for n in found)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_variables_begin_at_the_start(fmt: str, plain: bool, rule: str) -> None:
    kind = _Soft if rule == "soft" else _Signed
    for name, one in problem().start(fmt, plain=plain).items():
        free = kind.of(problem().layers[name].weight, one, None)
        assert same({name: free.rounded()}, {name: one})
        if rule == "sign":
            np.testing.assert_allclose(free.weight().numpy(), one.values(), rtol=1e-6)
        else:
            # no further than a tenth of the widest gap
            gap = np.diff(one.grid.values).max() * one.scale.max()
            assert np.abs(free.weight().numpy() - one.values()).max() <= 0.1001 * gap


def test_a_step_of_soft_rounding_goes_down_the_true_gradient() -> None:
    options = Learning("soft", lr=1e-3, scale_lr=1e-3, penalty=0.0)
    free = {n: _Soft.of(problem().layers[n].weight, r, None) for n, r in problem().start("int4:g8").items()}

    def weights() -> dict[str, torch.Tensor]:
        return {n: v.weight().requires_grad_() for n, v in free.items()}

    def loss(given: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = [
            torch.func.functional_call(problem().block, {f"layers.{n}.weight": w for n, w in given.items()}, (x,))
            for x in problem().x
        ]
        return sum((a - b).square().mean() for a, b in zip(outputs, problem().goal, strict=True))  # type: ignore[return-value]

    before = weights()
    first = loss(before)
    gradients = torch.autograd.grad(first, list(before.values()))
    free = {n: free[n].step(g, 0, options) for n, g in zip(before, gradients, strict=True)}
    after = weights()
    assert float(loss(after).detach()) < float(first.detach())
    assert all(not torch.equal(after[n], before[n]) for n in after)


@pytest.mark.parametrize("rule", RULES)
def test_never_worse_than_the_start_however_wild_the_steps(rule: Any) -> None:
    start = problem().start("int3:g16")
    for options in (Learning(rule, steps=6, lr=50.0, scale_lr=5.0, every=1), Learning(rule, steps=1, lr=0.0)):
        found = problem().learn(start, options)
        assert problem().loss(found) <= problem().loss(start)
        assert all(found[n] is start[n] for n in start) or problem().loss(found) < problem().loss(start)


def test_the_best_is_chosen_on_the_sequences_that_are_checked() -> None:
    start = problem().start("int4:g8", plain=True)
    ran: list[int] = []

    def run(i: int) -> torch.Tensor:
        ran.append(i)
        return problem().run(i)

    options = Learning("sign", steps=4, batch=2, every=2, check=3)
    learn(run, COUNT, problem().layers, start, problem().goal.__getitem__, options)
    first, last = ran[:3], ran[-3:]
    assert first == last == sorted(first)
    # the start on all, batches of two, and the checked ones after the second and the fourth
    assert len(ran) == COUNT + 4 * 2 + 2 * 3


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_gives_the_same_bits_again(rule: Any) -> None:
    start = problem().start("int4:g8", plain=True)
    options = Learning(rule, steps=12, batch=3, every=4, lr=0.05, seed=7)
    found = [problem().learn(start, one) for one in (options, options, replace(options, seed=8))]
    assert not same(found[0], start)
    assert same(found[0], found[1])
    assert not same(found[0], found[2])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", ["int4:g8:asym", "nvfp4"])
def test_masked_weights_stay_zero(fmt: str, rule: Any) -> None:
    rng = np.random.default_rng(0)
    keep = {n: rng.random(tuple(layer.weight.shape)) < 0.5 for n, layer in problem().layers.items()}
    start = problem().start(fmt, keep, plain=rule == "sign")
    found = problem().learn(start, Learning(rule, steps=80, every=10, lr=0.1 if rule == "soft" else 0.05), keep=keep)
    assert problem().loss(found) < problem().loss(start)
    for name, one in found.items():
        assert not one.values()[~keep[name]].any()
    assert not same(found, start)


@pytest.mark.parametrize("rule", RULES)
def test_inside_of_inference_mode_the_bits_are_the_same(rule: Any) -> None:
    options = Learning(rule, steps=4, every=2, lr=0.05)
    outside = problem().learn(problem().start("int4:g8", plain=True), options)
    with torch.inference_mode():
        other = Problem()
        assert other.x[0].is_inference()
        assert all(p.is_inference() for p in other.block.norms)
        inside = other.learn(other.start("int4:g8", plain=True), options)
        assert other.loss(inside) == problem().loss(outside)
    assert same(inside, outside)


def test_the_block_is_left_as_it_was() -> None:
    weights = {n: layer.weight for n, layer in problem().layers.items()}
    values = {n: w.clone() for n, w in weights.items()}
    start = problem().start("int4:g8", plain=True)
    problem().learn(start, Learning(steps=2))

    def breaks(i: int) -> torch.Tensor:
        problem().run(i)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        learn(breaks, COUNT, problem().layers, start, problem().goal.__getitem__, Learning())
    for name, layer in problem().layers.items():
        assert layer.weight is weights[name]
        assert torch.equal(layer.weight, values[name])
        assert layer.weight.grad is None
        assert not layer.weight.requires_grad


@pytest.mark.parametrize("rule", RULES)
def test_a_grid_with_one_value_learns_its_scales(rule: Any) -> None:
    layer = nn.Linear(8, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    grid = replace(grid_of("int4:g8"), values=np.array([1.0]), codes=np.array([1], np.uint8))
    start = {"only": Rounded(grid, np.zeros((2, 8), np.int32), np.full((2, 1), 2.0), np.zeros((2, 1)), 1.0, 0.0)}
    x = torch.ones(3, 1, 8)
    options = Learning(rule, steps=40, scale_lr=0.05)
    found = learn(lambda i: layer(x[i]), 3, {"only": layer}, start, lambda i: 24 * torch.ones(1, 2), options)
    assert not found["only"].index.any()
    np.testing.assert_allclose(found["only"].values(), 3.0, rtol=0.05)


@pytest.mark.parametrize("rule", RULES)
def test_scales_of_float32_and_ragged_groups(rule: Any) -> None:
    fmt = BlockFormat(Int(3), size=20, scale="fp32")
    start = problem().start(fmt, plain=True)
    found = problem().learn(start, Learning(rule, steps=40, every=10))
    assert problem().loss(found) < problem().loss(start)
    for one in found.values():
        np.testing.assert_array_equal(one.scale, one.scale.astype(np.float32))
        np.testing.assert_allclose(decode(one.quantized()).double().numpy(), one.values(), rtol=1e-6)


def test_half_precision_and_experts_that_no_token_reaches() -> None:
    layers = {n: nn.Linear(16, 16, bias=True, dtype=torch.bfloat16) for n in ("reached", "idle")}
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 6, 16, generator=generator) @ torch.randn(16, 16, generator=generator)).bfloat16()
    for layer in layers.values():
        nn.init.normal_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    goal = [layers["reached"](v).detach() for v in x]
    start: dict[str, Any] = {
        n: gptq(layer.weight.detach().float().numpy(), np.eye(16), grid_of("int3:g16").fmt)
        for n, layer in layers.items()
    }
    found = learn(lambda i: layers["reached"](x[i]), 4, layers, start, goal.__getitem__, Learning("soft", steps=100))
    assert not same({"reached": found["reached"]}, {"reached": start["reached"]})
    assert same({"idle": found["idle"]}, {"idle": start["idle"]})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", ["nf4:g8", "int8:channel", "e4m3fn:g8", "mxfp4"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 9), (5, 40)])
def test_odd_shapes_zeros_and_extremes(shape: tuple[int, int], fmt: str, rule: Any) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[-1, -1] = 1e20
    x = [torch.ones(4, shape[1]) * 1e-15, torch.ones(0, shape[1]), torch.ones(1, shape[1]) * 1e-18]
    one = gptq(layer.weight.detach().numpy(), np.eye(shape[1]), grid_of(fmt).fmt)
    assert one is not None
    options = Learning(rule, steps=3, batch=9, every=1, lr=0.2, scale_lr=0.2)
    found = learn(lambda i: layer(x[i]), 3, {"a": layer}, {"a": one}, lambda i: layer(x[i]) * 0 + 1, options)["a"]
    np.testing.assert_allclose(decode(found.quantized()).double().numpy(), found.values(), rtol=1e-6)
    assert np.isfinite(found.values()).all()


def test_a_start_without_error_comes_back() -> None:
    layer, start = problem().layers["q"], {"q": problem().start("int4:g8")["q"]}
    goal = torch.nn.functional.linear(problem().x[0], torch.from_numpy(start["q"].values()).float())
    assert learn(lambda i: layer(problem().x[0]), 1, {"q": layer}, start, lambda i: goal, Learning())["q"] is start["q"]


def test_nan_is_refused_by_name() -> None:
    start, options = problem().start("int4:g8"), Learning(steps=1, check=1)
    hole = torch.full((1, TOKENS, HIDDEN), torch.nan)

    def learned(run: Any, targets: Any) -> None:
        learn(run, COUNT, problem().layers, start, targets, options)

    with pytest.raises(ValueError, match="sequence 7: the block's target holds NaN"):
        learned(problem().run, lambda i: hole if i == 7 else problem().goal[i])
    with pytest.raises(ValueError, match="sequence 3: the block's output holds NaN"):
        learned(lambda i: problem().block(hole) if i == 3 else problem().run(i), problem().goal.__getitem__)
    with pytest.raises(ValueError, match=r"sequence \d+: the block gives \[1, 16, 32\], the target is \[1, 16, 31\]"):
        learned(problem().run, lambda i: problem().goal[i][..., 1:])
    broken = Problem()
    broken.layers["v"].weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match="v holds NaN or infinity"):
        broken.learn(start, options)


def test_what_does_not_belong_together_is_refused_by_name() -> None:
    start, layers, options = problem().start("int4:g8"), problem().layers, Learning(steps=1)

    def learned(count: int = COUNT, start: Any = start, layers: Any = layers, keep: Any = None) -> None:
        learn(problem().run, count, layers, start, problem().goal.__getitem__, options, keep)

    with pytest.raises(ValueError, match="0 sequences and 7 layers: give at least one of each"):
        learned(count=0)
    with pytest.raises(ValueError, match="12 sequences and 0 layers"):
        learned(layers={}, start={})
    with pytest.raises(ValueError, match="down is only in layers: give layer and start"):
        learned(start={n: r for n, r in start.items() if n != "down"})
    with pytest.raises(ValueError, match="odd is only in keep"):
        learned(keep={"odd": np.ones((2, 2), bool)})
    with pytest.raises(ValueError, match=r"q has a weight of shape \[32, 32\] and a start of \[48, 32\]"):
        learned(start=start | {"q": start["up"]})
    with pytest.raises(ValueError, match=r"q has a weight of shape \[32, 32\] and a mask of \[2, 32\]"):
        learned(keep={"q": np.ones((2, 32), bool)})
    with pytest.raises(ValueError, match="q: keep masks weights that are not zero in the start"):
        learned(keep={"q": np.zeros((32, 32), bool)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "adam"}, "rule='adam': choose 'sign', 'soft'"),
        ({"steps": 0}, "steps=0: give a whole number from 1"),
        ({"batch": 1.5}, r"batch=1\.5: give a whole number from 1"),
        ({"steps": None}, "steps=None: give a whole number"),
        ({"check": 0}, "check=0: give a whole number from 1"),
        ({"seed": -1}, "seed=-1: give a whole number from 0"),
        ({"lr": -1.0}, r"lr=-1\.0: give a number from 0"),
        ({"scale_lr": float("nan")}, "scale_lr=nan: give a number from 0"),
        ({"lr": "fast"}, "lr='fast': give a number from 0"),
        ({"penalty": None}, "penalty=None: give a number from 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Learning(**options)
