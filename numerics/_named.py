"""The formats that have names of their own, each with its source."""

from __future__ import annotations

from typing import Any

from ._format import Block, Codebook, Fixed, Float, Format, Posit, p3109

FINITE: dict[str, Any] = {"inf": False, "nan": False}
FN: dict[str, Any] = {"inf": False, "nan": "top"}
FNUZ: dict[str, Any] = {"inf": False, "nan": "negative_zero"}

# the 16 normal quantiles, normalised to [-1, 1]
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

FP32 = Float(8, 23)
_E8M0 = Float(8, 0, bias=127, signed=False, subnormal=False, zero=False, inf=False, nan="top")
_E2M1, _E2M3, _E3M2 = (Float(e, m, **FINITE) for e, m in ((2, 1), (2, 3), (3, 2)))
_E4M3, _E5M2 = Float(4, 3, **FN), Float(5, 2)


def _msfp(bits: int) -> Block:
    """A sign, an 8-bit exponent that 16 numbers share, and ``bits - 9`` bits of magnitude."""
    magnitude = bits - 9
    return Block(Fixed(1 + magnitude, magnitude - 1, sign_magnitude=True), 16, _E8M0, "floor")


NAMED: dict[str, Format] = {
    # IEEE 754-2019 section 3.6
    "fp32": FP32,
    "fp16": Float(5, 10),
    # NVIDIA A100 whitepaper (2020); Google, "BFloat16" (2019)
    "tf32": Float(8, 10),
    "bf16": Float(8, 7),
    # OCP 8-bit floating point (OFP8) v1.0
    "e5m2": _E5M2,
    "e4m3fn": _E4M3,
    # Noune et al., "8-bit numerical formats for deep neural networks" (2022): Graphcore, AMD
    "e5m2fnuz": Float(5, 2, bias=16, **FNUZ),
    "e4m3fnuz": Float(4, 3, bias=8, **FNUZ),
    # ml_dtypes and LLVM: the bias of 11 is Google's; IEEE-like e4m3 and e3m4
    "e4m3b11fnuz": Float(4, 3, bias=11, **FNUZ),
    "e4m3": Float(4, 3),
    "e3m4": Float(3, 4),
    # OCP Microscaling (MX) v1.0 section 5
    "e3m2": _E3M2,
    "e2m3": _E2M3,
    "e2m1": _E2M1,
    "e8m0": _E8M0,
    # IEEE SA P3109 interim report v4.0 (2026), a draft; any binary{k}p{p}{s|u}{e|f} can be spelled
    **{f"binary8p{p}se": p3109(8, p) for p in (1, 3, 4)},
    **{f"binary6p{p}sf": p3109(6, p, extended=False) for p in (3, 4)},
    "binary4p2sf": p3109(4, 2, extended=False),
    # Standard for Posit Arithmetic (2022)
    "posit8": Posit(8),
    "posit16": Posit(16),
    # QLoRA (Dettmers et al. 2023), appendix E
    "nf4": Codebook(_NF4),
    # BinaryConnect (Courbariaux et al. 2015); ternary weight networks (Li et al. 2016)
    "binary": Codebook((-1.0, 1.0)),
    "ternary": Codebook((-1.0, 0.0, 1.0)),
    # OCP Microscaling (MX) v1.0 section 6; mxint4 is its integer at four bits
    "mxfp8": Block(_E4M3, 32, _E8M0, "floor"),
    "mxfp8-e5m2": Block(_E5M2, 32, _E8M0, "floor"),
    "mxfp6": Block(_E2M3, 32, _E8M0, "floor"),
    "mxfp6-e3m2": Block(_E3M2, 32, _E8M0, "floor"),
    "mxfp4": Block(_E2M1, 32, _E8M0, "floor"),
    "mxint8": Block(Fixed(8, 6), 32, _E8M0, "floor"),
    "mxint4": Block(Fixed(4, 2), 32, _E8M0, "floor"),
    # the code of -2 left unused, as in Microsoft's reference library
    "mxint8-symmetric": Block(Fixed(8, 6, narrow=True), 32, _E8M0, "floor"),
    # NVIDIA, "Introducing NVFP4" (2025)
    "nvfp4": Block(_E2M1, 16, _E4M3, "absmax", tensor_scale=FP32),
    # Darvish Rouhani et al., "Pushing the limits of narrow precision inferencing at cloud scale with Microsoft
    # Floating Point" (2020)
    **{f"msfp{bits}": _msfp(bits) for bits in range(11, 17)},
}
"""The formats that have names of their own; any other is spelled out."""

ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3fn",
    "float8_e4m3fnuz": "e4m3fnuz",
    "float8_e4m3b11fnuz": "e4m3b11fnuz",
    "float8_e4m3": "e4m3",
    "float8_e3m4": "e3m4",
    "float8_e5m2": "e5m2",
    "float8_e5m2fnuz": "e5m2fnuz",
    "float8_e8m0fnu": "e8m0",
    "e8m0fnu": "e8m0",
    "ue8m0": "e8m0",
    "float6_e2m3fn": "e2m3",
    "float6_e3m2fn": "e3m2",
    "float4_e2m1fn": "e2m1",
    "mxfp8-e4m3": "mxfp8",
    "mxfp6-e2m3": "mxfp6",
}
"""Other libraries' names (ml_dtypes, torch, PTX) for the same formats."""
