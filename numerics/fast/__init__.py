"""The fast engine: what its compiled loops can do, they do, with the bits of the array text.

`_engine` is the door and says which arrays and formats the loops serve. `_plan`, `_rows` and `_grid` turn formats,
policies and shapes into parameters; `_round`, `_posit`, `_table`, `_block`, `_element` and `_power` are the loops;
`_lanes` and `_words` what these are made of. numba is loaded with the first large array, not before.
"""

from ._engine import cast, check_out, compiling, decode, decode_quantized, encode
from ._threads import set_threads
from ._traced import decoded, nearest_even

__all__ = [
    "cast",
    "check_out",
    "compiling",
    "decode",
    "decode_quantized",
    "decoded",
    "encode",
    "nearest_even",
    "set_threads",
]
