"""Machines' sums against published models and recorded outputs, bit for bit, where these are at hand.

HALFULP_MMA_SIM: a checkout of github.com/microsoft/MMA-Sim. HALFULP_TENSOR_CORES: one of
github.com/north-numerical-computing/MATLAB-tensor-core, whose model_validation/ has outputs recorded on GPUs.
HALFULP_MODEL_ROUNDS: matrices of each kind an instruction (default 2).
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfulp import numerics as hn

from .accumulating import KINDS, addend, operands

MMA_SIM = os.environ.get("HALFULP_MMA_SIM", "")
RECORDED = os.environ.get("HALFULP_TENSOR_CORES", "")
ROUNDS = int(os.environ.get("HALFULP_MODEL_ROUNDS", "2"))
with_model = pytest.mark.skipif(not MMA_SIM, reason="set HALFULP_MMA_SIM to a checkout of microsoft/MMA-Sim")
with_records = pytest.mark.skipif(not RECORDED, reason="set HALFULP_TENSOR_CORES to a checkout of MATLAB-tensor-core")

NVIDIA = {
    "volta": ["Volta"],
    "turing": ["Turing"],
    "ampere": ["Ampere"],
    "ada": ["Ada Lovelace"],
    "hopper": ["Hopper"],
    "blackwell": ["Blackwell", "RTX Blackwell"],
}
PTX = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32", "e4m3fn": "e4m3", "e5m2": "e5m2", "e2m1": "e2m1", "fp32": "f32"}
AMD = {
    "cdna1-fp32": [("CDNA1", "f32_16x16x4f32")],
    "cdna1-fp16": [("CDNA1", "f32_16x16x16f16"), ("CDNA1", "f32_4x4x4f16")],
    "cdna1-bf16": [("CDNA1", "f32_16x16x8bf16")],
    "cdna2-fp32": [("CDNA2", "f32_16x16x4f32")],
    "cdna2-fp16": [("CDNA2", "f32_16x16x16f16")],
    "cdna2-bf16": [("CDNA2", "f32_16x16x8bf16")],
    "cdna2-bf16_1k": [("CDNA2", "f32_16x16x16bf16_1k")],
    "cdna3-fp32": [("CDNA3", "f32_16x16x4_f32")],
    "cdna3-fp16": [("CDNA3", "f32_16x16x16_f16")],
    "cdna3-bf16": [("CDNA3", "f32_16x16x16_bf16")],
    "cdna3-tf32": [("CDNA3", "f32_16x16x8_xf32")],
    "cdna3-fp8": [("CDNA3", f"f32_16x16x32_{a}_{b}") for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
}


def instructions(name):
    """(kind of instruction, architecture, qualifier, formats of a and b) of a machine's name."""
    head, operand, *output = name.split("-")
    if head not in NVIDIA:
        letters = {"fp8": "e4m3fnuz", "bf8": "e5m2fnuz"}
        for architecture, qualifier in AMD.get(name, []):
            pair = [letters[x] for x in qualifier.split("_")[2:]] if operand == "fp8" else [operand.split("_")[0]] * 2
            yield "mfma", architecture, qualifier, pair
        return
    out = PTX[(output or ["fp32"])[0]]
    narrow = ["e4m3fn", "e5m2"]
    pairs = [(x, y) for x in narrow for y in narrow] if operand == "fp8" else [(operand, operand)]
    for x, y in pairs:
        types = f"{out}.{PTX[x]}.{PTX[y]}"
        k = {"tf32": 8, "fp8": 32}.get(operand, 16)
        shapes = {"volta": "m8n8k4", "turing": "m16n8k8"}
        if not (operand == "fp8" and head in ("hopper", "blackwell")):
            for architecture in NVIDIA[head]:
                yield "mma", architecture, f"{shapes.get(head, f'm16n8k{k}')}.{types}.{out}", (x, y)
        if operand == "fp8" and head == "ada":
            yield "mma", "Ada Lovelace", f"m16n8k16.{types}.{out}", (x, y)
        if operand == "fp8" and head == "blackwell":
            yield "mma", "RTX Blackwell", f"m16n8k32.{types}.{out}", (x, y)
        if head == "hopper":
            yield "wgmma", "Hopper", f"m64n8k{k}.{types}", (x, y)
        if head == "blackwell":
            yield "tcgen05mma", "Blackwell", f"m64n8k{k}.{types}", (x, y)


MODELLED = [
    n
    for n in hn.HARDWARE
    if n in AMD or (n.split("-")[1] in ("fp16", "bf16", "tf32", "fp8") and n.split("-")[0] in NVIDIA)
]


@pytest.fixture(scope="module")
def simulator():
    sys.path.insert(0, MMA_SIM)
    import mmasim.simulator.amd as amd
    from mmasim.simulator import nv_ptx

    pairwise = amd.pairwise_dot  # asserts float32, but is given what the instruction takes
    amd.pairwise_dot = lambda a, b, flush: pairwise(a.float(), b.float(), flush)
    yield lambda kind, architecture, qualifier: getattr(amd if kind == "mfma" else nv_ptx, kind)(
        architecture, qualifier
    )
    amd.pairwise_dot = pairwise
    sys.path.remove(MMA_SIM)


def differing(got, want, every_bit):
    """How many differ; bits of NaN count where ``every_bit``."""
    other = got.view(np.int32) != want.view(np.int32)
    return int((other if every_bit else other & ~(np.isnan(got) & np.isnan(want))).sum())


def compare(name, model, formats, rule=None, rounds=ROUNDS):
    import torch

    rng, wrong, checked = np.random.default_rng(7), 0, 0
    machine = hn.HARDWARE[name] if rule is None else replace(hn.HARDWARE[name], rule=rule)
    output = "fp16" if model.c_type == torch.float16 else "fp32"
    for kind in KINDS * rounds:
        a, b = operands(rng, formats[0], (model.m, model.k), kind), operands(rng, formats[1], (model.k, model.n), kind)
        c = addend(rng, (model.m, model.n), kind, output)
        types = (model.a_type, model.b_type, model.c_type)
        want = model(*(torch.from_numpy(x.copy()).to(t) for x, t in zip((a, b, c), types))).float().numpy()
        got = hn.matmul(a, b, machine, c=c, formats=None if machine.truncates else tuple(formats))
        if name.startswith(("cdna1", "cdna2")):  # the sign of a zero is left open there
            got, want = got + np.float32(0), want + np.float32(0)
        wrong, checked = wrong + differing(got, want, not name.startswith("cdna")), checked + got.size
    return wrong, checked


@with_model
@pytest.mark.parametrize("name", MODELLED)
def test_machines_equal_mma_sim(name, simulator, record_property):
    for kind, architecture, qualifier, formats in instructions(name):
        wrong, checked = compare(name, simulator(kind, architecture, qualifier), formats)
        record_property(f"{kind} {qualifier}", f"{wrong} of {checked}")
        print(f"{name}: {kind} {qualifier} on {architecture}: {wrong} of {checked} sums differ")
        assert wrong == 0


@with_model
def test_a_long_sum_is_a_chain_of_instructions(simulator):
    import torch

    model, rng = simulator("wgmma", "Hopper", "m64n8k32.f32.e4m3.e4m3"), np.random.default_rng(9)
    a, b = operands(rng, "e4m3fn", (64, 512), "normal"), operands(rng, "e4m3fn", (512, 8), "normal")
    x, y = (torch.from_numpy(v).to(torch.float8_e4m3fn) for v in (a, b))
    c = torch.zeros(64, 8)
    for k in range(0, 512, 32):
        c = model(x[:, k : k + 32], y[k : k + 32], c)
    assert differing(hn.matmul(a, b, "hopper-fp8"), c.numpy(), True) == 0


@with_model
def test_mma_sim_sees_a_wrong_rule(simulator):
    for name, change in (("hopper-fp8", {"rounding": "nearest_even"}), ("cdna3-fp8", {"odd_even": False})):
        kind, architecture, qualifier, formats = next(iter(instructions(name)))
        rule = replace(hn.HARDWARE[name].rule, **change)
        assert compare(name, simulator(kind, architecture, qualifier), formats, rule)[0] > 0


def packed(codes, axis):
    """Two codes of 4 bits a byte, the first one low."""
    codes = np.moveaxis(codes, axis, -1)
    return np.moveaxis(codes[..., 0::2] | codes[..., 1::2] << 4, -1, axis).astype(np.uint8)


SCALED = [
    *(("blackwell-mxfp8", 32, "e8m0", x, y) for x in ("e4m3fn", "e5m2") for y in ("e4m3fn", "e5m2")),
    *(("blackwell-mxfp4", block, "e8m0", "e2m1", "e2m1") for block in (32, 16)),
    ("blackwell-nvfp4", 16, "e4m3fn", "e2m1", "e2m1"),
]


@with_model
@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("kind", ["mma_block_scale", "tcgen05mma_block_scale"])
def test_scaled_blocks_equal_mma_sim(case, kind, simulator):
    import torch

    name, block, scale, left, right = case
    k = 64 if left == "e2m1" else 32
    types = f"f32.{PTX[left]}.{PTX[right]}"
    s = {"e8m0": "ue8m0", "e4m3fn": "ue4m3"}[scale]
    if kind.startswith("mma"):
        model = simulator(kind, "RTX Blackwell", f"m16n8k{k}.block{block}.{types}.f32.{s}")
    else:
        model = simulator(kind, "Blackwell", f"m128n8k{k}.block{block}.{types}.{s}")
    rng, wrong, checked = np.random.default_rng(8), 0, 0
    for numbers in KINDS * ROUNDS:
        numbers = "normal" if k == 64 and numbers == "special" else numbers  # for which the model stops
        a, b = operands(rng, left, (model.m, k), numbers), operands(rng, right, (k, model.n), numbers)
        c = addend(rng, (model.m, model.n), numbers)
        low, high = (
            {"e8m0": (100, 154), "e4m3fn": (0, 127)}[scale]
            if numbers != "codes"
            else (0, 255 if scale == "e8m0" else 128)
        )
        codes = [
            rng.integers(low, high, shape).astype(np.uint8) for shape in ((model.m, k // block), (k // block, model.n))
        ]
        formats = [hn.Block(f, block, scale, axis=axis) for f, axis in ((left, -1), (right, -2))]
        q = [hn.Quantized(hn.encode(x, f.element), y, None, None, f) for x, y, f in zip((a, b), codes, formats)]
        tensors = [torch.from_numpy(y.copy()).view(model.s_type) for y in codes]
        if k == 64:
            x, y = (torch.from_numpy(packed(v.codes, i)) for i, v in zip((1, 0), q))
        else:
            x, y = (torch.from_numpy(v.copy()).to(t) for v, t in zip((a, b), (model.a_type, model.b_type)))
        want = model(x, y, torch.from_numpy(c.copy()), *tensors).numpy()
        got = hn.matmul(*q, hn.HARDWARE[name].rule, c=c)
        wrong, checked = wrong + differing(got, want, True), checked + got.size
    print(f"{name}: {kind} block{block} {types} {s}: {wrong} of {checked} sums differ")
    assert wrong == 0


MACHINES = {"V100": "volta", "A100": "ampere", "A2": "ampere", "Ada": "ada", "L40S": "ada", "H100": "hopper",
            "H200": "hopper", "B200": "blackwell"}  # fmt: skip


def records():
    """(machine, operands, output, accumulator) of the recorded outputs."""
    for machine, head in MACHINES.items():
        for operand in ("fp16", "bf16", "tf32", "E4M3", "E5M2"):
            for output in ("fp32", "fp16"):
                fp8 = operand.startswith("E")
                # H100's and B200's mma.sync of FP8 is not the instruction that wgmma and tcgen05 are
                native = not fp8 or head == "ada" or (head == "hopper" and output == "fp32")
                name = f"{head}{'' if native else '-mma'}-{'fp8' if fp8 else operand}{'-fp16' * (output == 'fp16')}"
                if name in hn.HARDWARE and not (machine == "L40S" and fp8 and output == "fp16"):
                    yield machine, operand, output, name


@with_records
@pytest.mark.parametrize("record", list(records()), ids="-".join)
def test_machines_equal_what_was_recorded_on_them(record):
    machine, operand, output, name = record
    folder = Path(RECORDED) / "model_validation" / machine / operand

    def read(what, base, kind):
        words = (folder / f"{what}_{machine}_{kind}.txt").read_text().split()
        return np.array([int(w, base) for w in words], np.uint32).view(np.float32)

    a, b = (read(x, 16, operand).reshape(5000, -1) for x in "ab")
    c, want = read("c", 2, "fp32"), read("d", 2, output)
    if name == "hopper-fp8":  # recorded without c
        c = np.zeros_like(c)
    c = hn.cast(c, output)
    formats = {"E4M3": "e4m3fn", "E5M2": "e5m2", "tf32": None}.get(operand, operand)
    got = hn.dot(a, b, name, c=c, formats=formats)
    assert got.shape == want.shape == (5000,)
    assert differing(got, want, True) == 0
    assert differing(hn.dot(a, b, "fp32", c=c), want, True) > 1000
