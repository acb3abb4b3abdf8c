"""Emulated jax functions: against products written by hand, against torch, through jax's control flow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from halfulp import numerics as hn
from halfulp.numerics import Cast, Roles, Stochastic, emulate, emulate_jax
from halfulp.numerics.training import _jax_ops, _torch_ops

from .common import same, to_torch
from .test_training_torch import along, by_hand, small

X, W, G = small(6, 5, 70), small(40, 70, seed=1), small(6, 5, 40, seed=2)
RANDOM = Roles(*[Cast("e2m1", Stochastic(9))] * 3)


def pulled(function, g, *inputs):
    """The result and the gradients of all inputs."""

    def both(g, *inputs):
        y, pull = jax.vjp(function, *inputs)
        return y, *pull(g)

    # compiled whole: one by one, jax would compile each operation of a cast
    return [np.asarray(v) for v in jax.jit(both)(jnp.asarray(g), *map(jnp.asarray, inputs))]


LAYERS = {
    "x @ w.T": (lambda w, x: x @ w.T, 0),
    "dot": (lambda w, x: jax.lax.dot_general(x, w, (((2,), (1,)), ((), ()))), 0),
    "einsum": (lambda w, x: jnp.einsum("bsk,nk->bsn", x, w), 0),
    "w first": (lambda w, x: jnp.einsum("nk,bsk->bsn", w, x), 0),
    "last argument": (lambda x, w: x @ w.T, 1),
    "jit": (lambda w, x: jax.jit(lambda a, b: a @ b.T)(x, w), 0),
    "checkpoint": (lambda w, x: jax.checkpoint(lambda a, b: a @ b.T)(x, w), 0),
    "moved about": (lambda w, x: x @ jnp.concatenate([w[:20].T, jnp.swapaxes(w[20:], 0, 1)], -1).reshape(70, 40), 0),
}


@pytest.mark.parametrize(("layer", "fmt"), [("dot", "mxfp4"), *((layer, "e2m1") for layer in LAYERS)])
def test_a_layer_is_the_product_by_hand(layer, fmt):
    function, place = LAYERS[layer]
    roles = Roles(fmt, "e4m3fn:tensor:scale=e8m0", "mxfp8-e5m2")
    emulated = emulate_jax(function, linear=roles, weights=place)
    inputs = (W, X) if place == 0 else (X, W)
    y, *gradients = pulled(emulated, G, *inputs)
    expected = by_hand(X.reshape(30, 70), W, G.reshape(30, 40), fmt, "e4m3fn:tensor:scale=e8m0", "mxfp8-e5m2")
    assert same(y, expected[0].reshape(6, 5, 40))
    assert same(gradients[1 - place], expected[1].reshape(6, 5, 70))
    assert same(gradients[place], expected[2])
    assert [(row.kind, row.emulated) for row in emulated.report()] == [("linear", True)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "fmt",
    [
        "mxfp4",
        Cast("mxfp8", Stochastic(4)),
        *(pytest.param(f, marks=SLOW) for f in ("e4m3fn", "e2m1:g16:scale=e4m3fn", Cast("e5m2", Stochastic(4)))),
    ],
)
def test_jax_and_torch_give_the_same_bits(fmt):
    """One linear layer under the same roles, streams included, with sums that are exact in float32."""
    products = Roles(fmt, fmt, fmt, output="bf16").products().stream("layer", 7)
    left, right = (to_torch(v).requires_grad_() for v in (X.reshape(30, 70), W))
    y = _torch_ops.product(left, right, products)
    y.backward(to_torch(G.reshape(30, 40)))
    products = Roles(fmt, fmt, fmt).products()

    def layer(left, right, step):
        return _jax_ops.product(left, right, products, "layer", (step,))

    g = G.reshape(30, 40)
    found = pulled(lambda a, b: layer(a, b, jnp.int32(7)), g, X.reshape(30, 70), W)
    for a, b in zip(found, (y.detach(), left.grad, right.grad)):
        assert same(a, b.numpy())


def test_emulated_module_and_function_give_the_same_bits():
    module = torch.nn.Linear(70, 40, bias=False)
    module.weight.data.copy_(to_torch(W))
    leaf = to_torch(X).requires_grad_()
    with emulate(module, linear="mxfp4"):
        y = module(leaf)
        y.backward(to_torch(G))
    found = pulled(emulate_jax(lambda w, x: x @ w.T, linear="mxfp4"), G, W, X)
    for a, b in zip(found, (y.detach(), module.weight.grad, leaf.grad)):
        assert same(a, b.numpy())


def test_accumulators_inside_of_jit_are_those_of_torch():
    roles = Roles("e4m3fn", "mxfp8", "e4m3fn", accumulator="bf16")
    module = torch.nn.Linear(70, 40, bias=False)
    module.weight.data.copy_(to_torch(W))
    leaf = to_torch(X).requires_grad_()
    with emulate(module, linear=roles):
        y = module(leaf)
        y.backward(to_torch(G))
    found = pulled(emulate_jax(lambda w, x: x @ w.T, linear=roles), G, W, X)
    for a, b in zip(found, (y.detach(), module.weight.grad, leaf.grad)):
        assert same(a, b.numpy())
    blocks = Roles(activation=Cast("mxfp8", Stochastic(1)), accumulator="bf16")
    with pytest.raises(ValueError, match=r"inside jax\.jit, blocks under an accumulator are rounded to nearest even"):
        jax.jit(emulate_jax(lambda w, x: x @ w.T, linear=blocks))(W, X)


def test_attention_is_a_product_of_two_activations():
    a, b, g = small(3, 2, 8, 40), small(3, 2, 7, 40, seed=1), small(3, 2, 8, 7, seed=2)
    emulated = emulate_jax(lambda w, a, b: jnp.einsum("xyqk,xysk->xyqs", a, b), linear="int2", attention="mxfp4")
    y, _, da, db = pulled(emulated, g, W, a, b)
    for found, expected in zip((y, da, db), by_hand(a, b, g, "mxfp4", "mxfp4", "mxfp4")):
        assert same(found, expected)
    assert [row.kind for row in emulated.report()] == ["attention"]


@pytest.mark.parametrize(
    ("groups", "layout"),
    [
        (2, ("NHWC", "HWIO", "NHWC")),
        pytest.param(1, ("NCHW", "OIHW", "NCHW"), marks=SLOW),
        pytest.param(2, ("HWNC", "OHWI", "CNHW"), marks=SLOW),
    ],
)
def test_convolution_is_that_of_torch(groups, layout):
    x, w, g = small(35, 68, 5, 5), small(66, 68 // groups, 3, 3, seed=1), small(35, 66, 3, 3, seed=2)
    layer = torch.nn.Conv2d(68, 66, 3, stride=2, padding=1, groups=groups, bias=False)
    layer.weight.data.copy_(to_torch(w))
    leaf = to_torch(x).requires_grad_()
    with emulate(layer, convolution="mxfp4"):
        y = layer(leaf)
        y.backward(to_torch(g))

    def move(v, to, back=False):
        order = [("OIHW" if "O" in to else "NCHW").index(c) for c in to]
        return v.transpose(np.argsort(order) if back else order)

    def convolve(w, x):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), [(1, 1), (1, 1)], dimension_numbers=layout, feature_group_count=groups
        )

    found = pulled(
        emulate_jax(convolve, convolution="mxfp4"), move(g, layout[2]), move(w, layout[1]), move(x, layout[0])
    )
    for value, expected, names in zip(
        found, (y.detach(), layer.weight.grad, leaf.grad), (layout[2], layout[1], layout[0])
    ):
        assert same(move(value, names, back=True), expected.numpy())


def stack(weights, x):
    """Layers of every kind of control flow."""

    def layer(h, w):
        return jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w), None

    with jax.named_scope("trunk"):
        h, _ = jax.lax.scan(layer, x, weights["layers"])
    with jax.named_scope("middle"):
        h = jax.lax.cond(h.sum() > 0, lambda h: h @ weights["out"], lambda h: -(h @ weights["out"]), h)
        h = jax.lax.fori_loop(0, 2, lambda i, h: h @ weights["out"], h)
    return jax.jit(lambda h: jax.nn.gelu(h @ weights["out"]))(h)


def by_hand_stack(weights, x, dot):
    h = x
    for w in weights["layers"]:
        h = jnp.tanh(dot(h, w))
    h = jnp.where(h.sum() > 0, 1, -1) * dot(h, weights["out"])
    for _ in range(2):
        h = dot(h, weights["out"])
    return jax.nn.gelu(dot(h, weights["out"]))


def test_control_flow_is_what_it_was():
    key = jax.random.key(0)
    weights = {"layers": jax.random.normal(key, (3, 32, 32)) / 4, "out": jax.random.normal(key, (32, 32)) / 4}
    x = jax.random.normal(key, (5, 32))
    roles = Roles("e2m1", "e2m1", "e5m2")
    products = roles.products()

    def dot(a, w):
        return _jax_ops.product(a, w.T, products, "", ())

    emulated = emulate_jax(stack, linear=roles)
    y, found = jax.jit(jax.value_and_grad(lambda w: (emulated(w, x) ** 2).sum()))(weights)
    hand, expected = jax.jit(jax.value_and_grad(lambda w: (by_hand_stack(w, x, dot) ** 2).sum()))(weights)
    np.testing.assert_allclose(y, hand, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    plain = jax.grad(lambda w: (stack(w, x) ** 2).sum())(weights)
    assert not np.allclose(plain["out"], expected["out"], rtol=1e-2)
    assert {row.module for row in emulated.report()} == {"trunk", "middle", ""}
    assert not emulated.report().stayed


def test_while_loops_and_vmap():
    def function(w, x):
        return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (0, x))[1]

    w, x = small(32, 32), small(4, 5, 32)
    roles = Roles(weight=Cast("e2m1", Stochastic(3)))
    emulated = emulate_jax(function, linear=roles)
    each = np.stack([jax.jit(emulated)(w, one) for one in x])
    assert same(np.asarray(jax.jit(jax.vmap(emulated, in_axes=(None, 0)))(w, x)), each)
    assert not np.allclose(each[0], function(w, x[0]))


def test_iterations_draw_from_streams_of_their_own():
    w = np.full((1, 1), 1.25, np.float32)  # halfway between two numbers of e2m1

    def function(w):
        return jax.lax.scan(lambda c, _: (c, (jnp.ones((1, 1)) @ w)[0, 0]), 0, length=64)[1]

    roles = Roles(weight=Cast("e2m1", Stochastic(1)))
    drawn = np.asarray(jax.jit(emulate_jax(function, linear=roles))(w))
    assert set(drawn) == {1.0, 1.5}
    assert 16 < (drawn == 1.5).sum() < 48


def test_the_step_is_traced():
    def gradient(step, w, x):
        return jax.grad(lambda w: (emulate_jax(lambda w, x: x @ w.T, linear=RANDOM, step=step)(w, x) ** 2).sum())(w)

    traced = jax.jit(gradient)
    results = [np.asarray(traced(step, W, X)) for step in (0, 1, 0)]
    assert same(results[0], results[2])
    assert not same(results[0], results[1])
    np.testing.assert_allclose(results[1], jax.jit(lambda w, x: gradient(1, w, x))(W, X), rtol=1e-5)


def test_overrides_go_by_named_scope():
    def function(w, x):
        with jax.named_scope("block"):
            with jax.named_scope("mlp"):
                h = x @ w["a"]
            return h @ w["b"]

    w, x = {"a": small(64, 64), "b": small(64, 8, seed=1)}, small(5, 64, seed=2)
    emulated = emulate_jax(function, linear="e2m1", overrides={"mlp": None})
    expected = hn.cast(x @ w["a"], "e2m1") @ hn.cast(w["b"], "e2m1")
    np.testing.assert_allclose(jax.jit(emulated)(w, x), expected, rtol=1e-6)
    assert [(r.module, r.emulated) for r in emulated.report()] == [("block.mlp", False), ("block", True)]
    with pytest.raises(ValueError, match=r"override 'head' matches no named scope with a product; near names: .*mlp"):
        emulate_jax(function, linear="e2m1", overrides={"head": None})(w, x)


def test_what_stays_is_reported():
    def function(w, x):
        outer = x[:, :1] @ x[:1]
        counts = jnp.ones((2, 2), jnp.int32) @ jnp.ones((2, 2), jnp.int32)
        ragged = jax.lax.ragged_dot(x, jnp.zeros((1, 64, 3)), jnp.array([5]))
        return (x @ w).sum() + outer.sum() + counts.sum() + ragged.sum()

    emulated = emulate_jax(function, linear="e2m1", attention="e2m1")
    x = small(5, 64)
    emulated(small(64, 8), x)
    reasons = {(row.operation, row.reason) for row in emulated.report()}
    assert ("dot_general", "an outer product, which sums over nothing") in reasons
    assert ("dot_general", "a product of int32") in reasons
    assert any("ragged_dot" in operation for operation, _ in reasons)
    with pytest.raises(ValueError, match="nothing to emulate: give roles for at least one of linear, convolution, att"):
        emulate_jax(function)


def test_arguments_that_are_no_arrays_are_taken_as_they_are():
    def function(w, x, activation, *, scale=1.0, train=False):
        y = x @ w["w"] * scale
        return getattr(jax.nn, activation)(y) if train else y

    w, x = {"w": small(64, 8)}, small(5, 64, seed=1)
    emulated = emulate_jax(function, linear="e2m1")
    y = np.asarray(emulated(w, x, "relu", scale=2.0, train=True))
    assert same(y, np.maximum(along(x, "e2m1") @ along(w["w"].T, "e2m1").T * np.float32(2), 0))


def test_bfloat16_stays_bfloat16():
    w, x = jnp.asarray(small(64, 8), jnp.bfloat16), jnp.asarray(small(5, 64), jnp.bfloat16)
    emulated = emulate_jax(lambda w, x: jax.lax.dot(x, w, preferred_element_type=jnp.float32), linear="e2m1")

    def both():
        y, pull = jax.vjp(emulated, w, x)
        return y, pull(y)

    y, gradients = jax.eval_shape(both)
    assert y.dtype == jnp.float32
    assert {g.dtype for g in gradients} == {jnp.dtype(jnp.bfloat16)}
