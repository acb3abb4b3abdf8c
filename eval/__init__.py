"""What compression did: accuracy with error bars, latency, reports."""

from ._accuracy import compare, perplexity
from ._latency import latency, measure
from ._record import Record, read_records, write_record
from ._report import report
from ._score import Baseline, Settings, load_baseline, score
from ._text import Text, text, windows

__all__ = [
    "Baseline",
    "Record",
    "Settings",
    "Text",
    "compare",
    "latency",
    "load_baseline",
    "measure",
    "perplexity",
    "read_records",
    "report",
    "score",
    "text",
    "windows",
    "write_record",
]
