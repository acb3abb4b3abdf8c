"""Loss scaling and quantized optimizers: states, streams, and runs that go on from a checkpoint."""

import copy
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from halfulp import numerics as hn
from halfulp.numerics import Cast, LossScale, Stochastic, quantize_optimizer, quantize_updates, scaled_step

from .common import same


def run(state, finite):
    scales = []
    for good in finite:
        state = state.after(good)
        scales.append((float(state.scale), int(state.good)))
    return scales


STEPS = [True, True, False, True, True, True, False, False, False, False, True]
EXPECTED = [(8, 1), (16, 0), (8, 0), (8, 1), (16, 0), (16, 1), (8, 0), (4, 0), (2, 0), (2, 0), (2, 1)]


def test_a_dynamic_scale_grows_after_good_steps_and_halves_after_a_bad_one():
    start = LossScale.dynamic(8.0, interval=2, smallest=2.0)
    assert run(start, STEPS) == EXPECTED
    assert run(start, [np.bool_(v) for v in STEPS]) == EXPECTED
    assert run(start, [torch.tensor(v) for v in STEPS]) == EXPECTED
    # through jax, state and flag traced
    state, found = start, []
    after = jax.jit(lambda state, finite: state.after(finite))
    for finite in STEPS:
        state = after(state, finite)
        found.append((float(state.scale), int(state.good)))
    assert found == EXPECTED
    _, scales = jax.lax.scan(
        lambda s, f: (s.after(f),) * 2, jax.tree.map(jnp.asarray, start._replace(interval=2)), jnp.array(STEPS)
    )
    assert [float(v) for v in scales.scale] == [v for v, _ in EXPECTED]


def test_a_scale_stays_below_its_largest():
    assert run(LossScale.dynamic(8.0, interval=1, largest=20.0), [True] * 3) == [(16, 0), (20, 0), (20, 0)]


def test_a_static_scale_stays():
    assert {scale for scale, _ in run(LossScale.static(1024.0), STEPS)} == {1024.0}


def test_a_scale_that_could_not_be_is_refused():
    with pytest.raises(ValueError, match="a loss scale is a positive number, got 0"):
        LossScale.static(0)
    with pytest.raises(ValueError, match=r"growth=1.0: above 1, or use LossScale\.static"):
        LossScale.dynamic(growth=1.0)
    with pytest.raises(ValueError, match="backoff=2: between 0 and 1"):
        LossScale.dynamic(backoff=2)
    with pytest.raises(ValueError, match="interval=0: at least one step"):
        LossScale.dynamic(interval=0)
    with pytest.raises(ValueError, match=r"scale=8: from smallest=1\.0 to 4\.0"):
        LossScale.dynamic(8, largest=4.0)


def test_gradients_are_unscaled_exactly():
    state = LossScale.static(2.0**10)
    g = np.float32([1.0, -3.5, 1e-30])
    for make in (np.asarray, torch.from_numpy, jnp.asarray):
        (found,), finite = state.unscaled([make(state.scaled(g))])
        assert same(np.asarray(found), g)
        assert bool(finite)
        tree, finite = state.unscaled({"a": make(g), "b": make(np.float32([np.inf]))})
        assert list(tree) == ["a", "b"]
        assert not bool(finite)
    nested, finite = jax.jit(state.unscaled)({"a": [jnp.asarray(g)], "b": (jnp.float32(np.nan),)})
    assert same(np.asarray(nested["a"][0]), g / 1024)
    assert not bool(finite)


def test_a_step_with_infinite_gradients_is_skipped():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([w], lr=0.5)
    state = LossScale.dynamic(2.0**16, interval=10)
    state.scaled((w * torch.tensor([1.0, 2.0, 1e38])).sum()).backward()
    after = scaled_step(optimizer, state)
    assert torch.equal(w.data, torch.ones(3))
    assert not optimizer.state
    assert (after.scale, after.good) == (2.0**15, 0)
    optimizer.zero_grad()
    after.scaled((w * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
    assert scaled_step(optimizer, after).good == 1
    assert torch.equal(w.grad, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.allclose(w.data, torch.full((3,), 0.5))


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def adam(model, seed=3):
    state = {"exp_avg": "e4m3fn:g16", "exp_avg_sq": Cast("e4m3fn:g16", rounding="up")}
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return quantize_optimizer(inner, weights="bf16", state=state, rounding=Stochastic(seed))


def numbers(model, optimizer):
    state = [v for p in model.parameters() for v in optimizer.state[p].values() if v.ndim]
    return [p.detach().numpy().copy() for p in model.parameters()] + [v.numpy().copy() for v in state]


def test_weights_and_state_hold_numbers_of_their_formats():
    model = model_of()
    optimizer = adam(model)
    for p in model.parameters():
        assert same(p.detach().numpy(), hn.cast(p.detach().numpy(), "bf16"))
    train(model, optimizer, 3)
    for p in model.parameters():
        entries = optimizer.state[p]
        assert same(p.detach().numpy(), hn.cast(p.detach().numpy(), "bf16"))
        for name in ("exp_avg", "exp_avg_sq"):
            q = hn.encode(entries[name].numpy(), "e4m3fn:g16")
            assert np.allclose(hn.decode(q), entries[name].numpy(), rtol=2**-7)
        assert entries["step"] == 3
    assert isinstance(optimizer, torch.optim.Adam)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, 1, start=3)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_the_update_is_rounded_once_from_the_sum():
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0, -4.0]))
    optimizer = quantize_optimizer(torch.optim.SGD([w], lr=0.25), weights="e4m3fn", rounding=Stochastic(5))
    g = torch.tensor([0.11, 0.22, -0.33, 0.44])
    w.grad = g.clone()
    before = w.detach().clone()
    optimizer.step()
    expected = Cast("e4m3fn", Stochastic(5)).stream("weight/0", 1)(before - 0.25 * g)
    assert torch.equal(w.data, expected)


def test_stochastic_updates_move_where_nearest_ones_stall():
    """Updates of a thirtieth of a step: nearest never moves, stochastic does by the right amount on average."""
    for rounding, expected in (("nearest_even", 1.0), (Stochastic(1), 2.0)):
        w = torch.nn.Parameter(torch.ones(4096))
        optimizer = quantize_optimizer(torch.optim.SGD([w], lr=2.0**-8), weights="e4m3fn", rounding=rounding)
        for _ in range(256):
            w.grad = -torch.ones(4096)
            optimizer.step()
        # a step of e4m3fn above 1 is 2**-3; the variance of a sum of updates is below 2**-3
        assert abs(w.mean().item() - expected) <= (0 if expected == 1 else 4 * (2**-3 / 4096) ** 0.5)


def test_the_seed_is_the_run():
    found = []
    for seed in (3, 3, 4):
        model = model_of()
        optimizer = adam(model, seed)
        train(model, optimizer, 4)
        found.append(numbers(model, optimizer))
    assert all(same(a, b) for a, b in zip(found[0], found[1]))
    assert not all(same(a, b) for a, b in zip(found[0], found[2]))


def test_tensors_and_steps_draw_from_streams_of_their_own():
    weights = [torch.nn.Parameter(torch.full((512,), 1.0)) for _ in range(2)]
    optimizer = quantize_optimizer(torch.optim.SGD(weights, lr=1.0), weights="e4m3fn")
    drawn = []
    for _ in range(2):
        for w in weights:
            w.data.fill_(1.0)
            w.grad = torch.full((512,), -(2.0**-4))  # half of a step: up or not
        optimizer.step()
        drawn += [(w.detach() > 1.0).float() for w in weights]
    correlation = np.corrcoef(torch.stack(drawn).numpy())
    assert np.abs(correlation - np.eye(4)).max() < 0.2
    assert all(0.4 < d.mean() < 0.6 for d in drawn)


def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits():
    model = model_of()
    optimizer = adam(model)
    train(model, optimizer, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3, start=3)

    again = model_of(seed=99)
    resumed = adam(again)
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(again, resumed, 3, start=3)
    assert all(same(a, b) for a, b in zip(numbers(model, optimizer), numbers(again, resumed), strict=True))
    assert resumed.param_groups[0]["quantized_steps"] == 6


def test_a_group_may_have_weights_of_its_own():
    a, b, c = (torch.nn.Parameter(torch.full((3,), 0.3)) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b], "weights": None}, {"params": [c], "weights": "e2m1"}]
    optimizer = quantize_optimizer(torch.optim.SGD(groups, lr=0.1), weights="bf16", rounding="nearest_even")
    for w in (a, b, c):
        w.grad = torch.zeros(3)
    optimizer.step()
    assert [w[0].item() for w in (a, b, c)] == [hn.cast(np.float32(0.3), "bf16"), np.float32(0.3), 0.5]


def test_errors_name_what_was_given():
    def sgd(dtype=torch.float32):
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=dtype))], lr=0.1)

    with pytest.raises(ValueError, match=r"a weight of torch\.bfloat16: the update is rounded once, from float32"):
        quantize_optimizer(sgd(torch.bfloat16), weights="bf16")
    with pytest.raises(ValueError, match="nothing to quantize: give weights or state"):
        quantize_optimizer(sgd())
    with pytest.raises(ValueError, match=r"state\['exp_avg'\]: cannot read 'e9'"):
        quantize_optimizer(sgd(), state={"exp_avg": "e9"})
    optimizer = quantize_optimizer(sgd(), weights="bf16", state={"exp_avg": "bf16"})
    with pytest.raises(ValueError, match="this optimizer has been quantized"):
        quantize_optimizer(optimizer, weights="bf16")
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(ValueError, match="the optimizer's state has no 'exp_avg': choose from nothing, it is empty"):
        optimizer.step()
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])
    adam = quantize_optimizer(adam, state={"momentum": "bf16"})
    adam.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(ValueError, match="the optimizer's state has no 'momentum': choose from step, exp_avg, exp_avg"):
        adam.step()


class AdamState(NamedTuple):
    count: Any
    mu: Any
    nu: Any


class Adam(NamedTuple):
    """Adam as optax has it: a pair of functions over pytrees."""

    rate: float = 0.01

    def init(self, params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.int32(0), zeros, zeros)

    def update(self, g, state, params):
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mu, g)
        nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.nu, g)
        a, b = (1 - beta ** count.astype(jnp.float32) for beta in (0.9, 0.999))
        updates = jax.tree.map(lambda m, v: -self.rate * (m / a) / (jnp.sqrt(v / b) + 1e-8), mu, nu)
        return updates, AdamState(count, mu, nu)


def test_quantized_updates_of_jax():
    params = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(8, 32)), jnp.float32), "b": jnp.ones(4)}
    state = {"mu": "e4m3fn:g16", "nu": Cast("e5m2", rounding="up")}
    init, step = quantize_updates(Adam(), weights="bf16", state=state, rounding=Stochastic(2))
    gradients = jax.tree.map(lambda w: 0.1 * w + 0.01, params)

    def three(step, finite=True):
        params_, state = init(params)
        for _ in range(3):
            params_, state = step(gradients, state, params_, finite)
        return params_, state

    init, step = jax.jit(init), jax.jit(step)
    plain, (inner, steps) = three(step)
    assert int(steps) == 3
    for w in jax.tree.leaves(plain):
        assert same(np.asarray(w), hn.cast(np.asarray(w), "bf16"))
    for v in jax.tree.leaves(inner.nu):
        assert same(np.asarray(v), hn.cast(np.asarray(v), "e5m2"))
    assert int(inner.count) == 3
    again, _ = three(step)
    assert all(same(np.asarray(a), np.asarray(b)) for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again)))
    kept, (inner, steps) = three(step, finite=jnp.bool_(False))
    start, _ = init(params)
    assert same(np.asarray(kept["a"]), np.asarray(start["a"]))
    assert (int(inner.count), int(steps)) == (0, 3)


def test_jax_and_torch_round_the_same_update():
    g, w0 = np.float32([0.11, 0.22, -0.33, 0.44]), np.float32([1.0, 2.0, 3.0, -4.0])

    class Sgd(NamedTuple):
        def init(self, params):
            return ()

        def update(self, g, state, params):
            return -0.25 * g, state

    init, step = quantize_updates(Sgd(), weights="e4m3fn", rounding=Stochastic(5))
    w, state = jax.jit(init)(jnp.asarray(w0))
    found, _ = jax.jit(step)(jnp.asarray(g), state, w)
    assert same(np.asarray(found), Cast("e4m3fn", Stochastic(5)).stream("weight/", 1)(w0 - np.float32(0.25) * g))


def test_errors_of_jax_name_what_was_given():
    with pytest.raises(ValueError, match="the optimizer's state has no 'exp_avg': it is AdamState"):
        quantize_updates(Adam(), state={"exp_avg": "bf16"}).init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_updates(Adam())
    with pytest.raises(ValueError, match="a weight of bfloat16: the update is rounded once"):
        quantize_updates(Adam(), weights="e4m3fn").init({"w": jnp.ones(3, jnp.bfloat16)})
