"""Matrix instructions as data: what is known of how each machine adds up products."""

from __future__ import annotations

from ._rules import Aligned, AlignedLate, Chunked, Hardware, Integer, Pairwise, Sequential

_MMA_SIM = "Xie et al., MMA-Sim, arXiv 2511.10909; github.com/microsoft/MMA-Sim at c785138"
_TACO = (
    "Khattak and Mikaitis, Accurate models of NVIDIA tensor cores, ACM TACO, doi 10.1145/3830409; "
    "github.com/north-numerical-computing/MATLAB-tensor-core at b12b5a7"
)
_BOTH = f"{_MMA_SIM}; {_TACO}"
_PTX = "PTX ISA 8.7, mma and wgmma: .s32 accumulators wrap around, .satfinite clamps"
_READ = "2026-08"  # when the sources were read

_MODEL = "bit-equal to MMA-Sim, whose authors report validation on the machine"
_RECORDED = f"{_MODEL}, and to the 5000 sums of normal deviates recorded on each of {{}} (MATLAB-tensor-core)"
_TINY = (
    "; below 2**-126 that repository's model differs (zeros do not count, and least_exponent={}), "
    "where nothing recorded tells which is right"
)
_NO_MODEL = "no bit-accurate public model of it was found"


def _aligned(group: int, fraction: int, fp16: bool = False, output: str = "fp32", **options: object) -> Aligned:
    """NVIDIA's: truncated to fp32, or rounded to nearest in fp16 with that format's NaN."""
    if fp16:
        # 0x7FFF, the fp16 NaN of the instruction, as a float32
        return Aligned(group, fraction, "fp16", "nearest_even", nan=0x7FFFE000, **options)  # type: ignore[arg-type]
    return Aligned(group, fraction, output, **options)  # type: ignore[arg-type]


def _nvidia() -> list[Hardware]:
    rows: list[Hardware] = []

    def add(name: str, operands: str, rule: Aligned, evidence: str, source: str = _BOTH, by: str = "") -> None:
        machine, instruction = _NVIDIA[name.partition("-")[0]]
        formats = tuple(operands.split())
        rows.append(
            Hardware(name, machine, by or instruction, formats, rule, True, evidence, source, _READ, operands == "tf32")
        )

    # architecture: group of fp16 and bf16, fraction, machines that were recorded, least exponent in MATLAB's model
    for head, group, fraction, recorded, least in (
        ("volta", 4, 23, "V100", "None"),
        ("turing", 8, 24, "", ""),
        ("ampere", 8, 24, "A100, A2", -132),
        ("ada", 8, 24, "RTX 1000 Ada, L40S", -132),
        ("hopper", 16, 25, "H100, H200", -133),
        ("blackwell", 16, 25, "B200", -133),
    ):
        evidence = (_RECORDED.format(recorded) + _TINY.format(least)) if recorded else _MODEL
        source = _BOTH if recorded else _MMA_SIM
        add(f"{head}-fp16", "fp16", _aligned(group, fraction), evidence, source)
        add(f"{head}-fp16-fp16", "fp16", _aligned(group, fraction, fp16=True), evidence, source)
        if head not in ("volta", "turing"):
            add(f"{head}-bf16", "bf16", _aligned(group, fraction), evidence, source)
            add(f"{head}-tf32", "tf32", _aligned(group // 2, fraction), evidence, source)
    fp8 = "e4m3fn e5m2"
    both = _RECORDED.format("RTX 1000 Ada, L40S")
    add("ada-fp8", fp8, _aligned(16, 13, output="e8m13"), both)
    add("ada-fp8-fp16", fp8, _aligned(16, 13, fp16=True), _RECORDED.format("RTX 1000 Ada"))
    hopper = _RECORDED.format("H100, H200") + " (these with c = 0)"
    add("hopper-fp8", fp8, _aligned(32, 13, output="e8m13"), hopper, by="wgmma")
    add("hopper-fp8-fp16", fp8, _aligned(32, 13, fp16=True), _MODEL, _MMA_SIM, "wgmma")
    narrow = "e4m3fn e5m2 e2m1 e3m2 e2m3"
    six = " (e3m2 and e2m3 are not in MMA-Sim and count as the others do)"
    native = "tcgen05.mma; on RTX 50 mma.sync"
    add("blackwell-fp8", narrow, _aligned(32, 25), _MODEL + six, _MMA_SIM, native)
    add("blackwell-fp8-fp16", narrow, _aligned(32, 25, fp16=True), _MODEL + six, _MMA_SIM, native)
    scaled = "mxfp8 mxfp8-e5m2 mxfp4 mxfp6 mxfp6-e3m2"
    add("blackwell-mxfp8", scaled, _aligned(32, 25, scaled=True), _MODEL + six, _MMA_SIM, native)
    four = _aligned(64, 35, scaled=True, terms=16)
    seen = _MODEL + "; users of B200 measured 34 to 37 bits (deepseek-ai/DeepGEMM#176)"
    add("blackwell-mxfp4", "mxfp4", four, seen, _MMA_SIM, native)
    add("blackwell-nvfp4", "nvfp4", four, seen, _MMA_SIM, native)
    return [*rows, *_emulated_fp8()]


def _emulated_fp8() -> list[Hardware]:
    """FP8 by mma.sync on H100 and B200, which compile it to two FP16 instructions; c is added after them."""

    def row(name: str, output: str, recorded: str) -> Hardware:
        head = name.partition("-")[0]
        rule = Chunked(_aligned(16, 25, output == "fp16", interleave=2), 32, Sequential(output))  # type: ignore[arg-type]
        evidence = f"bit-equal to the 5000 sums recorded on each of {recorded} (MATLAB-tensor-core), which led to it"
        machine = _NVIDIA[head][0].partition(", RTX")[0]
        if not recorded:
            evidence = "inferred: the other three of its kind are bit-equal to recorded sums, of this none is recorded"
        operands = ("e4m3fn", "e5m2")
        verified = bool(recorded)
        return Hardware(name, machine, "mma.sync", operands, rule, verified, evidence, _TACO, _READ, converts="fp16")

    return [
        row("hopper-mma-fp8", "fp32", ""),
        row("hopper-mma-fp8-fp16", "fp16", "H100, H200"),
        row("blackwell-mma-fp8", "fp32", "B200"),
        row("blackwell-mma-fp8-fp16", "fp16", "B200"),
    ]


_NVIDIA = {
    "volta": ("NVIDIA V100", "mma.sync m8n8k4"),
    "turing": ("NVIDIA T4, RTX 20", "mma.sync m16n8k8"),
    "ampere": ("NVIDIA A100, A2, RTX 30", "mma.sync"),
    "ada": ("NVIDIA L4, L40, RTX 40", "mma.sync"),
    "hopper": ("NVIDIA H100, H200", "wgmma, mma.sync"),
    "blackwell": ("NVIDIA B200, RTX 50", "tcgen05.mma, mma.sync"),
}


def _amd() -> list[Hardware]:
    def pairs(group: int, flush: bool = False) -> Chunked:
        """Products rounded to fp32, summed as a tree, and the sum of a group added to the accumulator."""
        inner = Pairwise("fp32", product="fp32", flush=flush)  # type: ignore[arg-type]
        return Chunked(inner, group, Sequential("fp32", flush=flush))  # type: ignore[arg-type]

    split = (
        "the sources differ: this is equal to MMA-Sim's pairwise sums (its mfma stops at an assertion for these "
        "operands and was called with float32s), MATLAB-tensor-core's model adds a group and c exactly and rounds once"
    )
    tree = (
        "bit-equal to MMA-Sim's pairwise sums (called with float32s) but for the sign of zeros; MATLAB-tensor-core "
        "describes the same arithmetic"
    )
    one, two, three = ("AMD MI100", "AMD MI210, MI250", "AMD MI300A, MI300X")
    fma = "bit-equal to MMA-Sim: one fused multiply-add after the other"
    late = _MODEL + "; but for the bits of NaN, which the model leaves open"
    eight = "e4m3fnuz e5m2fnuz"
    rows = [
        ("cdna1-fp32", one, "fp32", Sequential("fp32"), True, fma),  # type: ignore[arg-type]
        ("cdna1-fp16", one, "fp16", pairs(4), False, split),
        ("cdna1-bf16", one, "bf16", pairs(2), False, split),
        ("cdna2-fp32", two, "fp32", Sequential("fp32"), True, fma),  # type: ignore[arg-type]
        ("cdna2-fp16", two, "fp16", pairs(4, flush=True), True, tree),
        ("cdna2-bf16", two, "bf16", pairs(2, flush=True), True, tree),
        ("cdna2-bf16_1k", two, "bf16", pairs(4, flush=True), True, tree),
        ("cdna3-fp32", three, "fp32", Sequential("fp32"), True, fma),  # type: ignore[arg-type]
        ("cdna3-fp16", three, "fp16", AlignedLate(8), True, late),
        ("cdna3-bf16", three, "bf16", AlignedLate(8), True, late),
        ("cdna3-tf32", three, "tf32", AlignedLate(4), True, late),
        ("cdna3-fp8", three, eight, AlignedLate(16, odd_even=True), True, late),
    ]
    return [
        Hardware(name, machine, "mfma", tuple(operands.split()), rule, verified, evidence, _MMA_SIM, _READ,
                 truncates=operands == "tf32", flushes=name.startswith("cdna2") and operands != "fp32")
        for name, machine, operands, rule, verified, evidence in rows
    ]  # fmt: skip


def _undisclosed() -> list[Hardware]:
    """Machines whose inside is not public: a choice to start from, not a claim."""
    tpu = (
        "products of bfloat16 and sums in float32 are documented; order, alignment and rounding inside the matrix unit "
        "are not public: compare other orders (Pairwise, Chunked)"
    )
    mtia = "FP16 and BF16 with float32 sums are published; order, alignment and rounding are not: compare other orders"
    jax = "jax-ml/jax#1856, #18934 (default precision)"
    isca = "Firoozshahian et al., MTIA: First Generation Silicon, ISCA 2023"
    fp32 = Sequential("fp32")  # type: ignore[arg-type]
    rows = [
        ("tpu-bf16", "Google TPU", "matrix unit", "bf16", fp32, tpu, jax),
        ("tpu-int8", "Google TPU", "matrix unit", "int8", Integer(), _NO_MODEL, "Jouppi et al., TPU v1, ISCA 2017"),
        ("mtia-bf16", "Meta MTIA", "dot-product engine", "bf16 fp16", fp32, mtia, isca),
        ("mtia-int8", "Meta MTIA", "dot-product engine", "int8", Integer(), _NO_MODEL, isca),
    ]
    rows += [
        (f"{head}-int8", _NVIDIA[head][0], _NVIDIA[head][1], "int8 uint8", Integer(), _NO_MODEL, _PTX)
        for head in ("turing", "ampere", "ada", "hopper")
    ]
    return [
        Hardware(name, machine, instruction, tuple(operands.split()), rule, False, evidence, source, _READ)
        for name, machine, instruction, operands, rule, evidence, source in rows
    ]


HARDWARE: dict[str, Hardware] = {h.name: h for h in [*_nvidia(), *_amd(), *_undisclosed()]}
"""Accumulators of machines by name: architecture, operands and, where it is not fp32, the output."""

MACHINES = {
    "v100": "volta",
    "t4": "turing",
    "a100": "ampere",
    "l40": "ada",
    "rtx4090": "ada",
    "h100": "hopper",
    "h200": "hopper",
    "b200": "blackwell",
    "mi100": "cdna1",
    "mi250": "cdna2",
    "mi300": "cdna3",
}
"""Machines by the architecture whose names begin the profiles'."""
