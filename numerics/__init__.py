"""What a number is: formats, rounding, blocks, packing, the same bits in numpy, torch and jax."""

from ._block import Quantized
from ._cast import cast, decode, encode, pack, unpack
from ._format import Block, Codebook, Fixed, Float, Format, Int
from ._names import ALIASES, NAMED, format
from ._pack import Packed, blocks_along, pack_codes, pack_quantized, unpack_codes, unpack_quantized
from ._policy import Policy
from ._random import Stochastic
from ._rounding import ROUNDINGS
from ._scales import SCALE_RULES, ScaleRule

__all__ = [
    "ALIASES",
    "NAMED",
    "ROUNDINGS",
    "SCALE_RULES",
    "Block",
    "Codebook",
    "Fixed",
    "Float",
    "Format",
    "Int",
    "Packed",
    "Policy",
    "Quantized",
    "ScaleRule",
    "Stochastic",
    "blocks_along",
    "cast",
    "decode",
    "encode",
    "format",
    "pack",
    "pack_codes",
    "pack_quantized",
    "unpack",
    "unpack_codes",
    "unpack_quantized",
]
