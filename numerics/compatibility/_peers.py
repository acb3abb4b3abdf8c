"""Compatibility profiles as data: what other libraries' casts do, each fact with its source.

Version and date say what was looked at; ``verified`` profiles are compared with the real library, bit for bit,
in tests/numerics/test_profiles.py. What their notes list is not reproduced.
"""

from __future__ import annotations

from .._policy import Policy
from ._profiles import CastProfile, CastRule

_EXACT: tuple[str, ...] = ()  # one rounding, from sources of any width

# Where a source is float64 or a wide integer nearly every library goes through float32 (`CastRule.wide`).
_NEAREST = CastRule()
_SATURATE = CastRule(Policy(overflow="saturate"))
_OVERFLOW_NAN = CastRule(Policy(overflow="nan"))
_TRUNCATE_WRAP = CastRule(Policy("toward_zero", overflow="wrap"), wide=_EXACT)
_TRUNCATE_SATURATE = CastRule(Policy("toward_zero", overflow="saturate"), wide=_EXACT)

_INTEGERS = ("int2", "int4", "uint2", "uint4")

_TORCH = {
    "e4m3fn": _SATURATE,
    "e5m2": CastRule(Policy(nan=(0x7F, 0xFF))),
    "e4m3fnuz": _OVERFLOW_NAN,
    "e5m2fnuz": _OVERFLOW_NAN,
    "e8m0": CastRule(Policy(overflow="nan"), before=("magnitude", "tiny_up")),
    "fp16": _NEAREST,
    "bf16": _NEAREST,
}

_ML_DTYPES = {
    "e4m3fn": _OVERFLOW_NAN,
    "e5m2": _NEAREST,
    "e4m3fnuz": _OVERFLOW_NAN,
    "e5m2fnuz": _OVERFLOW_NAN,
    "e4m3b11fnuz": _OVERFLOW_NAN,
    "e4m3": _NEAREST,
    "e3m4": _NEAREST,
    "e8m0": CastRule(Policy(overflow="nan"), before=("no_zero", "tiny_up")),
    "e3m2": CastRule(Policy(overflow="saturate", nan=(0x20, 0x00))),
    "e2m3": CastRule(Policy(overflow="saturate", nan=(0x20, 0x00))),
    "e2m1": CastRule(Policy(overflow="saturate", nan=(0x8, 0x0))),
    "bf16": _NEAREST,
    **dict.fromkeys(_INTEGERS, _TRUNCATE_WRAP),
}

_JAX = {
    "e4m3fn": CastRule(Policy(overflow="nan"), wide=_EXACT),
    "e5m2": CastRule(wide=_EXACT),
    "e4m3fnuz": CastRule(Policy(overflow="nan"), wide=_EXACT),
    "e5m2fnuz": CastRule(Policy(overflow="nan"), wide=_EXACT),
    "e4m3b11fnuz": CastRule(Policy(overflow="nan"), wide=_EXACT),
    "e4m3": CastRule(wide=_EXACT),
    "e3m4": CastRule(wide=_EXACT),
    "e8m0": CastRule(Policy(overflow="nan"), before=("no_zero", "tiny_up"), wide=("no_tiny", "tiny_up")),
    "e2m1": CastRule(Policy(overflow="saturate", nan=0x8), wide=_EXACT),
    "fp16": _NEAREST,
    "bf16": CastRule(wide=("float32", "flush")),
    **dict.fromkeys(_INTEGERS, _TRUNCATE_SATURATE),
}

# ONNX leaves NaN and overflow of the 4-bit and 2-bit types open; these are its reference evaluator's
_ONNX_SMALL = {"e2m1": _ML_DTYPES["e2m1"], **dict.fromkeys(_INTEGERS, _TRUNCATE_WRAP)}
_ONNX_WIDE = {"fp16": CastRule(wide=_EXACT), "bf16": _NEAREST}

_MX = ("mxfp8", "mxfp8-e5m2", "mxfp6", "mxfp6-e3m2", "mxfp4")
_MICROXCALING = CastRule(Policy("nearest_away"), wide=_EXACT, emulation="microxcaling")

PROFILES: dict[str, CastProfile] = {
    "torch-2.13": CastProfile(
        _TORCH,
        version="torch 2.13.0, CPU",
        source="measured; e4m3fn saturates since pytorch/pytorch#178817",
        date="2026-11-30",
        verified=True,
        notes=("the NaN of bf16 is 0xffff or 0x7fc0, as the loop was vectorized or not",),
    ),
    "torch-2.11": CastProfile(
        {**_TORCH, "e4m3fn": _OVERFLOW_NAN},
        version="torch 2.11.0 and 2.12.0, CPU",
        source="measured; the release before e4m3fn saturates",
        date="2026-11-30",
        verified=True,
        notes=("the NaN of bf16 is 0xffff or 0x7fc0, as the loop was vectorized or not",),
    ),
    "ml_dtypes": CastProfile(
        _ML_DTYPES,
        version="ml_dtypes 0.6.0, numpy arrays",
        source="measured; arrays of float64 and integers go through float32 (jax-ml/ml_dtypes#401)",
        date="2026-11-30",
        verified=True,
    ),
    "jax": CastProfile(
        _JAX,
        version="jax 0.10.2, XLA on CPU, astype",
        source="measured",
        date="2026-11-30",
        verified=True,
        notes=(
            "astype to float6_e2m3fn and float6_e3m2fn fails on XLA:CPU, so these are not here",
            "NaN of float16 and bfloat16 becomes 0x7f in e5m2; reproduced is that of float32, 0x7e or 0xfe",
        ),
    ),
    "onnx": CastProfile(
        {
            **dict.fromkeys(("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"), _SATURATE),
            "e8m0": CastRule(Policy("up", overflow="saturate"), before=("magnitude",)),
            **_ONNX_SMALL,
            **_ONNX_WIDE,
        },
        version="ONNX Cast, opset 19 to 25, saturate=1 (the default), round_mode=up",
        source="the operator's tables; compared with onnx 1.23.2's reference evaluator",
        date="2026-11-30",
        verified=True,
        notes=(
            "e8m0 of infinity and of numbers below 2**-126 follows the operator's table, not the reference "
            "evaluator, which has NaN and 2**-126 for them; of negative numbers the table says nothing",
        ),
    ),
    "onnx-nonsat": CastProfile(
        {
            **dict.fromkeys(("e4m3fn", "e4m3fnuz", "e5m2fnuz"), _OVERFLOW_NAN),
            "e5m2": _NEAREST,
            **_ONNX_SMALL,
            **_ONNX_WIDE,
        },
        version="ONNX Cast, opset 19 to 25, saturate=0",
        source="the operator's tables; compared with onnx 1.23.2's reference evaluator",
        date="2026-11-30",
        verified=True,
        notes=("e8m0 is defined for saturate=0 only together with round_mode=nearest, which is ml_dtypes' cast",),
    ),
    "ptx-satfinite": CastProfile(
        {
            **dict.fromkeys(("e4m3fn", "e5m2", "fp16", "bf16"), _SATURATE),
            **dict.fromkeys(("e3m2", "e2m3", "e2m1"), CastRule(Policy(overflow="saturate", nan="max"))),
            "e8m0": CastRule(Policy("up", overflow="saturate")),
            "tf32": CastRule(Policy("nearest_away", overflow="saturate")),
        },
        version="PTX ISA 9.0, cvt.rn.satfinite (.rp for ue8m0, .rna for tf32)",
        source="PTX ISA, section cvt: NaN becomes NaN, or the largest number where a format has none",
        date="2026-11-30",
        verified=False,
        notes=("which of several NaN codes comes out, and ue8m0 of negative numbers, are not described there",),
    ),
    "torchao": CastProfile(
        {
            "e2m1": CastRule(Policy(overflow="saturate", nan=(0x3, 0xB))),
            "e2m3": CastRule(Policy(overflow="saturate", nan=(0x0C, 0x2C))),
            "e3m2": CastRule(Policy(overflow="saturate", nan=(0x0E, 0x2E))),
            **{name: _NEAREST for stem in _MX for name in (stem, *(f"{stem}:rule={r}" for r in ("ceil", "even")))},
            "nvfp4": CastRule(format="nvfp4:scale=e4m3fnns:division=reciprocal"),
        },
        version="torchao 0.18.0, prototype/mx_formats, eager, CPU",
        source="measured",
        date="2026-11-30",
        verified=True,
        notes=(
            "elements have no NaN, and what becomes of one depends on its payload; reproduced is the usual NaN's",
            "a block whose scale is 2**-127 (amax < 2**(emax - 126)) is divided by 2**-126 but decoded with "
            "2**-127 there, half of what went in",
            "a block with infinity, and no NaN, has a finite scale there",
        ),
    ),
    "modelopt": CastProfile(
        {
            "e2m1": CastRule(Policy(overflow="saturate", nan=0x7), before=("plain_zero",)),
            "nvfp4": CastRule(before=("plain_zero",), format="nvfp4:division=rounded"),
        },
        version="nvidia-modelopt 0.47.0, NVFP4QTensor in torch, CPU",
        source="measured",
        date="2026-11-30",
        verified=True,
        notes=("a block of zeros has the scale 1 there, a tensor of zeros NaN",),
    ),
    "compressed-tensors": CastProfile(
        {
            "e4m3fn": _SATURATE,
            "e2m3": _SATURATE,
            "e2m1": CastRule(Policy(overflow="saturate"), before=("plain_zero",)),
            "int4": _SATURATE,
            "int8": _SATURATE,
        },
        version="compressed-tensors 0.20.0, round_to_quantized_type_args under torch 2.13",
        source="measured",
        date="2026-11-30",
        verified=True,
        notes=("formats without NaN keep NaN there, as a float; here it becomes 0",),
    ),
    "microxcaling": CastProfile(
        dict.fromkeys(
            (*_MX, "mxint8", "e4m3fn", "e5m2", "e2m3", "e3m2", "e2m1", "fixed8.6", "fp16", "bf16"), _MICROXCALING
        ),
        version="microxcaling 7bc4195 (August 2024), Python path, CPU",
        source="measured; see halfulp.numerics.microxcaling for what differs from the standard",
        date="2026-11-30",
        verified=True,
        notes=("elements by themselves overflow to infinity, with overflow='saturate' they saturate",),
    ),
}
"""Profiles by name: ``cast(x, "e4m3fn", profile="torch-2.13")``."""
