"""Accumulators by name, what they refuse, and what calls refuse."""

from pathlib import Path

import numpy as np
import pytest

from halfulp import numerics as hn

from .test_accumulate import RULES

NAMES = [
    *RULES,
    *hn.HARDWARE,
    *(str(h.rule) for h in hn.HARDWARE.values()),
    "int32",
    "int16:saturate:group=2",
    "chunked:128",
    "chunked:64:(chunked:16:bf16:outer=fp16):outer=(bf16:down)",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_read_back(name):
    value = hn.accumulator(name)
    assert hn.accumulator(str(value)) == value
    assert hn.accumulator(value) is value
    assert hash(value) == hash(hn.accumulator(str(value)))


def test_other_ways_to_say_it():
    assert hn.accumulator("H100-FP8") is hn.HARDWARE["hopper-fp8"]
    assert hn.accumulator("float32") == hn.accumulator(hn.format("fp32")) == hn.Sequential()
    assert hn.accumulator("chunked:128") == hn.Chunked() == hn.Chunked("fp32", 128, "fp32")
    assert hn.Chunked("int16").outer == hn.Integer(32)


def test_every_machine_says_how_it_is_known():
    for name, h in hn.HARDWARE.items():
        assert h.name == name
        assert h.machine
        assert h.source
        assert h.date
        assert h.evidence.startswith("bit-equal to") or not h.verified
        for operand in h.operands:
            hn.format(operand)
    assert not any(h.verified for n, h in hn.HARDWARE.items() if n.startswith(("tpu", "mtia", "cdna1-fp16")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hn.accumulator("hoper-fp8"), "did you mean hopper-fp8"),
        (lambda: hn.accumulator("fp33"), "cannot read 'fp33' as an accumulator; did you mean fp32"),
        (lambda: hn.accumulator("fp32:nearest"), "cannot read 'nearest' of 'fp32:nearest'"),
        (lambda: hn.accumulator("aligned:group=3"), "missing 1 required positional argument: 'fraction'"),
        (lambda: hn.accumulator("aligned:group=x:fraction=3"), "group='x' is no whole number"),
        (lambda: hn.accumulator(3), "an accumulator is a name such as 'fp32'"),
        (lambda: hn.Sequential("e2m1"), "format='e2m1' cannot hold a sum"),
        (lambda: hn.Sequential("int8"), "format='int8' cannot hold a sum"),
        (lambda: hn.Sequential(rounding="stochastic"), "rounding='stochastic' of a sum: choose one of nearest_even"),
        (lambda: hn.Sequential(overflow="clip"), "overflow='clip': choose 'inf', 'saturate' or 'nan'"),
        (lambda: hn.Integer(64), "bits=64: a whole number from 2 to 48"),
        (lambda: hn.Integer(overflow="inf"), "choose 'wrap' or 'saturate'"),
        (lambda: hn.Aligned(32, 40), "fraction=40: a whole number from 0 to 36"),
        (lambda: hn.Aligned(32, 13, cut="up"), "cut='up': choose one of toward_zero, down, nearest_even"),
        (lambda: hn.Aligned(64, 35, terms=16), "terms above 1 share a scale"),
        (lambda: hn.Aligned(64, 35, terms=24, scaled=True), "terms=24 does not divide group=64"),
        (lambda: hn.Aligned(8, 24, output="e4m3fn"), "output=e4m3fn has no infinity"),
        (lambda: hn.Chunked("fp32", 0), "every=0: a whole number from 1"),
        (lambda: hn.Chunked("fp32", 4, "int32"), "outer=int32: partial sums of fp32 are summed by a Sequential or Pairwise"),
    ],
)  # fmt: skip
def test_what_accumulators_refuse(make, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(")):
        make()


A, B = np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hn.matmul(A, A), "a has 3 columns and b 2 rows: shapes (2, 3) and (2, 3) do not fit"),
        (lambda: hn.matmul(A[None].repeat(2, 0), B[None].repeat(3, 0)), "batches of shapes (2, 2, 3) and (3, 3, 2) do not"),
        (lambda: hn.matmul(A, np.float32(1)), "matmul takes vectors and matrices"),
        (lambda: hn.dot(np.float32(1), A), "an operand is a scalar"),
        (lambda: hn.matmul(A * np.float32(1.01), B, "hopper-fp8"), "operand a has numbers that e4m3fn has not"),
        (lambda: hn.matmul(A, B, "hopper-fp8", formats="bf16"), "operand a is bf16, but hopper-fp8 takes e4m3fn or e5m2"),
        (lambda: hn.matmul(A.astype(np.float16), B, "hopper-bf16"), "operand a is fp16, but hopper-bf16 takes bf16"),
        (lambda: hn.matmul(A, B, "blackwell-mxfp8"), "blackwell-mxfp8 takes blocks: give a as the Quantized"),
        (lambda: hn.matmul(A, B, "hopper-fp8", formats="mxfp8:g2"), "hopper-fp8 has no place for the scales of blocks of 2"),
        (lambda: hn.matmul(A.astype(np.float64) / 3, B), "operand a has numbers that float32 has not"),
        (lambda: hn.matmul(A, B, c=np.float64([[0.1, 0]])), "operand c has numbers that float32 has not"),
        (lambda: hn.matmul(A, B, "int32", c=A[:, :2]), "int32 adds integers, but c is float32"),
        (lambda: hn.matmul(A / 2, B, "int32"), "int32 adds products of integers from -65536 to 65536: operand a has others"),
        (lambda: hn.matmul(hn.encode(A, "mxfp4"), hn.encode(B, "mxfp4")), "operand b is summed along axis -2, but its blocks"),
        (lambda: hn.matmul(hn.encode(A, "mxfp4"), B, formats="mxfp8"), "formats say that a is mxfp8, but it is a Quantized"),
        (lambda: hn.matmul(A, B, hn.HARDWARE["blackwell-mxfp4"].rule, formats="mxfp8"), "adds 16 products exactly: operand a is"),
        (lambda: hn.matmul(A, B, threads=0), "threads=0: a whole number from 1"),
        (lambda: hn.matmul(A, B, out=np.empty((2, 3), np.float32)), "out is float32 of shape (2, 3), the result float32 of (2, 2)"),
    ],
)  # fmt: skip
def test_what_calls_refuse(call, message):
    with pytest.raises(ValueError, match="(?s)" + message.replace("(", r"\(").replace(")", r"\)")):
        call()


def test_complex_operands_are_refused():
    with pytest.raises(TypeError, match="operand a is complex64: give real numbers"):
        hn.matmul(A.astype(np.complex64), B)


def test_a_thread_that_flushes_subnormals_is_refused():
    import torch

    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(ValueError, match="this thread flushes subnormals"):
            hn.matmul(A, B)
    finally:
        torch.set_flush_denormal(False)


def test_every_kind_is_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "accumulators.md").read_text()
    for kind in (hn.Sequential, hn.Pairwise, hn.Chunked, hn.Aligned, hn.AlignedLate, hn.Integer, hn.Exact):
        assert f"| `{kind.__name__}` |" in text
