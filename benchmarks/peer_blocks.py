"""What `peers.py` says of blocks, of random rounding and of compilers: each section a title, a head and rows."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch
from peer_casts import load, microxcaling_label, quietly, version_of

from halfulp import numerics as hn

SCALES = """## Scales of MX blocks

The power of two that a block's largest magnitude asks for, by the rule that the library names: "floor" is
2^(floor(log2(amax)) - emax), as in OCP MX section 6.3, "ceil" the same rounded up, "even" floor after amax is rounded
to the element's precision, "rceil" the smallest scale under which amax fits. Where that exponent comes from a
logarithm or a quotient that is itself rounded to float32, it is wrong just below, or just above, powers of two; in
bfloat16 far more often.
"near 2^k" are the float32 numbers 2^k and four neighbours on each side, "near max * 2^k" the same about the element's
largest number, "every bfloat16" all positive normal ones as bfloat16 tensors.
"""

NVFP4 = """## NVFP4 elements

Under the scales that the library itself chose, elements are compared with exact division by scale and tensor scale,
rounded to nearest even. Multiplying by a rounded reciprocal decides some near-ties the other way, which runtimes do
on purpose, to match their kernels. "scales held at 2^-6" counts blocks whose scale would be a subnormal number of
E4M3, down to 2^-9.
"""

STOCHASTIC = """## Stochastic rounding

The mean of (rounded - exact) in units of the last place kept, over every value of n random bits and 4096 positions
between two neighbours, for positive numbers; unbiased rounding has 0. What is exact already must not move.
"""

COMPILERS = """## Compilers

Casts as programs that a compiler may change: E5M2 by `jax.lax.reduce_precision(x, 5, 2)`, and a round trip
through bfloat16 under `torch.compile`, counted over finite inputs within the range.
"""


def sections(number):
    """All of them, in order."""
    yield (
        SCALES,
        ["library", "call", "format", "rule", "amax", "#inputs", "#wrong", "first of them"],
        scale_rows(number),
    )
    head = ["library", "call", "tensor", "#elements", "#differ", "first of them", "#scales held at 2^-6"]
    yield NVFP4, head, nvfp4_rows(number)
    yield STOCHASTIC, ["library", "mode", "#bits", "#mean error", "exact numbers"], stochastic_rows()
    yield COMPILERS, ["library", "call", "format", "#inputs", "#wrong", "first of them"], compiler_rows(number)


def attempt(rows, library):
    """Rows, or none where the library is missing."""
    try:
        with quietly():
            return list(rows())
    except ImportError:
        return []


# ---- scales


def exponent(x):
    """floor(log2(x)) of a positive float, exactly."""
    return math.frexp(x)[1] - 1


def right_scale(amax, fmt, rule):
    """The exponent of the scale, from exact arithmetic."""
    if rule == "rceil":
        share = Fraction(amax) / Fraction(fmt.max)
        least = exponent(amax) - exponent(fmt.max) - 1
        e = next(e for e in range(least, least + 4) if share <= Fraction(2) ** e)
    elif rule == "ceil":
        e = exponent(amax) + (Fraction(amax) != Fraction(2) ** exponent(amax)) - fmt.emax
    else:
        significand = Fraction(amax) / Fraction(2) ** exponent(amax)
        if rule == "even":
            significand = Fraction(round(significand * 2**fmt.mantissa), 2**fmt.mantissa)
        e = exponent(amax) + (significand == 2) - fmt.emax
    return max(-127, min(127, e))


def amaxes(fmt):
    """Largest magnitudes to try, by what they are called."""
    powers = np.float32(2.0) ** np.arange(-100, 120, dtype=np.float32)
    for name, base in (("near 2^k", powers), ("near max * 2^k", powers[:-12] * np.float32(fmt.max))):
        bits = base.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)
        yield name, bits.reshape(-1).view(np.float32)
    yield "every bfloat16", np.arange(0x80, 0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16)


def tensor(x):
    """[n, 32] with x in the first column, as torch."""
    t = torch.tensor(x.view(np.int16)).view(torch.bfloat16) if x.dtype == ml_dtypes.bfloat16 else torch.tensor(x)
    rows = torch.zeros(len(x), 32, dtype=t.dtype)
    rows[:, 0] = t
    return rows


def scale_functions():
    """(library, call, formats, rule, function of amax and format to exponents), where they can be imported."""

    def microxcaling():
        ops = load("mx.mx_ops")

        def function(x, fmt):
            return (ops._shared_exponents(tensor(x), axes=[-1]) - fmt.emax).clamp(-127, 127).float().numpy()[:, 0]

        yield microxcaling_label(), "_shared_exponents", ("e4m3fn", "e2m1"), "floor", function

    def torchao():
        module = load("torchao.prototype.mx_formats.mx_tensor")
        own = {"e4m3fn": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
        for rule in ("floor", "ceil", "even", "rceil"):
            mode = getattr(module.ScaleCalculationMode, rule.upper())

            def function(x, fmt, mode=mode):
                scale, _ = module.to_mx(tensor(x), own[str(fmt)], 32, mode)
                return scale.view(torch.uint8).float().numpy()[:, 0] - 127

            yield f"torchao {version_of('torchao')}", "to_mx, eager", tuple(own), rule, function

    def modelopt():
        mxfp8 = load("modelopt.torch.quantization.qtensor.mxfp8_tensor").MXFP8QTensor
        mxfp4 = load("modelopt.torch.quantization.qtensor.mxfp4_tensor").MXFP4QTensor
        label = f"modelopt {version_of('nvidia-modelopt')}"

        def fp8(x, fmt):
            return mxfp8.get_weights_scaling_factor(tensor(x)).float().numpy()[:, 0] - 127

        def fp4(x, fmt):
            return mxfp4.quantize(tensor(x), 32)[1].float().numpy()[:, 0] - 127

        yield label, "MXFP8QTensor", ("e4m3fn",), "rceil", fp8
        yield label, "MXFP4QTensor", ("e2m1",), "rceil", fp4

    def gfloat():
        block = load("gfloat.block")

        def function(x, fmt):
            # a float32 of numpy stays one; bfloat16 as torch
            values = tensor(x) if x.dtype == ml_dtypes.bfloat16 else x[:, None]
            return np.array([math.frexp(float(block.compute_scale_amax(fmt.emax, v)))[1] - 1 for v in values])

        yield f"gfloat {version_of('gfloat')}", "compute_scale_amax", ("e4m3fn", "e2m1"), "floor", function

    for library in (microxcaling, torchao, modelopt, gfloat):
        yield from attempt(library, library.__name__)


def scale_rows(number):
    """Every rule of every library on every kind of amax."""
    for library, call, formats, rule, function in scale_functions():
        for name in formats:
            fmt = hn.format(name)
            for kind, x in amaxes(fmt):
                with quietly():
                    theirs = np.asarray(function(x, fmt), dtype=np.float64)
                expected = np.array([right_scale(float(v), fmt, rule) for v in x])
                wrong = np.flatnonzero(theirs != expected)
                first = ""
                if len(wrong):
                    i = wrong[np.argmin(np.abs(np.log2(x[wrong].astype(np.float64))))]
                    first = f"{number(x[i])} → 2^{theirs[i]:.0f}, not 2^{expected[i]}"
                yield [library, call, name, rule, kind, len(x), len(wrong), first]


# ---- NVFP4


def nvfp4_tensors():
    """Tensors of 256 x 256: normal numbers, such on a grid that makes ties, and rows of many magnitudes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 256)).astype(np.float32)
    yield "normal", x
    yield "normal, bfloat16", torch.from_numpy(x).bfloat16().float().numpy()
    yield "multiples of 1/4", np.round(x * 4) / np.float32(4)
    yield "rows of many magnitudes", (x * np.exp2(rng.integers(-20, 10, (256, 1)))).astype(np.float32)


def nvfp4_functions():
    """(library, call, function to codes, scales as numbers, tensor scale)."""

    def torchao():
        module = load("torchao.prototype.mx_formats.nvfp4_tensor")

        def function(x):
            t = torch.tensor(x)
            whole = module.per_tensor_amax_to_scale(t.abs().max())
            scale, data = module.nvfp4_quantize(t, 16, whole)
            return data.view(torch.uint8).numpy(), scale.float().numpy().reshape(len(x), -1), float(whole)

        yield f"torchao {version_of('torchao')}", "nvfp4_quantize", function

    def modelopt():
        module = load("modelopt.torch.quantization.qtensor.nvfp4_tensor")

        def function(x):
            data, scale, whole = module.NVFP4QTensor.quantize(torch.tensor(x), 16)
            return data._quantized_data.numpy(), scale.float().numpy().reshape(len(x), -1), float(whole)

        yield f"modelopt {version_of('nvidia-modelopt')}", "NVFP4QTensor.quantize", function

    for library in (torchao, modelopt):
        yield from attempt(library, library.__name__)


def nvfp4_rows(number):
    """Elements against exact division by the library's own scales."""
    e2m1 = hn.format("e2m1")
    magnitudes = [Fraction(e2m1.magnitude(code)) for code in range(8)]
    for library, call, function in nvfp4_functions():
        for kind, x in nvfp4_tensors():
            with quietly():
                packed, scales, whole = function(x)
            codes = np.stack([packed & 15, packed >> 4], -1).reshape(x.shape)
            differ, first = 0, ""
            for i, j in np.ndindex(*x.shape):
                unit = Fraction(float(scales[i, j // 16])) * Fraction(whole)
                share, got = abs(Fraction(float(x[i, j]))) / unit, int(codes[i, j]) & 7
                low = magnitudes[got - 1] if got else -magnitudes[1]
                high = magnitudes[got + 1] if got < 7 else None
                below, above = (low + magnitudes[got]) / 2, None if high is None else (high + magnitudes[got]) / 2
                even = got % 2 == 0
                inside = (share >= below if even else share > below) and (
                    above is None or (share <= above if even else share < above)
                )
                if not inside:
                    differ += 1
                    other = got + 1 if above is not None and share >= above else got - 1
                    first = first or (
                        f"{number(x[i, j])} / {number(scales[i, j // 16])} / {number(whole)} → "
                        f"{float(magnitudes[got])}, not {float(magnitudes[other])}"
                    )
            blocks = np.abs(x).reshape(len(x), -1, 16).max(-1).astype(np.float64) / 6 / whole
            held = int(((scales == 2.0**-6) & (blocks < 2.0**-6 * (1 - 2.0**-4)) & (blocks > 2.0**-10)).sum())
            yield [library, call, kind, x.size, differ, first, held]


# ---- stochastic rounding


def stochastic_rows():
    """Mean error over all draws."""
    positions = 1 + (np.arange(4096) + 0.5) / 4096 / 8  # of e4m3, between 1 and 1.125

    def mean(rounded):
        return f"{(np.mean(rounded) - np.mean(positions)) * 8:+.4f}"

    def halfulp():
        for threshold in ("floor", "nearest"):
            for bits in (2, 3, 4, 8):
                # T / 2**bits is the exact chance of going up
                share = np.mod(positions - 1, 0.125) * 8 * 2**bits
                up = np.floor(share) if threshold == "floor" else np.floor(share + 0.5)
                bias = np.mean(up / 2**bits) - np.mean(np.mod(positions - 1, 0.125) * 8)
                yield ["halfulp", f'Stochastic(threshold="{threshold}")', bits, f"{bias:+.4f}", "stay"]

    def gfloat():
        module, formats = load("gfloat"), load("gfloat.formats")
        fmt = formats.format_info_ocp_e4m3
        exact = np.array([1.0, 1.125, 448, 2.0**-9])
        for mode in ("Stochastic", "StochasticOdd", "StochasticFast", "StochasticFastest"):
            for bits in (2, 3, 4):

                def draw(x, n, mode=mode, bits=bits):
                    some = np.full(x.shape, n, np.int64)
                    return module.round_ndarray(fmt, x, module.RoundMode[mode], srbits=some, srnumbits=bits)

                rounded = [draw(positions, n) for n in range(2**bits)]
                stay = all((draw(exact, n) == exact).all() for n in range(2**bits))
                yield [f"gfloat {version_of('gfloat')}", mode, bits, mean(rounded), "stay" if stay else "move"]

    def microxcaling():
        ops = load("mx.elemwise_ops")
        one, rand = torch.tensor([1.0, 3.0]), torch.rand_like
        try:  # the largest number that its generator gives
            torch.rand_like = lambda x, **_: torch.full_like(x, 1 - 2.0**-24)
            moved = ops._quantize_elemwise(one.clone(), "fp4_e2m1", round="dither", saturate_normals=True)
        finally:
            torch.rand_like = rand
        moves = "stay" if bool((moved == one).all()) else f"3.0 in E2M1 → {float(moved[1])} at noise 1 - 2^-24"
        yield [microxcaling_label(), "dither", 24, "", moves]

    for library in (halfulp, gfloat, microxcaling):
        yield from attempt(library, library.__name__)


# ---- compilers


def compiler_rows(number):
    """reduce_precision and a round trip under torch.compile, against halfulp's own casts."""

    def row(library, call, name, x, theirs):
        expected = hn.cast(x, name, overflow="saturate").astype(np.float64)
        inside = np.isfinite(x) & (np.abs(x) <= hn.format(name).max)
        wrong = np.flatnonzero(inside & ~(np.asarray(theirs, np.float64) == expected))
        i = wrong[0] if len(wrong) else 0
        first = f"{number(x[i])} → {number(theirs[i])}, not {number(expected[i])}" if len(wrong) else ""
        return [library, call, name, int(inside.sum()), len(wrong), first]

    small = hn.decode(np.arange(2**16, dtype=np.uint16), "fp16")
    x = np.concatenate([small, np.random.default_rng(0).standard_normal(4096).astype(np.float32)])

    def jax():
        module = load("jax")
        theirs = np.asarray(module.jit(lambda v: module.lax.reduce_precision(v, 5, 2))(x))
        yield row(f"jax {module.__version__}", "reduce_precision, XLA:CPU", "e5m2", x, theirs)

    def inductor():
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float8_e4m3fn, "e4m3fn")):

            def trip(v, dtype=dtype):
                return v.to(dtype).to(torch.float32)

            label = f"torch {torch.__version__}"
            yield row(label, f"to({name}).to(float32), eager", name, x, trip(torch.tensor(x)).numpy())
            try:
                theirs = torch.compile(trip)(torch.tensor(x)).numpy()
            except Exception as error:  # no compiler here, most likely
                yield [label, f"to({name}).to(float32), torch.compile", name, "", "", f"fails: {type(error).__name__}"]
                continue
            yield row(label, f"to({name}).to(float32), torch.compile", name, x, theirs)

    for library in (jax, inductor):
        yield from attempt(library, library.__name__)
