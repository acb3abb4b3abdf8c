"""Sums under every accumulator against the rational model, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfulp as hu
from halfulp import numerics as hn

from .accumulating import KINDS, addend, expected, operands
from .common import BACKENDS, same

SHAPES = [(2, 3, 37), (2, 2, 50), (2, 2, 1), (1, 2, 0)]
SCALAR = [n for n, h in hn.HARDWARE.items() if not isinstance(hn.format(h.operands[0]), (hn.Block, hn.Int))]
RULES = [
    "fp32",
    "fp32:product=fp32",
    "fp32:toward_zero",
    "fp32:to_odd:product=bf16:flush",
    "bf16",
    "bf16:up:product=bf16",
    "fp16:down",
    "fp16:overflow=nan",
    "e8m13:nearest_away",
    "e4m3fn:nearest_zero",
    "e5m2:overflow=saturate",
    "pairwise:fp32",
    "pairwise:fp16:product=fp16",
    "pairwise:bf16:to_odd",
    "exact",
    "exact:bf16:up",
    "exact:e4m3fn",
    "chunked:5:bf16",
    "chunked:3:(pairwise:fp16):outer=(pairwise:bf16)",
    "chunked:7:exact:outer=(fp16:toward_zero)",
    "aligned:group=32:fraction=13:output=e8m13",
    "aligned:group=6:fraction=9:output=fp16:up:cut=down:zero_exponent=none",
    "aligned:group=3:fraction=30:output=bf16:nearest_even:cut=nearest_even:least_exponent=-20",
    "aligned:group=4:fraction=7:interleave=2",
    "aligned_late:group=3:fraction=10:sum_fraction=12:odd_even:output=fp16:to_odd",
]


def check(accumulator, formats, shape, kind, seed, with_c=True, **options):
    """How many of the results differ from the model's, and of how many."""
    rng = np.random.default_rng(seed)
    m, n, k = shape
    a, b = operands(rng, formats[0], (m, k), kind), operands(rng, formats[1], (k, n), kind)
    c = addend(rng, (m, n), kind) if with_c else np.zeros((m, n), np.float32)
    machine = accumulator if isinstance(accumulator, hn.Hardware) else None
    given = None if machine is not None and machine.truncates else formats
    rule = options.pop("rule", accumulator)
    got = hn.matmul(a, b, rule, c=c if with_c else None, formats=given, **options)
    want = expected(accumulator, a, b, c, formats, machine)
    nan = np.isnan(got) & np.isnan(want)
    return int(((got.view(np.int32) != want.view(np.int32)) & ~nan).sum()), got.size


def total(accumulator, pairs, **options):
    """The same for all kinds of numbers, a long and a short sum of each for every pair of formats."""
    wrong = checked = 0
    for i, formats in enumerate(pairs):
        for j, kind in enumerate(KINDS):
            for k in ((i + j) % 2, 2 + (i + j) % 3 // 2):
                bad, size = check(accumulator, formats, SHAPES[k], kind, (i, j, k), (j + k) % 3 > 0, **options)
                wrong, checked = wrong + bad, checked + size
    return wrong, checked


@pytest.mark.parametrize("name", SCALAR)
def test_machines_equal_the_model(name):
    machine = hn.accumulator(name)
    wrong, checked = total(machine, [(x, machine.operands[-1]) for x in machine.operands[:3]])
    assert checked >= 60
    assert wrong == 0


@pytest.mark.parametrize("name", RULES)
def test_rules_equal_the_model(name):
    wrong, checked = total(hn.accumulator(name), [("bf16", "fp32"), ("e4m3fn", "fp16")])
    assert checked >= 120
    assert wrong == 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("hopper-fp8", {"rounding": "nearest_even"}),
        ("hopper-fp8", {"fraction": 14}),
        ("hopper-fp8", {"group": 16}),
        ("hopper-fp8", {"cut": "down"}),
        ("hopper-fp8", {"output": hn.format("e8m12")}),
        ("blackwell-fp16-fp16", {"rounding": "toward_zero"}),
        ("ampere-bf16", {"zero_exponent": -100}),
        ("cdna3-fp16", {"odd_even": True}),
        ("cdna3-fp8", {"sum_fraction": 24}),
        ("cdna3-fp8", {"fraction": 23}),
    ],
)
def test_the_comparison_sees_a_wrong_rule(right, wrong):
    """The checks above can fail: a rule that differs in one field gives other bits."""
    machine = hn.accumulator(right)
    other = replace(machine, rule=replace(machine.rule, **wrong))
    pairs = [(x, machine.operands[-1]) for x in machine.operands]
    assert total(machine, pairs, rule=other)[0] > 0


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("bf16", "bf16:product=bf16"),
        ("fp32", "fp32:product=fp32"),
        ("fp32", "pairwise:fp32"),
        ("fp16:down", "fp16:toward_zero"),
        ("exact", "fp32"),
        ("chunked:5:bf16", "chunked:5:bf16:outer=bf16"),
    ],
)
def test_the_comparison_sees_a_wrong_order_or_rounding(right, wrong):
    assert total(hn.accumulator(right), [("fp16", "fp32")], rule=wrong)[0] > 0


def test_the_witness_of_hopper_and_blackwell():
    a, b = np.float32([256, 2**-6]), np.float32([1, 1])
    assert hn.dot(a, b, "hopper-fp8") == 256.0
    assert hn.dot(a, b, "blackwell-fp8") == 256.015625
    assert hn.dot(a, b, "chunked:1:hopper-fp8") == 256.015625


def test_a_large_product_equals_the_model_where_sampled():
    rng = np.random.default_rng(3)
    a, b = operands(rng, "e4m3fn", (512, 512), "normal"), operands(rng, "e4m3fn", (512, 512), "normal")
    got = hn.matmul(a, b, "hopper-fp8")
    for _ in range(8):
        i, j = rng.integers(0, 512, 2)
        zero = np.zeros((1, 1), np.float32)
        want = expected(hn.accumulator("hopper-fp8"), a[i : i + 1], b[:, j : j + 1], zero, ("e4m3fn", "e4m3fn"))
        assert same(got[i : i + 1, j : j + 1], want)


def test_promotion_every_128_products_keeps_what_13_bits_lose():
    a, b = np.ones(4096, np.float32), np.full(4096, 2**-9, np.float32)
    a[0] = 256
    b[0] = 1
    exact = hn.dot(a, b, "exact")
    hopper, promoted = (
        abs(hn.dot(a, b, n, formats="e4m3fn") - exact) for n in ("hopper-fp8", "chunked:128:hopper-fp8")
    )
    assert hopper > 7
    assert promoted < 0.3


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["hopper-fp8", "ada-fp8-fp16", "cdna3-fp8", "fp16", "pairwise:bf16:down", "exact:bf16"]),
    codes=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=0, max_size=40),
    c=st.floats(width=32),
)
def test_any_codes_and_any_c(name, codes, c):
    accumulator = hn.accumulator(name)
    fmt = accumulator.operands[0] if isinstance(accumulator, hn.Hardware) else "e5m2"
    a, b = (hn.decode(np.array([pair[i] for pair in codes], np.uint8), fmt)[None] for i in (0, 1))
    c = np.float32([[c]])
    want = expected(accumulator, a, b.T, c, (fmt, fmt), accumulator)
    assert same(hn.matmul(a, b.T, name, c=c, formats=fmt), want)


@pytest.mark.parametrize(
    "name",
    ["hopper-fp8", "hopper-bf16", "cdna3-fp8", "bf16", "pairwise:fp32", "exact", "fp32", "chunked:16:hopper-fp8"],
)
def test_tiles_batches_and_threads_change_nothing(name):
    rng = np.random.default_rng(0)
    fmt = "e4m3fnuz" if "cdna3" in name else "e4m3fn" if "fp8" in name else "bf16"
    a, b = operands(rng, fmt, (2, 1, 5, 40), "special"), operands(rng, fmt, (3, 40, 1100), "special")
    c = addend(rng, (1100,), "normal")
    got = hn.matmul(a, b, name, c=c, formats=fmt)
    assert got.shape == (2, 3, 5, 1100)
    for i, j in np.ndindex(2, 3):
        assert same(got[i, j], hn.matmul(a[i, 0], b[j], name, c=c, formats=fmt))
    alone = hn.matmul(a[0, 0], b[0], name, c=c, formats=fmt)
    assert same(alone, hn.matmul(a[0, 0], b[0], name, c=c, formats=fmt, threads=3))
    assert same(got, hn.matmul(a, b, name, c=c, formats=fmt, threads=4))
    narrow = [
        hn.matmul(a[0, 0], b[0][:, j : j + 100], name, c=c[j : j + 100], formats=fmt) for j in range(0, 1100, 100)
    ]
    assert same(alone, np.concatenate(narrow, axis=1))


def test_shapes_are_numpys():
    rng = np.random.default_rng(0)
    for left, right in [
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (4, 2)),
        ((5, 3, 4), (4, 2)),
        ((3, 4), (6, 4, 2)),
        ((0, 4), (4, 2)),
    ]:
        a, b = (rng.integers(-3, 4, shape).astype(np.float32) for shape in (left, right))
        for name in ("exact", "fp32", "hopper-fp16", "int32"):
            got = hn.matmul(a, b, name)
            assert got.shape == np.matmul(a, b).shape
            assert np.array_equal(got, np.matmul(a, b))
    a, b = rng.integers(-3, 4, (3, 4)).astype(np.float32), rng.integers(-3, 4, (2, 4)).astype(np.float32)
    assert np.array_equal(hn.matmul(a, b, "exact", transpose_b=True), a @ b.T)
    assert np.array_equal(hn.dot(a, b[:1], "exact"), a @ b[0])
    assert hn.dot(a[0], b[0], "exact", c=np.float32(2)) == a[0] @ b[0] + 2


@pytest.mark.parametrize("name", ["hopper-fp8", "exact", "int32", "chunked:16:bf16"])
def test_backends_give_the_same_bits(name):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((7, 33), (33, 5)))
    want = hn.matmul(a, b, name, c=np.ones(5, np.int32 if name == "int32" else np.float32))
    for make in BACKENDS.values():
        x, y = make(a), make(b)
        got = hn.matmul(x, y, name, c=make(np.ones(5, np.int32 if name == "int32" else np.float32)))
        assert type(got) is type(x)
        assert same(np.asarray(got), want)


def test_inside_jit_and_vmap():
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    a, b = operands(rng, "e4m3fn", (3, 7, 40), "normal"), operands(rng, "e4m3fn", (40, 5), "normal")
    c = np.float32([1, 2, 3, 4, 5])
    want = hn.matmul(a, b, "hopper-fp8", c=c)

    def f(a, c):
        return hn.matmul(a, jnp.asarray(b), "hopper-fp8", c=c) * 1.0

    assert same(np.asarray(jax.jit(f)(a, c)), want)
    assert same(np.asarray(jax.vmap(f, in_axes=(0, None))(a, c)), want)
    assert same(np.asarray(jax.jit(lambda x: hn.dot(x, x, "bf16"))(a[0, 0])), hn.dot(a[0, 0], a[0, 0], "bf16"))


def test_dtypes_say_their_format():
    import ml_dtypes
    import torch

    rng = np.random.default_rng(0)
    a, b = operands(rng, "e5m2", (4, 64), "tiny"), operands(rng, "e4m3fn", (64, 3), "tiny")
    want = hn.matmul(a, b, "hopper-fp8-fp16", formats=("e5m2", "e4m3fn"))
    x, y = a.astype(ml_dtypes.float8_e5m2), b.astype(ml_dtypes.float8_e4m3fn)
    assert same(hn.matmul(x, y, "hopper-fp8-fp16"), want)
    x, y = torch.from_numpy(a).to(torch.float8_e5m2), torch.from_numpy(b).to(torch.float8_e4m3fn)
    assert same(hn.matmul(x, y, "hopper-fp8-fp16").numpy(), want)
    # a subnormal's exponent is its format's, so that the format shows in the sum
    rule = hn.Aligned(4, 3)
    x, y = np.float32([[2**-9, 2**-9 * 1.25]]), np.ones((2, 1), np.float32)
    assert hn.matmul(x, y, rule, formats=("fp32", "e4m3fn")) == 2**-9 * 2.25
    assert hn.matmul(x, y, rule, formats=("e4m3fn", "e4m3fn")) == 2**-8


def test_operands_are_cast_and_results_are_rounded_on_request():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 50)), rng.standard_normal((50, 4))
    near = [hn.cast(x, "e4m3fn").astype(np.float32) for x in (a, b)]
    assert same(hn.matmul(a, b, "fp32", formats="e4m3fn"), hn.matmul(*near, "fp32"))
    assert same(hn.matmul(a, near[1], "bf16", formats=("e4m3fn", None)), hn.matmul(*near, "bf16"))
    whole = hn.matmul(*near, "fp32")
    assert same(hn.matmul(*near, "fp32", result="bf16", rounding="up"), hn.cast(whole, "bf16", rounding="up"))
    assert same(hn.matmul(*near, "exact", result="bf16"), hn.matmul(*near, hn.Exact("bf16")))
    out = np.empty((3, 4), np.float32)
    assert hn.matmul(*near, "fp32", out=out) is out
    assert same(out, whole)


def test_nan_and_zero_bits():
    nan, one = np.float32([[np.nan]]), np.float32([[1]])
    bits = {
        n: int(hn.matmul(nan, one, n).view(np.int32)[0, 0])
        for n in ("hopper-fp16", "hopper-fp16-fp16", "fp32", "exact")
    }
    assert bits == {"hopper-fp16": 0x7FFFFFFF, "hopper-fp16-fp16": 0x7FFFE000, "fp32": 0x7FC00000, "exact": 0x7FC00000}
    minus = np.float32([[-0.0]])
    signs = {
        n: bool(np.signbit(hn.matmul(minus, one, n, c=minus))[0, 0])
        for n in ("fp32", "pairwise:fp32", "hopper-fp16", "exact")
    }
    assert signs == {"fp32": True, "pairwise:fp32": True, "hopper-fp16": False, "exact": False}
    inf, minus_inf = np.float32([[np.inf]]), np.float32([[-np.inf]])
    for name in ("hopper-fp16", "cdna3-fp16", "fp32", "pairwise:bf16", "exact"):
        assert hn.matmul(inf, one, name) == np.inf
        assert hn.matmul(inf, one, name, c=np.float32([[-3e38]])) == np.inf
        assert np.isnan(hn.matmul(inf, one, name, c=minus_inf))
        assert np.isnan(hn.matmul(inf, np.float32([[0]]), name))


def test_public_names():
    assert hu.matmul is hn.matmul
    assert hu.dot is hn.dot
    assert hu.accumulator is hn.accumulator


def test_inside_torch_compile():
    import torch

    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(operands(rng, "e4m3fn", shape, "normal")) for shape in ((8, 64), (64, 8)))
    compiled = torch.compile(lambda a, b: hn.matmul(a + 0, b, "hopper-fp8") * 2, backend="eager")
    assert torch.equal(compiled(a, b), hn.matmul(a, b, "hopper-fp8") * 2)
