"""Compatibility profiles against the libraries they name, bit for bit, over every input at which they can differ.

Libraries that are not installed are skipped, by name; so is torch of another version than a profile's.
"""

import contextlib
import importlib
import logging
import warnings
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch

import halfulp as hu
from halfulp import numerics as hn
from halfulp.numerics.compatibility._profiles import EMULATIONS, STEPS

from .common import BACKENDS, critical, same

PAIRS = [
    (profile, fmt)
    for profile in ("torch-2.13", "torch-2.11", "ml_dtypes", "jax", "onnx", "onnx-nonsat")
    for fmt in hn.PROFILES[profile].casts
]
TORCH = {
    "e4m3fn": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0": torch.float8_e8m0fnu,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
ML_DTYPES = {
    "e3m2": "float6_e3m2fn",
    "e2m3": "float6_e2m3fn",
    "e2m1": "float4_e2m1fn",
    "e8m0": "float8_e8m0fnu",
    "bf16": "bfloat16",
    **{n: f"float8_{n}" for n in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e4m3", "e3m4")},
}


def torch_version():
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def need(profile):
    """Skip unless the library that the profile names is here."""
    if profile == "torch-2.13" and torch_version() < (2, 13):
        pytest.skip(f"torch {torch.__version__}: the profile is of 2.13")
    if profile == "torch-2.11" and torch_version() >= (2, 13):
        pytest.skip(f"torch {torch.__version__}: the profile is of 2.12 and before")
    if profile.startswith("onnx"):
        pytest.importorskip("onnx")


def numpy_type(fmt):
    return np.dtype(np.float16) if fmt == "fp16" else np.dtype(getattr(ml_dtypes, ML_DTYPES.get(fmt, fmt)))


def codes_of(array, fmt):
    """The codes in an array of another library's type, whose unused high bits do not count."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}") & np.uint16(2 ** hn.format(fmt).bits - 1)


def torch_cast(x, fmt):
    t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)
    return codes_of(t.to(TORCH[fmt]).view({1: torch.uint8, 2: torch.int16}[TORCH[fmt].itemsize]).numpy(), fmt)


def ml_dtypes_cast(x, fmt):
    with np.errstate(all="ignore"):
        return codes_of(x.astype(numpy_type(fmt)), fmt)


def jax_cast(x, fmt):
    import jax

    with jax.enable_x64(True):
        return codes_of(np.asarray(jax.numpy.asarray(x).astype(numpy_type(fmt))), fmt)


def onnx_cast(saturate):
    def cast(x, fmt):
        from onnx import TensorProto, helper
        from onnx.reference import ReferenceEvaluator

        kinds = {"e2m1": "FLOAT4E2M1", "e8m0": "FLOAT8E8M0", "fp16": "FLOAT16", "bf16": "BFLOAT16"}
        to = getattr(TensorProto, kinds.get(fmt, fmt.upper() if "int" in fmt else f"FLOAT8{fmt.upper()}"))
        source = helper.np_dtype_to_tensor_dtype(x.dtype)
        node = helper.make_node("Cast", ["x"], ["y"], to=to, saturate=saturate)
        ends = [helper.make_tensor_value_info(n, kind, [None]) for n, kind in (("x", source), ("y", to))]
        graph = helper.make_graph([node], "cast", ends[:1], ends[1:])
        opset = 25 if fmt in ("int2", "uint2") else 24
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
        with np.errstate(all="ignore"):
            return codes_of(ReferenceEvaluator(model).run(None, {"x": x})[0], fmt)

    return cast


THEIRS = {
    "torch-2.13": torch_cast,
    "torch-2.11": torch_cast,
    "ml_dtypes": ml_dtypes_cast,
    "jax": jax_cast,
    "onnx": onnx_cast(1),
    "onnx-nonsat": onnx_cast(0),
}


def ties(fmt, real):
    """The critical set of a 16-bit format: what `critical` has, made from all its codes at once."""
    values = hn.decode(np.arange(2**16, dtype=np.uint16), fmt, dtype="float64")
    values = np.unique(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * (1 + 2.0**-12)]])
    points = np.concatenate([points, [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-40]]).astype(real)
    return np.concatenate([points, np.nextafter(points, real(np.inf)), np.nextafter(points, real(-np.inf))])


@cache
def sources(fmt):
    """Inputs by type: the critical ones as float32 and float64, all of bfloat16 and float16, integers."""
    return list(_sources(fmt))


def _sources(fmt):
    scalar = hn.format(fmt)
    find = ties if scalar.bits == 16 else critical
    with np.errstate(over="ignore", invalid="ignore"):
        yield "float32", find(scalar, np.float32)
        yield "float64", find(scalar, np.float64)
    halves = np.arange(2**16, dtype=np.uint16)
    yield "float16", halves.view(np.float16)
    yield "bfloat16", halves.view(ml_dtypes.bfloat16)
    if isinstance(scalar, hn.Float):
        rng = np.random.default_rng(0)
        edges = np.array([0, 1, -1, 16973823, 16973825, 33685503, 2**31 - 1, 2**24 + 1, 448, 464, 465])
        whole = np.concatenate([edges, rng.integers(-(2**31), 2**31, 4000) >> rng.integers(0, 31, 4000)])
        yield "int32", whole.astype(np.int32)
        yield "int64", np.concatenate([whole, whole << 31, (whole << 31) + 1])


def known_difference(profile, fmt, x):
    """Inputs of which the profile's notes say that the real thing does otherwise."""
    if profile == "onnx" and fmt == "e8m0":
        size = np.abs(x.astype(np.float64))
        return ~np.isnan(size) & ((size < 2.0**-126) & (size != 0) | (size > 3.4028235e38) | np.signbit(x))
    if profile == "jax" and fmt == "e5m2" and x.dtype.itemsize == 2:
        return np.isnan(x.astype(np.float32))
    return np.zeros(x.shape, bool)


@pytest.mark.parametrize(("profile", "fmt"), PAIRS)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_codes_are_the_librarys(profile, fmt):
    need(profile)
    for kind, x in sources(fmt):
        if profile.startswith("onnx") and "int" in fmt and kind == "bfloat16":
            continue  # its reference evaluator has no such cast
        theirs = THEIRS[profile](x, fmt)
        ours = hn.encode(x, fmt, profile=profile)
        wrong = (ours != theirs) & ~known_difference(profile, fmt, x)
        if (profile, fmt, kind) == ("jax", "fp16", "float64"):
            # XLA goes over float32 but on processors with AVX512-FP16, where it rounds once
            wrong &= theirs != hn.encode(x, fmt)
        if fmt in ("bf16", "fp16"):  # of NaN only that it is one
            wrong &= ~(np.isnan(hn.decode(ours, fmt)) & np.isnan(hn.decode(theirs.astype(ours.dtype), fmt)))
        some = np.flatnonzero(wrong)[:5]
        assert not wrong.any(), (kind, wrong.sum(), x[some], ours[some], theirs[some])


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("profile", [p for p in hn.PROFILES if p != "microxcaling"])
def test_profiles_are_the_same_in_every_backend(profile, kind):
    x = np.float32([0, -0.0, 1e-45, 3e-39, -7e-39, 1.2e-38, 0.3, -2.5, 464.1, -1e9, 3e38, np.inf, -np.inf, np.nan])
    for fmt in {cast: fmt for fmt, cast in hn.PROFILES[profile].casts.items()}.values():  # one of each kind
        if fmt == "nvfp4":
            continue  # blocks are compared in test_block.py
        expected = hn.cast(x, fmt, profile=profile)
        assert same(np.asarray(hn.cast(BACKENDS[kind](x), fmt, profile=profile)), expected)


def test_integers_and_float64_are_rounded_as_the_library_does():
    # jax-ml/ml_dtypes#401
    x = np.array([-431.99999999999994, 1 + 2.0**-8 + 2.0**-40, 16973823])
    assert hn.cast(x, "e4m3fn", profile="ml_dtypes")[0] == -448
    assert hn.cast(x, "e4m3fn", profile="jax")[0] == hn.cast(x, "e4m3fn")[0] == -416
    assert hn.cast(x, "bf16", profile="ml_dtypes").tolist()[1:] == [1.0, 17039360]
    assert hn.cast(x, "bf16").tolist()[1:] == [1.0078125, 16908288]
    assert hn.cast(np.int64([16973823]), "bf16", profile="torch-2.13").tolist() == [17039360]


def test_what_is_given_goes_before_the_profile():
    x = np.float32([1000, 2.5])
    assert hn.cast(x, "e4m3fn", profile="ml_dtypes", overflow="saturate").tolist() == [448, 2.5]
    assert hn.cast(x, "int4", profile="jax", rounding="up").tolist() == [7, 3]
    assert hn.encode(np.float32([-0.0]), "e5m2", profile="jax", zero="positive").tolist() == [0]
    assert hn.encode(np.float32([np.nan]), "e2m1", profile="jax", nan="max").tolist() == [7]
    assert hu.cast(x, "int4", profile="ml_dtypes").tolist() == [-8, 2]


def test_profiles_under_compilers():
    import jax

    x = np.float32([0, -0.0, 3e-39, -7e-39, 1.2e-38, 0.3, -2.5, 464.1, -1e9, np.inf, np.nan])
    for profile, fmt in (("torch-2.13", "e8m0"), ("ml_dtypes", "e8m0"), ("jax", "e4m3fn"), ("modelopt", "e2m1")):
        expected = hn.cast(x, fmt, profile=profile)
        compiled = jax.jit(lambda v, profile=profile, fmt=fmt: hn.cast(v, fmt, profile=profile))
        assert same(np.asarray(compiled(x)), expected), (profile, fmt)


def test_packing_under_a_profile():
    x = np.float32([[1, -0.0, np.inf, 7.0]])
    assert hn.pack(x, "e2m1", profile="modelopt").codes.tobytes().hex() == "0277"
    assert hn.pack(np.ones((1, 16), np.float32), "nvfp4", profile="torchao").format.division == "reciprocal"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: hn.cast(x, "e4m3fn", profile="torch"), "unknown profile 'torch': did you mean torch-2.13 or torch-2.11"),
        (lambda x: hn.cast(x, "e4m3fn", profile="numpy"), "unknown profile 'numpy': choose one of torch-2.13, torch-2"),
        (lambda x: hn.cast(x, "e2m3", profile="jax"), "profile 'jax' does not say how e2m3 is cast; it has e4m3fn, e5m2"),
        (lambda x: hn.encode(x, "mxfp4", profile="microxcaling"), "gives numbers that are not all codes of mxfp4: use cast"),
        (lambda x: hn.cast(x, "mxfp4", profile="microxcaling", nan="max"), "microxcaling has no nan or zero policies"),
        (lambda x: hn.cast(x, "mxfp4", profile="microxcaling", rounding="up"), "microxcaling has nearest_away, nearest_even"),
        (lambda x: hn.microxcaling(x, "nvfp4"), "microxcaling has MX blocks .* no nvfp4"),
        (lambda x: hn.microxcaling(x, "e2m1", overflow="nan"), "overflow='nan': microxcaling has 'inf' and 'saturate'"),
        (lambda x: hn.microxcaling(x.astype(np.float64), "mxfp4"), "float32, float16 and bfloat16, not float64"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.ones((1, 32), np.float32))


def test_profiles_are_whole():
    for name, profile in hn.PROFILES.items():
        assert profile.version, name
        assert profile.source, name
        assert len(profile.date) == 10, name
        for fmt, cast in profile.casts.items():
            scalar = hn.format(fmt)
            if not isinstance(scalar, hn.Block):
                cast.policy.ends(scalar)
            assert {*(cast.wide or ()), *cast.before} <= STEPS.keys(), (name, fmt)
            assert cast.emulation is None or cast.emulation in EMULATIONS, (name, fmt)
    assert {n for n, p in hn.PROFILES.items() if not p.verified} == {"ptx-satfinite"}


def test_ptx_as_its_document_has_it():
    x = np.float32([464.1, -np.inf, np.nan, 1e9])
    assert hn.cast(x, "e4m3fn", profile="ptx-satfinite").tolist()[:2] == [448, -448]
    assert hn.cast(x, "e5m2", profile="ptx-satfinite").tolist()[3] == 57344
    assert hn.encode(x, "e2m1", profile="ptx-satfinite").tolist() == [7, 15, 7, 7]
    assert hn.encode(np.float32([1.125, 1.25, 5.0]), "e8m0", profile="ptx-satfinite").tolist() == [128, 128, 130]
    assert hn.cast(np.float32([1 + 2.0**-11]), "tf32", profile="ptx-satfinite").tolist() == [1 + 2.0**-10]


# ---- blocks


def block_inputs(seed=0):
    """Rows at every magnitude, of one block each: random ones, and largest elements next to powers of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2048, 32)) * np.exp2(rng.integers(-100, 120, (2048, 1)))
    edge = 2.0 ** rng.integers(-100, 120, 512)
    x[:512, 5] = np.where(rng.random(512) < 0.5, np.nextafter(np.float32(edge), np.float32(0)), edge)
    x[7], x[8] = 0, -0.0
    return x.astype(np.float32)


@pytest.fixture
def torchao():
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao", reason="torchao is not installed")
        return importlib.import_module("torchao.prototype.mx_formats.mx_tensor")


@contextlib.contextmanager
def quiet():
    """Without the warnings that some packages log on import."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("fmt", ["e2m1", "e2m3", "e3m2"])
def test_torchao_elements(torchao, fmt):
    theirs = {
        "e2m1": torchao.f32_to_f4_unpacked,
        "e2m3": torchao.f32_to_f6_e2m3_unpacked,
        "e3m2": torchao.f32_to_f6_e3m2_unpacked,
    }[fmt]
    halves = np.arange(2**16, dtype=np.uint16)
    wide = halves.view(np.float16).astype(np.float32), halves.view(ml_dtypes.bfloat16).astype(np.float32)
    x = np.concatenate([critical(hn.format(fmt), np.float32), *wide])
    x = x[~np.isnan(x) | np.isin(x.view(np.uint32), [0x7FC00000, 0xFFC00000])]
    assert hn.encode(x, fmt, profile="torchao").tolist() == theirs(torch.from_numpy(x)).tolist()


@pytest.mark.parametrize("rule", ["floor", "ceil", "even"])
@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4"])
def test_torchao_mx(torchao, fmt, rule):
    dtype = {
        "mxfp8": torch.float8_e4m3fn,
        "mxfp8-e5m2": torch.float8_e5m2,
        "mxfp6": torchao.DTYPE_FP6_E2M3,
        "mxfp6-e3m2": torchao.DTYPE_FP6_E3M2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }[fmt]
    x = block_inputs()
    scale, data = torchao.to_mx(torch.from_numpy(x), dtype, 32, getattr(torchao.ScaleCalculationMode, rule.upper()))
    data = torchao.unpack_uint4(data).reshape(x.shape) if fmt == "mxfp4" else data.view(torch.uint8)
    ours = hn.encode(x, f"{fmt}:rule={rule}", profile="torchao")
    assert ours.scale.tolist() == scale.view(torch.uint8).tolist()
    assert ours.codes.tolist() == data.tolist()


def test_torchao_nvfp4(torchao):
    theirs = importlib.import_module("torchao.prototype.mx_formats.nvfp4_tensor")
    rng = np.random.default_rng(0)
    on_ties = np.round(rng.standard_normal((256, 256)) * 4) / 4
    spread = rng.standard_normal((256, 256)) * np.exp2(rng.integers(-20, 10, (256, 1)))
    for x in (on_ties.astype(np.float32), spread.astype(np.float32)):
        t = torch.from_numpy(x)
        tensor_scale = theirs.per_tensor_amax_to_scale(t.abs().max())
        scale, data = theirs.nvfp4_quantize(t, 16, tensor_scale)
        ours = hn.encode(x, "nvfp4", profile="torchao")
        assert float(ours.tensor_scale) == float(tensor_scale)
        assert ours.scale.tolist() == scale.view(torch.uint8).reshape(256, 16).tolist()
        assert ours.codes.tolist() == torchao.unpack_uint4(data).reshape(x.shape).tolist()


def test_modelopt():
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        module = importlib.import_module("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    halves = np.arange(2**16, dtype=np.uint16)
    x = np.concatenate([critical(hn.format("e2m1"), np.float32), halves.view(ml_dtypes.bfloat16).astype(np.float32)])
    theirs = module.NVFP4QTensor._cast_fp4(torch.tensor(x))
    assert hn.encode(x, "e2m1", profile="modelopt").tolist() == theirs.tolist()
    rng = np.random.default_rng(0)
    y = (rng.standard_normal((256, 256)) * np.exp2(rng.integers(-6, 6, (256, 1)))).astype(np.float32)
    y[::5, ::3] = -0.0
    data, scale, tensor_scale = module.NVFP4QTensor.quantize(torch.tensor(y), 16)
    ours = hn.encode(y, "nvfp4", profile="modelopt")
    packed = torch.from_numpy(ours.codes[:, 1::2] << 4 | ours.codes[:, ::2])
    assert float(ours.tensor_scale) == float(tensor_scale)
    assert ours.scale.tolist() == scale.view(torch.uint8).reshape(256, 16).tolist()
    assert packed.tolist() == data._quantized_data.tolist()


@pytest.mark.parametrize("fmt", list(hn.PROFILES["compressed-tensors"].casts))
def test_compressed_tensors(fmt):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization.quant_args import QuantizationArgs, round_to_quantized_type_args

    scalar = hn.format(fmt)
    kind = "int" if isinstance(scalar, hn.Fixed) else "float"
    low, high = (scalar.low, scalar.high) if kind == "int" else (-scalar.max, scalar.max)
    halves = np.arange(2**16, dtype=np.uint16)
    x = np.concatenate([critical(scalar, np.float32), halves.view(ml_dtypes.bfloat16).astype(np.float32)])
    args = QuantizationArgs(num_bits=scalar.bits, type=kind)
    theirs = round_to_quantized_type_args(torch.tensor(x), args, torch.tensor(float(low)), torch.tensor(float(high)))
    ours = torch.from_numpy(hn.cast(x, fmt, profile="compressed-tensors"))
    if kind == "int":  # integers have no -0
        theirs, ours = theirs + 0.0, ours + 0.0
    real = torch.from_numpy(~np.isnan(x) | (fmt == "e4m3fn"))
    assert torch.equal(ours[real].nan_to_num(999).view(torch.int32), theirs[real].nan_to_num(999).view(torch.int32))
