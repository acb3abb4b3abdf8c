"""fake_quantize, Cast and Roles: gradients against masks worked out by hand, the same bits everywhere."""

import numpy as np
import pytest
import torch

from halfulp import numerics as hn
from halfulp.numerics import Cast, Roles, Stochastic, fake_quantize

from .common import same, to_jax, to_torch

X = np.float32([[0.0, -0.0, 0.3, -2.6, 5.9, 6.0, 6.1, -6.1, 7.0, -100.0, 448.0, 449.0, np.inf, -np.inf, np.nan, 1e-42]])
G = np.float32(np.random.default_rng(0).normal(size=X.shape))


def torch_gradient(x, g, *args, **kwargs):
    leaf = to_torch(x).requires_grad_()
    y = fake_quantize(leaf, *args, **kwargs)
    y.backward(to_torch(g))
    return y.detach().numpy(), leaf.grad.numpy()


def jax_gradient(x, g, *args, **kwargs):
    import jax

    def both(x, g):
        y, pull = jax.vjp(lambda x: fake_quantize(x, *args, **kwargs), x)
        return y, pull(g)[0]

    # compiled whole: one by one, jax would compile each operation of a cast
    return tuple(map(np.asarray, jax.jit(both)(to_jax(x), to_jax(g))))


GRADIENT = {"torch": torch_gradient, "jax": jax_gradient}


@pytest.mark.parametrize("backend", GRADIENT)
@pytest.mark.parametrize("fmt", ["e2m1", "e4m3fn", "int4", "mxfp4", "nvfp4", "nf4:g8", "bf16"])
def test_straight_through_passes_every_bit_of_the_gradient(backend, fmt):
    y, gradient = GRADIENT[backend](X, G, fmt)
    assert same(y, hn.cast(X, fmt))
    assert same(gradient, G)


# the lowest and the largest number of each format, from its definition
ENDS = {"e2m1": (-6, 6), "e4m3fn": (-448, 448), "int4": (-8, 7), "int4n": (-7, 7), "uint4": (0, 15)}
ENDS |= {"e5m2": (-57344, 57344), "codebook(-1.5,0,0.25,6)": (-1.5, 6)}


@pytest.mark.parametrize("backend", GRADIENT)
@pytest.mark.parametrize("fmt", ENDS)
def test_clipped_is_zero_beyond_the_ends(backend, fmt):
    low, high = ENDS[fmt]
    y, gradient = GRADIENT[backend](X, G, fmt, gradient="clipped")
    beyond = np.greater(X, high) | np.less(X, low)
    assert beyond.any()
    assert same(y, hn.cast(X, fmt))
    assert same(gradient, np.where(beyond, np.float32(0), G))


@pytest.mark.parametrize("backend", GRADIENT)
@pytest.mark.parametrize("fmt", ["mxfp4", "e2m1:g8:scale=e8m0:rule=floor", "mxint8", "mxfp6:axis=0"])
def test_clipped_under_a_scale_is_zero_beyond_the_block(backend, fmt):
    x = np.random.default_rng(1).normal(size=(40, 70)) * 2.0 ** np.arange(-35, 35)
    x[5, [31, 63, 69]] = np.float32([1.9999, -1.9999, 1.9999]) * np.float32(2.0**50)
    x = x.astype(np.float32)
    block = hn.format(fmt)
    element, axis, size = block.element, block.axis, block.size
    low = -element.max if isinstance(element, hn.Float) else element.low / 2**element.fraction
    ends = np.zeros((2, *x.shape))
    for start in range(0, x.shape[axis], size):
        at = (slice(start, start + size),) if axis == 0 else (slice(None), slice(start, start + size))
        amax = np.abs(x[at]).max(axis=axis, keepdims=True)
        scale = np.exp2(np.frexp(amax)[1].astype(float) - 1 - element.emax)  # OCP's floor rule
        ends[0][at], ends[1][at] = low * scale, element.max * scale
    beyond = (x < ends[0]) | (x > ends[1])
    assert beyond.any()
    _, gradient = GRADIENT[backend](x, x, fmt, gradient="clipped")
    assert same(gradient, np.where(beyond, np.float32(0), x))


def test_clipped_tells_subnormals_apart_in_jax():
    """XLA compares subnormals as if they were zero."""
    x = np.float32([1.25, 1.75, -1.75]) * np.float32(2.0**-138)
    tiny = hn.Float(2, 1, bias=141, inf=False, nan=False)
    assert tiny.max == 1.5 * 2.0**-138
    for gradient in GRADIENT.values():
        assert same(gradient(x, np.ones_like(x), tiny, gradient="clipped")[1], np.float32([1, 0, 0]))


def test_no_gradient():
    import jax

    x = torch.ones(3, requires_grad=True)
    assert not fake_quantize(x, "e2m1", gradient=None).requires_grad
    assert not fake_quantize(x, None, gradient=None).requires_grad
    gradient = jax.jit(jax.grad(lambda x: fake_quantize(x, "e2m1", gradient=None).sum()))
    assert same(gradient(to_jax(X)), np.zeros_like(X))


@pytest.mark.parametrize("backend", GRADIENT)
@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", Stochastic(5)])
@pytest.mark.parametrize("fmt", ["e5m2", "mxfp4"])
def test_the_gradient_is_cast_on_its_way_back(backend, rounding, fmt):
    how = Cast(fmt, rounding)
    g = np.float32(np.random.default_rng(2).normal(size=(4, 64)))
    y, gradient = GRADIENT[backend](g * 3, g, None, backward=how)
    assert same(y, g * 3)
    assert same(gradient, hn.cast(g, fmt, rounding=rounding))
    _, clipped = GRADIENT[backend](g * 3, g, "e2m1", gradient="clipped", backward=how)
    assert same(clipped, hn.cast(np.where(np.abs(g * 3) > 6, np.float32(0), g), fmt, rounding=rounding))


def test_second_derivatives_take_casts_for_the_identity():
    import jax
    import jax.numpy as jnp

    x = np.float32([0.3, 1.7, 2.2])
    rounded, expected = hn.cast(x, "e4m3fn"), None

    leaf = to_torch(x).requires_grad_()
    y = fake_quantize(leaf, "e4m3fn", backward="e5m2") ** 3
    (first,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    expected = hn.cast(3 * rounded**2, "e5m2")
    assert same(first.detach().numpy(), expected)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    # the first derivative is e5m2(3 q(x)^2); straight through both it is 6 q(x), cast on its way through q
    assert same(second.numpy(), hn.cast(6 * rounded, "e5m2"))

    def once(x):
        return jax.grad(lambda x: (fake_quantize(x, "e4m3fn", backward="e5m2") ** 3).sum())(x)

    assert same(jax.jit(once)(to_jax(x)), expected)
    assert same(jax.jit(jax.grad(lambda x: jnp.sum(once(x))))(to_jax(x)), hn.cast(6 * rounded, "e5m2"))


@pytest.mark.parametrize(
    ("fmt", "gradient"),
    [
        ("e4m3fn", "clipped"),
        ("mxfp4:axis=0", "clipped"),
        ("e4m3fn:tensor", "straight_through"),
        (Cast("mxfp4", Stochastic(3)), "straight_through"),
    ],
)
def test_vmap_is_a_loop(fmt, gradient):
    import jax

    x = np.float32(np.random.default_rng(3).normal(size=(3, 40, 5))) * np.float32([[[1]], [[20]], [[500]]])

    def loss(x):
        return (fake_quantize(x, fmt, gradient=gradient, backward="e5m2") ** 2).sum()

    each = np.stack([torch.func.grad(loss)(to_torch(example)).numpy() for example in x])
    assert same(torch.func.vmap(torch.func.grad(loss))(to_torch(x)).numpy(), each)
    moved = torch.func.vmap(torch.func.grad(loss), in_dims=1, out_dims=1)(to_torch(x.transpose(1, 0, 2)))
    assert same(moved.numpy().transpose(1, 0, 2), each)
    assert same(jax.jit(jax.vmap(jax.grad(loss)))(to_jax(x)), each)


def test_jit_with_a_traced_step_draws_what_a_whole_number_draws():
    import jax

    how = Cast("e4m3fn", Stochastic(11))
    for step in (0, 1, 2**31 - 1):
        inside = jax.jit(lambda x, step: fake_quantize(x, how.stream("w", step)))(to_jax(G), step)
        assert same(inside, how.stream("w", step)(G))
    assert not same(how.stream("w", 1)(G), how.stream("w", 2)(G))
    assert not same(how.stream("w", 1)(G), how.stream("v", 1)(G))


def test_compiled_by_torch():
    def loss(x, how, back):
        y = fake_quantize(x, how, gradient="clipped", backward=back)
        return (y * y.cos()).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    draws = [Cast("e5m2", Stochastic(seed)) for seed in (1, 2)]
    found = []
    for how, back in (("e4m3fn", "e5m2"), ("mxfp4:axis=0", None), ("mxfp4", draws[0]), ("mxfp4", draws[1])):
        leaves = [to_torch(G * 300).requires_grad_() for _ in range(2)]
        for leaf, function in zip(leaves, (loss, compiled)):
            function(leaf, how, back).backward()
        assert same(leaves[0].grad.numpy(), leaves[1].grad.numpy())
        found.append(leaves[0].grad)
    assert not torch.equal(found[2], found[3])


def test_numpy_is_only_cast():
    assert same(fake_quantize(X, "e2m1", rounding="toward_zero"), hn.cast(X, "e2m1", rounding="toward_zero"))


def test_errors_name_what_was_given():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="gradient='ste': choose one of 'straight_through', 'clipped', None"):
        fake_quantize(x, "e2m1", gradient="ste")
    with pytest.raises(ValueError, match="rounding given with a Cast, which has its own policies"):
        fake_quantize(x, Cast("e2m1"), rounding="up")
    with pytest.raises(ValueError, match="rounding given with no format"):
        fake_quantize(x, None, rounding="up")
    with pytest.raises(ValueError, match=r"backward=\.\.\.: cannot read 'e9'"):
        fake_quantize(x, "e2m1", backward="e9")
    with pytest.raises(ValueError, match="unknown rounding 'nearest': choose one of nearest_even"):
        Cast("e2m1", rounding="nearest")
    with pytest.raises(ValueError, match="overflow='inf' is not possible for e2m1"):
        Cast("e2m1", overflow="inf")
    with pytest.raises(ValueError, match=r"Roles\(gradient=\.\.\.\): cannot read 'e5m3x'"):
        Roles(gradient="e5m3x")


def test_roles_say_what_they_are():
    same_twice = Roles("mxfp4", "mxfp4", "e5m2")
    assert str(same_twice) == "weight mxfp4, activation mxfp4, gradient e5m2"
    assert same_twice.weight_dgrad == Cast("mxfp4")
    other = Roles("mxfp4", gradient=Cast("e5m2", Stochastic(1)), weight_dgrad="mxfp8", gradient_wgrad=None)
    told = "weight mxfp4, gradient e5m2 (stochastic:24), weight_dgrad mxfp8, gradient_wgrad none"
    assert str(other) == told
    assert str(Roles()) == "nothing"
