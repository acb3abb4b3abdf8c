"""What the TPU's own compiler makes of formats, and what that costs, on a machine without a TPU."""

from ._bundles import Program, Slot, parse
from ._compile import Compiled, Job, can_compile, compile_jobs
from ._execute import Schedule, execute
from ._legality import Way, dtype_of, operands, table
from ._targets import Target, target, targets

__all__ = [
    "Compiled",
    "Job",
    "Program",
    "Schedule",
    "Slot",
    "Target",
    "Way",
    "can_compile",
    "compile_jobs",
    "dtype_of",
    "execute",
    "operands",
    "parse",
    "table",
    "target",
    "targets",
]
