"""What a model's layers see when it reads: token sequences, statistics, and the walk from block to block."""

from ._calibration import Calibration, calibration
from ._decoder import Decoder, States, is_linear
from ._lockstep import lockstep
from ._measure import measure
from ._seen import Need, Seen

__all__ = ["Calibration", "Decoder", "Need", "Seen", "States", "calibration", "is_linear", "lockstep", "measure"]
