"""What a number is: formats, rounding, blocks, packing, the same bits in numpy, torch and jax."""

from ._accumulate import dot, matmul
from ._accumulator_names import accumulator
from ._accumulators import (
    Accumulator,
    Aligned,
    AlignedLate,
    Chunked,
    Exact,
    Hardware,
    Integer,
    Pairwise,
    Sequential,
)
from ._analysis import error_report, error_stats
from ._block import Quantized
from ._cast import cast, decode, encode, pack, unpack
from ._clip import Clip, optimal_clip
from ._compatibility import CastProfile, CastRule
from ._describe import Facts, describe, numbers_of, values_of
from ._errors import METRICS, ErrorReport, ErrorStats
from ._format import Block, Codebook, Fixed, Float, Format, Int, Log, Posit, p3109
from ._hardware import HARDWARE
from ._learn import learn_codebook
from ._microxcaling import microxcaling
from ._names import ALIASES, NAMED, format
from ._pack import Packed, blocks_along, pack_codes, pack_quantized, unpack_codes, unpack_quantized
from ._peers import PROFILES
from ._policy import Policy
from ._profile import Profile, error_profile
from ._random import Stochastic
from ._rounding import ROUNDINGS
from ._scales import SCALE_RULES, ScaleRule
from ._search import best_format
from .training import (
    Cast,
    LossScale,
    Roles,
    emulate,
    emulate_jax,
    fake_quantize,
    quantize_optimizer,
    quantize_updates,
    scaled_step,
)

__all__ = [
    "ALIASES",
    "HARDWARE",
    "METRICS",
    "NAMED",
    "PROFILES",
    "ROUNDINGS",
    "SCALE_RULES",
    "Accumulator",
    "Aligned",
    "AlignedLate",
    "Block",
    "Cast",
    "CastProfile",
    "CastRule",
    "Chunked",
    "Clip",
    "Codebook",
    "ErrorReport",
    "ErrorStats",
    "Exact",
    "Facts",
    "Fixed",
    "Float",
    "Format",
    "Hardware",
    "Int",
    "Integer",
    "Log",
    "LossScale",
    "Packed",
    "Pairwise",
    "Policy",
    "Posit",
    "Profile",
    "Quantized",
    "Roles",
    "ScaleRule",
    "Sequential",
    "Stochastic",
    "accumulator",
    "best_format",
    "blocks_along",
    "cast",
    "decode",
    "describe",
    "dot",
    "emulate",
    "emulate_jax",
    "encode",
    "error_profile",
    "error_report",
    "error_stats",
    "fake_quantize",
    "format",
    "learn_codebook",
    "matmul",
    "microxcaling",
    "numbers_of",
    "optimal_clip",
    "p3109",
    "pack",
    "pack_codes",
    "pack_quantized",
    "quantize_optimizer",
    "quantize_updates",
    "scaled_step",
    "unpack",
    "unpack_codes",
    "unpack_quantized",
    "values_of",
]
