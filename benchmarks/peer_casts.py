"""The other libraries that `peers.py` compares, as data: what each has, and how it is called.

A function here imports one library and returns its casts, or fails with ImportError where it is missing.
Numbers go in as numpy arrays, and come out as float64.
"""

import contextlib
import importlib
import logging
import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from halfulp import numerics as hn


@dataclass(frozen=True)
class Cast:
    """One library's cast to some formats. ``formats``: what it calls each, by halfulp's name; ``rounding``: what it
    says it does; ``function``: numbers and its own name for the format to numbers; ``call``: how it was called."""

    library: str
    formats: dict[str, object]
    function: Callable[..., np.ndarray]
    rounding: str = "nearest_even"
    call: str = ""
    source: str = "float32"


@contextlib.contextmanager
def quietly():
    """Without the warnings that some packages give or log."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def load(name):
    """A module, or ImportError; a few fail in other ways where something they need is missing."""
    with quietly():
        try:
            return importlib.import_module(name)
        except (RuntimeError, OSError, AttributeError) as error:
            raise ImportError(f"{name}: {error}") from error


def version_of(package):
    """Of an installed package, or where it was imported from a folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "of a folder"


def of_codes(array, name):
    """Numbers from another library's array, by way of its codes."""
    array = np.ascontiguousarray(array)
    codes = array.view(f"u{array.dtype.itemsize}") & np.uint64(2 ** hn.format(name).bits - 1).astype(
        f"u{array.itemsize}"
    )
    return hn.decode(codes, name, dtype="float64")


FLOAT8 = {
    "e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "e4m3fnuz": "float8_e4m3fnuz",
    "e5m2fnuz": "float8_e5m2fnuz",
    "e8m0": "float8_e8m0fnu",
}
SIXTEEN = {"fp16": "float16", "bf16": "bfloat16"}
SMALL = {"e3m2": "float6_e3m2fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn"}
MORE = {"e4m3": "float8_e4m3", "e3m4": "float8_e3m4", "e4m3b11fnuz": "float8_e4m3b11fnuz"}
INTEGERS = {"int4": "int4", "uint4": "uint4", "int2": "int2"}
IEEE = {"e5m2": (5, 2), "e4m3": (4, 3), "e3m4": (3, 4), "fp16": (5, 10), "bf16": (8, 7)}


def dtype_name(own):
    """halfulp's name of a type of numpy, torch or jax."""
    return next(name for table in (FLOAT8, SIXTEEN, SMALL, MORE, INTEGERS) for name, o in table.items() if o == own)


def both_sources(label, formats, function, call, wide):
    """From float32, and from float64 for a few of the formats."""
    few = {name: own for name, own in formats.items() if name in ("e4m3fn", "e5m2", "e2m1", "bf16", "fp16")}
    floats = {name: own for name, own in formats.items() if name not in INTEGERS}
    integers = {name: own for name, own in formats.items() if name in INTEGERS}
    yield Cast(label, floats, function, call=call)
    if integers:
        yield Cast(label, integers, function, "toward_zero", call)
    if wide:
        yield Cast(label, few, function, call=call, source="float64")


def use_ml_dtypes():
    """Numpy's astype to the types of ml_dtypes."""
    formats = {**FLOAT8, **MORE, **SMALL, "bf16": "bfloat16", **INTEGERS}

    def function(x, own):
        return of_codes(x.astype(getattr(ml_dtypes, own)), dtype_name(own))

    return list(both_sources(f"ml_dtypes {ml_dtypes.__version__}", formats, function, "astype", True))


def use_torch():
    """Tensor.to."""

    def function(x, own):
        dtype = getattr(torch, own)
        bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        return of_codes(torch.tensor(x).to(dtype).view(bits).numpy(), dtype_name(own))

    label = f"torch {torch.__version__}"
    return list(both_sources(label, {**FLOAT8, **SIXTEEN}, function, "Tensor.to", True))


def use_jax():
    """astype, compiled by XLA for the CPU; float64 under x64."""
    jax = load("jax")

    def function(x, own):
        dtype = np.float16 if own == "float16" else getattr(ml_dtypes, own)
        with jax.enable_x64(True):
            return of_codes(np.asarray(jax.numpy.asarray(x).astype(dtype)), dtype_name(own))

    formats = {**FLOAT8, **MORE, "e2m1": SMALL["e2m1"], **SIXTEEN, **INTEGERS}
    return list(both_sources(f"jax {jax.__version__}", formats, function, "astype on XLA:CPU", True))


def use_onnx():
    """The reference evaluator's Cast, saturating and not."""
    onnx = load("onnx")
    reference = load("onnx.reference")
    types = {**FLOAT8, "e2m1": SMALL["e2m1"], **SIXTEEN, "int4": "int4", "uint4": "uint4"}
    proto = {"e2m1": "FLOAT4E2M1", "e8m0": "FLOAT8E8M0", "fp16": "FLOAT16", "bf16": "BFLOAT16"}

    def evaluate(saturate, **attributes):
        def function(x, own):
            name = dtype_name(own)
            to = getattr(onnx.TensorProto, proto.get(name, name.upper() if "int" in name else f"FLOAT8{name.upper()}"))
            node = onnx.helper.make_node("Cast", ["x"], ["y"], to=to, saturate=saturate, **attributes)
            source = onnx.helper.np_dtype_to_tensor_dtype(x.dtype)
            ends = [onnx.helper.make_tensor_value_info(n, kind, [None]) for n, kind in (("x", source), ("y", to))]
            graph = onnx.helper.make_graph([node], "cast", ends[:1], ends[1:])
            model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
            return of_codes(reference.ReferenceEvaluator(model).run(None, {"x": x})[0], name)

        return function

    label = f"onnx {onnx.__version__}"
    plain = {name: own for name, own in types.items() if name != "e8m0" and "int" not in name}
    saturating = list(both_sources(label, plain, evaluate(1), "reference Cast", True))
    float8 = {name: own for name, own in plain.items() if name in FLOAT8}
    scale = {"e8m0": types["e8m0"]}
    return [
        *saturating,
        Cast(label, float8, evaluate(0), call="reference Cast, saturate=0"),
        Cast(label, scale, evaluate(1), "up", "reference Cast, round_mode=up"),
        Cast(label, scale, evaluate(1, round_mode="nearest"), call="reference Cast, round_mode=nearest"),
    ]


def use_onnxruntime():
    """Cast to a type and back to float32, with nothing optimized away."""
    onnx, runtime = load("onnx"), load("onnxruntime")

    def evaluate(saturate):
        def function(x, own):
            to = getattr(onnx.TensorProto, own)
            nodes = [
                onnx.helper.make_node("Cast", ["x"], ["y"], to=to, **({"saturate": saturate} if "8E" in own else {})),
                onnx.helper.make_node("Cast", ["y"], ["z"], to=onnx.TensorProto.FLOAT),
            ]
            ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None]) for n in "xz"]
            graph = onnx.helper.make_graph(nodes, "cast", ends[:1], ends[1:])
            model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
            model.ir_version = 10
            options = runtime.SessionOptions()
            options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.log_severity_level = 4
            session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
            return session.run(None, {"x": x})[0].astype(np.float64)

        return function

    label = f"onnxruntime {runtime.__version__}"
    float8 = {name: f"FLOAT8{name.upper()}" for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}
    sixteen = {"fp16": "FLOAT16", "bf16": "BFLOAT16"}
    return [
        Cast(label, float8 | sixteen, evaluate(1), call="Cast, CPU"),
        Cast(label, float8, evaluate(0), call="Cast, CPU, saturate=0"),
    ]


def use_torchao():
    """The unpacked fp6 and fp4 casts of the MX prototype."""
    kernels = load("torchao.prototype.mx_formats.kernels")
    names = {"e2m1": "f32_to_f4_unpacked", "e2m3": "f32_to_f6_e2m3_unpacked", "e3m2": "f32_to_f6_e3m2_unpacked"}

    def function(x, own):
        name = next(n for n, o in names.items() if o == own)
        return hn.decode(getattr(kernels, own)(torch.tensor(x)).numpy(), name, dtype="float64")

    return [Cast(f"torchao {version_of('torchao')}", names, function, call="mx_formats.kernels")]


def use_compressed_tensors():
    """round_to_quantized_type_args, which clamps first."""
    module = load("compressed_tensors.quantization.quant_args")
    formats = {
        "e4m3fn": ("float", 8),
        "e2m3": ("float", 6),
        "e2m1": ("float", 4),
        "int4": ("int", 4),
        "int8": ("int", 8),
    }

    def function(x, own):
        kind, bits = own
        fmt = hn.format(next(n for n, o in formats.items() if o == own))
        low = fmt.low if isinstance(fmt, hn.Fixed) else -fmt.max
        args = module.QuantizationArgs(num_bits=bits, type=kind)
        y = module.round_to_quantized_type_args(torch.tensor(x), args, torch.tensor(float(low)), torch.tensor(fmt.max))
        return y.double().numpy()

    label = f"compressed-tensors {version_of('compressed-tensors')}"
    return [Cast(label, formats, function, call="round_to_quantized_type_args")]


def use_modelopt():
    """The casts of the NVFP4 and MXFP4 tensors."""
    nvfp4 = load("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    mxfp4 = load("modelopt.torch.quantization.qtensor.mxfp4_tensor").MXFP4QTensor

    def in_nvfp4(x, own):
        return hn.decode(nvfp4._cast_fp4(torch.tensor(x)).numpy(), "e2m1", dtype="float64")

    def in_mxfp4(x, own):
        rows = np.zeros((len(x), 32), np.float32)
        rows[:, 0], rows[:, 1] = 6, np.clip(x, -6, 6)  # so that the scale is 1
        codes = mxfp4.quantize(torch.tensor(rows), 32)[0]._quantized_data.numpy()[:, 0] >> 4
        return hn.decode(codes, "e2m1", dtype="float64")

    label = f"modelopt {version_of('nvidia-modelopt')}"
    return [
        Cast(label, {"e2m1": None}, in_nvfp4, call="NVFP4QTensor._cast_fp4"),
        Cast(label, {"e2m1": None}, in_mxfp4, call="MXFP4QTensor.quantize, inputs clipped"),
    ]


def use_gfloat():
    """round_ndarray, saturating only where there is neither infinity nor NaN."""
    gfloat, formats = load("gfloat"), load("gfloat.formats")
    names = {
        **{
            name: f"format_info_ocp_{name.removesuffix('fn')}"
            for name in ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1", "e8m0")
        },
        "fp16": "format_info_binary16",
        "bf16": "format_info_bfloat16",
    }

    def with_mode(mode):
        def function(x, own):
            finite = own.endswith(("e2m1", "e2m3", "e3m2"))
            return gfloat.round_ndarray(getattr(formats, own), x.astype(np.float64), mode, sat=finite)

        return function

    label, modes = f"gfloat {version_of('gfloat')}", gfloat.RoundMode
    away = {name: own for name, own in names.items() if name != "e8m0"}
    return [
        Cast(label, names, with_mode(modes.TiesToEven), call="round_ndarray, TiesToEven"),
        Cast(label, away, with_mode(modes.TiesToAway), "nearest_away", "round_ndarray, TiesToAway"),
        Cast(label, away, with_mode(modes.TowardZero), "toward_zero", "round_ndarray, TowardZero"),
    ]


def use_apytypes():
    """Arrays from floats, and casts of arrays of float32."""
    apytypes = load("apytypes")

    def from_float(x, own):
        return apytypes.APyFloatArray.from_float(x.astype(np.float64), *own).to_numpy()

    def cast(x, own):
        return apytypes.APyFloatArray.from_float(x.astype(np.float64), 8, 23).cast(*own).to_numpy()

    label = f"apytypes {apytypes.__version__}"
    return [Cast(label, IEEE, from_float, call="from_float"), Cast(label, IEEE, cast, call="cast from (8, 23)")]


def use_pychop():
    """Chop on numpy."""
    pychop = load("pychop")
    pychop.backend("numpy")

    def with_mode(rmode):
        return lambda x, own: np.asarray(
            pychop.Chop(exp_bits=own[0], sig_bits=own[1], rmode=rmode)(x.astype(np.float64))
        )

    label = f"pychop {version_of('pychop')}"
    return [
        Cast(label, IEEE, with_mode(1), call="Chop, rmode=1"),
        Cast(label, IEEE, with_mode(8), "nearest_away", "Chop, rmode=8"),
    ]


def use_qpytorch():
    """float_quantize, whose formats reserve no exponent for infinity and NaN."""
    quant = load("qtorch.quant")
    formats = {"e5m10f": (5, 10), "e5m2f": (5, 2), "e4m3f": (4, 3), "e2m1": (2, 1)}

    def function(x, own):
        return quant.float_quantize(torch.tensor(x), *own, rounding="nearest").double().numpy()

    label = f"QPyTorch {version_of('qtorch')}"
    return [
        Cast(label, formats, function, call='float_quantize, "nearest"'),
        Cast(label, formats, function, "nearest_away", 'float_quantize, "nearest"'),
    ]


def microxcaling_label():
    """With the commit, where its folder has one: it has no versions."""
    folder = Path(load("mx").__file__).parent
    command = ["git", "-C", str(folder), "log", "-1", "--format=%h (%as)"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"microxcaling {found.stdout.strip()}".strip()


def use_microxcaling():
    """_quantize_elemwise, saturating, with its two roundings to nearest."""
    ops = load("mx.elemwise_ops")
    names = {"e4m3fn": "fp8_e4m3", "e5m2": "fp8_e5m2", "e3m2": "fp6_e3m2", "e2m3": "fp6_e2m3", "e2m1": "fp4_e2m1"}
    names |= {"fp16": "fp16", "bf16": "bf16"}

    def with_mode(mode):
        def function(x, own):
            y = ops._quantize_elemwise(torch.tensor(x), own, round=mode, saturate_normals=True)
            return y.double().numpy()

        return function

    label = microxcaling_label()
    return [
        Cast(label, names, with_mode("even"), call="_quantize_elemwise, even"),
        Cast(label, names, with_mode("nearest"), "nearest_away", "_quantize_elemwise, nearest (default)"),
    ]


LIBRARIES = {
    "ml_dtypes": use_ml_dtypes,
    "torch": use_torch,
    "jax": use_jax,
    "onnx": use_onnx,
    "onnxruntime": use_onnxruntime,
    "torchao": use_torchao,
    "compressed-tensors": use_compressed_tensors,
    "modelopt": use_modelopt,
    "gfloat": use_gfloat,
    "apytypes": use_apytypes,
    "pychop": use_pychop,
    "qpytorch": use_qpytorch,
    "microxcaling": use_microxcaling,
}
"""By the name of the option that says where each lies."""
