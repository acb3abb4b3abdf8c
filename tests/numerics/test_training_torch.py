"""Emulated torch modules against products worked out by hand in numpy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfulp import numerics as hn
from halfulp.numerics import Cast, Roles, Stochastic, emulate

from .common import same, to_torch

FORMATS = ["e2m1", "mxfp4", "e4m3fn:tensor:scale=e8m0", "int4:channel:scale=e8m0", "e2m1:4x8:scale=e8m0"]


def small(*shape, seed=0):
    """Numbers with so few bits, and so close in size, that float32 sums of products of their casts are exact."""
    return np.random.default_rng(seed).integers(-48, 49, shape).astype(np.float32) / 16


def along(x, fmt):
    """x with the blocks of the format along its last axis, from a contiguous array."""
    return hn.cast(np.ascontiguousarray(x), hn.format(fmt))


def by_hand(x, w, g, weight, activation, gradient):
    """y = x w', dx = g w, dw = g' x of [m, k], [n, k] and [m, n], in float64; blocks along the axis summed over."""
    y = along(x, activation).astype(float) @ along(w, weight).astype(float).swapaxes(-1, -2)
    dx = along(g, gradient).astype(float) @ along(w.swapaxes(-1, -2), weight).astype(float).swapaxes(-1, -2)
    dw = along(g.swapaxes(-1, -2), gradient).astype(float) @ along(x.swapaxes(-1, -2), activation).astype(
        float
    ).swapaxes(-1, -2)
    return [v.astype(np.float32) for v in (y, dx, dw)]


def backward(module, inputs, g, **roles):
    """Result and gradients of the inputs and the parameters under emulation."""
    leaves = [to_torch(x).requires_grad_() for x in inputs]
    with emulate(module, **roles) as emulation:
        y = module(*leaves)
        y.backward(to_torch(g))
    gradients = [leaf.grad.numpy() for leaf in leaves]
    return y.detach().numpy(), gradients, [p.grad.numpy() for p in module.parameters()], emulation


class Apply(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function, **weights):
        super().__init__()
        self.function = function
        for name, w in weights.items():
            self.register_parameter(name, torch.nn.Parameter(to_torch(w)))

    def forward(self, *inputs):
        return self.function(*inputs, **dict(self.named_parameters()))


X, W, G = small(6, 5, 70), small(40, 70, seed=1), small(6, 5, 40, seed=2)


@pytest.mark.parametrize("gradient", FORMATS)
@pytest.mark.parametrize("forward", FORMATS)
def test_linear_and_both_its_gradients(forward, gradient):
    layer = torch.nn.Linear(70, 40)
    with torch.no_grad():
        layer.weight.copy_(to_torch(W))
        layer.bias.copy_(to_torch(small(40, seed=3)))
    expected = by_hand(X.reshape(30, 70), W, G.reshape(30, 40), forward, forward, gradient)
    y, (dx,), (dw, db), _ = backward(layer, [X], G, linear=Roles(forward, forward, gradient))
    assert same(y, expected[0].reshape(6, 5, 40) + layer.bias.detach().numpy())
    assert same(dx, expected[1].reshape(6, 5, 70))
    assert same(dw, expected[2])
    assert same(db, G.sum((0, 1)))


def test_blocks_that_kept_their_axis_would_be_seen():
    """The test above can fail: casting once, along the features, gives other gradients."""
    flat, g = X.reshape(30, 70), G.reshape(30, 40)
    _, dx, dw = by_hand(flat, W, g, "mxfp4", "mxfp4", "mxfp4")
    once = along(flat, "mxfp4"), along(W, "mxfp4"), along(g, "mxfp4")
    assert not same(dx, once[2] @ once[1])
    assert not same(dw, once[2].T @ once[0])


@pytest.mark.parametrize(
    ("fmt", "accumulator", "dgrad"),
    [("e4m3fn", "hopper-fp8", "fp32"), ("mxfp8", "bf16", None), ("mxfp4", "exact", "same")],
)
def test_products_are_summed_under_their_accumulators(fmt, accumulator, dgrad):
    x, w, g = (np.random.default_rng(i).normal(size=v.shape).astype(np.float32) for i, v in enumerate((X[0], W, G[0])))
    roles = Roles(fmt, fmt, fmt, accumulator=accumulator, accumulator_dgrad=dgrad, accumulator_wgrad="chunked:32:fp32")
    y, (dx,), (dw,), _ = backward(Apply(lambda x, w: x @ w.T, w=w), [x], g, linear=roles)
    cast = [along(v, fmt) for v in (x, w, g, w.T, g.T, x.T)]
    assert same(y, hn.matmul(cast[0], cast[1].T, accumulator))
    if dgrad is None:
        np.testing.assert_allclose(dx, cast[2] @ cast[3].T, rtol=1e-5, atol=1e-5)
    else:
        assert same(dx, hn.matmul(cast[2], cast[3].T, accumulator if dgrad == "same" else dgrad))
    assert same(dw, hn.matmul(cast[4], cast[5].T, "chunked:32:fp32"))
    assert same(y, cast[0] @ cast[1].T) == (accumulator == "exact")  # float32 holds the sums of mxfp4 as well


def test_an_accumulator_that_is_none_is_refused():
    with pytest.raises(ValueError, match="hopper-fp9"):
        Roles(accumulator="hopper-fp9")


def test_every_role_has_its_place():
    roles = Roles(
        weight="e2m1",
        activation="e4m3fn",
        gradient="e5m2",
        output="bf16",
        input_gradient="e3m4",
        weight_gradient="e2m5f",
        weight_dgrad="e2m3",
        activation_wgrad="e3m2",
        gradient_wgrad="int3",
    )
    c = hn.cast
    x, g = X.reshape(30, 70), G.reshape(30, 40)
    layer = Apply(lambda x, w, b: F.linear(x, w, b), w=W, b=small(40, seed=4))
    y, (dx,), (dw, db), _ = backward(layer, [x], g, linear=roles)
    assert same(y, c(c(x, "e4m3fn") @ c(W, "e2m1").T + small(40, seed=4), "bf16"))
    assert same(dx, c(c(g, "e5m2") @ c(W, "e2m3"), "e3m4"))
    assert same(dw, c(c(g, "int3").T @ c(x, "e3m2"), "e2m5f"))
    assert same(db, g.sum(0))


SPELLINGS = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: torch.matmul(x, w.T),
    "operator": lambda x, w: x @ w.mT,
    "method": lambda x, w: x.matmul(w.t()),
    "rmatmul": lambda x, w: w.T.__rmatmul__(x),
    "mm": lambda x, w: torch.mm(x.reshape(30, 70), w.T).reshape(6, 5, 40),
    "addmm": lambda x, w: torch.addmm(torch.zeros(40), x.view(30, 70), w.T).view(6, 5, 40),
    "left": lambda x, w: (w @ x.mT).mT,
    "einsum": lambda x, w: torch.einsum("bsk,nk->bsn", x, w),
    "einsum left": lambda x, w: torch.einsum("nk,...k->...n", w, x),
    "tensordot": lambda x, w: torch.tensordot(x, w, ([2], [1])),
    "expert": lambda x, w: torch.bmm(x.reshape(1, 30, 70), w.T[None]).reshape(6, 5, 40),
    "vectors": lambda x, w: torch.stack([torch.stack([w @ v for v in rows]) for rows in x]),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_product_with_a_parameter_is_linear_however_it_is_spelled(spelling):
    stochastic = Cast("mxfp4", Stochastic(7))
    for how in ("mxfp4", stochastic) if spelling not in ("vectors", "expert") else ("mxfp4",):
        reference = backward(Apply(SPELLINGS["linear"], w=W), [X], G, linear=Roles(how, how, how))
        found = backward(Apply(SPELLINGS[spelling], w=W), [X], G, linear=Roles(how, how, how))
        assert same(found[0], reference[0])
        assert same(found[1][0], reference[1][0])
        if spelling != "vectors":  # whose weight gradients are summed vector by vector
            assert same(found[2][0], reference[2][0])
        assert {row.kind for row in found[3].report().emulated} == {"linear"}
        assert not found[3].report().stayed


@pytest.mark.parametrize("fmt", ["e2m1", "mxfp4"])
def test_a_product_of_activations_is_attention(fmt):
    a, b, g = small(3, 2, 8, 40), small(2, 40, 7, seed=1), small(3, 2, 8, 7, seed=2)
    y, (da, db), _, emulation = backward(Apply(lambda a, b: a @ b), [a, b], g, attention=Roles("int2", fmt, "mxfp8"))
    wide = np.broadcast_to(b.swapaxes(-1, -2), (3, 2, 7, 40))
    expected = by_hand(a, wide, g, fmt, fmt, "mxfp8")
    assert same(y, expected[0])
    assert same(da, expected[1])
    assert same(db, expected[2].sum(0).swapaxes(-1, -2))
    assert [row.kind for row in emulation.report()] == ["attention"]


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention(causal):
    q, k, v = small(2, 4, 6, 32), small(2, 2, 6, 32, seed=1), small(2, 2, 6, 32, seed=2)
    g = small(2, 4, 6, 32, seed=3)
    roles = Roles(activation="mxfp8", gradient="mxfp8-e5m2")

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=0.125)

    def decomposed(q, k, v):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = (q @ k.mT) * 0.125
        if causal:
            scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1) @ v

    found = backward(Apply(attend), [q, k, v], g, attention=roles)
    expected = backward(Apply(decomposed), [q, k, v], g, attention=roles)
    assert [row.operation for row in found[3].report()] == ["scaled_dot_product_attention"]
    for a, b in zip([found[0], *found[1]], [expected[0], *expected[1]]):
        assert same(a, b)
    plain = attend(*map(to_torch, (q, k, v))).numpy()
    assert 0.001 < np.linalg.norm(found[0] - plain) / np.linalg.norm(plain) < 0.1


def test_attention_masks_are_those_of_torch():
    """With a format that holds every number, emulated attention is torch's, to rounding."""
    q, k, v = (to_torch(small(2, 3, 5, 8, seed=s)) for s in range(3))
    boolean = to_torch(np.random.default_rng(0).random((5, 5)) < 0.6)
    boolean[2] = False  # a query that may look at nothing
    for mask in (boolean, to_torch(small(2, 1, 5, 5)), None):
        module = Apply(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))  # noqa: B023
        with emulate(module, attention="fp32"):
            found = module(q, k, v)
        torch.testing.assert_close(found, module(q, k, v))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fmt", ["e2m1", "mxfp4"])
def test_convolution_has_blocks_along_channels_and_batch(groups, transposed, fmt):
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = kind(2 * 34, 2 * 33, 3, stride=2, padding=1, groups=groups)
    shape = tuple(layer.weight.shape)
    with torch.no_grad():
        layer.weight.copy_(to_torch(small(*shape)))
        layer.bias.zero_()
    x = small(35, 68, 5, 5, seed=1)
    g = small(*layer(to_torch(x)).shape, seed=2)

    def cut(a, axis, channels):
        """Cast with blocks along an axis; a group of channels at a time."""
        parts = np.split(a, groups, axis) if channels else [a]
        return to_torch(
            np.concatenate([np.moveaxis(along(np.moveaxis(p, axis, -1), fmt), -1, axis) for p in parts], axis)
        )

    first, second = (0, 1) if transposed else (1, 0)  # axes of the weight that meet inputs and outputs

    def run(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        extra = {"stride": 2, "padding": 1, "groups": groups}
        return (F.conv_transpose2d if transposed else F.conv2d)(x, w, **extra), x, w

    w = small(*shape)
    expected, *_ = run(cut(x, 1, True), cut(w, first, transposed))
    y, leaf, _ = run(to_torch(x), cut(w, second, not transposed))
    y.backward(cut(g, 1, True))
    dx = leaf.grad.numpy()
    y, _, leaf = run(cut(x, 0, False), to_torch(w))
    y.backward(cut(g, 0, False))
    dw = leaf.grad.numpy()

    found = backward(layer, [x], g, convolution=fmt)
    assert same(found[0], expected.detach().numpy())
    assert same(found[1][0], dx)
    assert same(found[2][0], dw)


def test_convolutions_in_one_and_three_axes_and_their_paddings():
    for axes, function in ((1, F.conv1d), (3, F.conv3d)):
        w = small(4, 3, *[4, 2, 3][:axes])
        for padding in ("same", "valid", 1):
            module = Apply(lambda x, w: function(x, w, padding=padding, dilation=2), w=w)  # noqa: B023
            for shape in ((2, 3, *[9] * axes), (3, *[9] * axes)):  # a batch, and one alone
                x = to_torch(small(*shape))
                with emulate(module, convolution="fp32"):
                    found = module(x)
                torch.testing.assert_close(found, module(x))


def test_norms_and_softmaxes_are_cast_at_their_ends():
    x, g = small(5, 16), small(5, 16, seed=1)
    norm = torch.nn.LayerNorm(16)
    with torch.no_grad():
        norm.weight.copy_(to_torch(small(16, seed=2)))
    roles = Roles(weight="e4m3fn", activation="e3m4", output="bf16", gradient="e5m2", input_gradient="e4m3fn")
    y, (dx,), (dw, _), _ = backward(norm, [x], g, norm=roles)

    leaf = to_torch(hn.cast(x, "e3m4")).requires_grad_()
    weight = to_torch(hn.cast(small(16, seed=2), "e4m3fn")).requires_grad_()
    plain = F.layer_norm(leaf, (16,), weight, norm.bias)
    plain.backward(to_torch(hn.cast(g, "e5m2")))
    assert same(y, hn.cast(plain.detach().numpy(), "bf16"))
    assert same(dx, hn.cast(leaf.grad.numpy(), "e4m3fn"))
    assert same(dw, weight.grad.numpy())

    y, _, _, emulation = backward(Apply(lambda x: x.softmax(-1)), [x], g, softmax="e4m3fn")
    assert same(y, hn.cast(torch.softmax(to_torch(hn.cast(x, "e4m3fn")), -1).numpy(), "e4m3fn"))
    assert str(emulation.report().rows[0].roles.output) == "e4m3fn"


class RootNorm(torch.nn.Module):
    """A norm that is not torch's."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        return F.rms_norm(x, (16,), self.weight)


def test_a_norm_of_someone_else_is_cast_as_a_whole():
    x, g = small(5, 16), small(5, 16, seed=1)
    y, (dx,), _, emulation = backward(torch.nn.Sequential(RootNorm()), [x], g, norm="e4m3fn")
    leaf = to_torch(hn.cast(x, "e4m3fn")).requires_grad_()
    plain = F.rms_norm(leaf, (16,))
    plain.backward(to_torch(hn.cast(g, "e4m3fn")))
    assert same(y, hn.cast(plain.detach().numpy(), "e4m3fn"))
    assert same(dx, hn.cast(leaf.grad.numpy(), "e4m3fn"))
    assert [(row.operation, row.emulated) for row in emulation.report()] == [("RootNorm", True), ("rms_norm", False)]


def test_the_module_is_left_as_it_was():
    layer = torch.nn.Linear(64, 8)
    x = to_torch(small(3, 64))
    before = layer(x)
    with emulate(layer, linear="e2m1"):
        assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), before)
    assert not layer._forward_hooks
    assert not layer._forward_pre_hooks


def test_the_loss_is_computed_as_it_is():
    layer = torch.nn.Linear(4, 4)
    with emulate(layer, linear="e2m1", softmax="e2m1", attention="e2m1") as emulation:
        y = layer(torch.ones(2, 4))
        assert torch.equal((y @ y.T).softmax(-1), torch.softmax(y.clone() @ y.T.clone(), -1))
    assert [row.operation for row in emulation.report()] == ["linear"]
