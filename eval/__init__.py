"""What compression did: accuracy with error bars, latency, reports."""

from ._accuracy import compare, perplexity
from ._analyze import Analysis, analyze
from ._format_plots import format_picture, write_picture
from ._latency import latency, measure
from ._record import Record, read_records, write_record
from ._report import report
from ._score import Baseline, Settings, load_baseline, score
from ._sensitivity import estimate, sensitivity
from ._windows import windows

__all__ = [
    "Analysis",
    "Baseline",
    "Record",
    "Settings",
    "analyze",
    "compare",
    "estimate",
    "format_picture",
    "latency",
    "load_baseline",
    "measure",
    "perplexity",
    "read_records",
    "report",
    "score",
    "sensitivity",
    "windows",
    "write_picture",
    "write_record",
]
