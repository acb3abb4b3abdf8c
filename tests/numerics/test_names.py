"""Names read and printed, equality, and what a wrong one says."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halfulp import numerics as hn
from halfulp.numerics import _names

from .common import SMALL_FORMATS, WIDE_FORMATS

# the same examples on every run; contradictory fields are many
quick = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])


def valid(make):
    """The format, or no example where the fields contradict each other."""
    try:
        return make()
    except ValueError:
        assume(False)


@st.composite
def floats(draw, bits=16):
    exponent, signed = draw(st.integers(1, 8)), draw(st.booleans())
    mantissa = draw(st.integers(0, bits - exponent - 1))
    fields = draw(
        st.fixed_dictionaries(
            {
                "inf": st.booleans(),
                "nan": st.sampled_from([True, False, "ieee", "top", "negative_zero"]),
                "subnormal": st.booleans(),
                "zero": st.booleans(),
                "negative_zero": st.sampled_from([None, True, False]),
                "even": st.sampled_from(["significand", "code"]),
                "bias": st.one_of(st.none(), st.integers(-40, 300)),
            }
        )
    )
    return valid(lambda: hn.Float(exponent, mantissa, signed=signed, **fields))


@st.composite
def fixeds(draw):
    bits, signed = draw(st.integers(1, 16)), draw(st.booleans())
    narrow, magnitude = draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
    offset = draw(st.one_of(st.just(0), st.integers(0, 2**16 - 1)))
    if draw(st.booleans()):
        return valid(lambda: hn.Int(bits, signed, narrow, magnitude, offset))
    return valid(lambda: hn.Fixed(bits, draw(st.integers(-20, 20)), signed, narrow, magnitude, offset))


codebooks = st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=20, unique=True).map(
    lambda values: hn.Codebook(tuple(sorted(values)))
)
posits = st.builds(lambda bits, es: valid(lambda: hn.Posit(bits, es)), st.integers(2, 16), st.integers(0, 6))
logs = st.builds(
    lambda i, f, bias, signed: valid(lambda: hn.Log(i, f, bias, signed)),
    st.integers(0, 11),
    st.integers(0, 10),
    st.one_of(st.none(), st.integers(-20, 300)),
    st.booleans(),
)
p3109s = st.builds(
    lambda k, p, signed, extended: valid(lambda: hn.p3109(k, p, signed, extended)),
    st.integers(3, 16),
    st.integers(1, 16),
    st.booleans(),
    st.booleans(),
)
scalars = st.one_of(floats(), fixeds(), codebooks, posits, logs, p3109s)
sizes = st.one_of(
    st.integers(1, 300),
    st.sampled_from(["channel", "tensor"]),
    st.lists(st.integers(1, 300), min_size=2, max_size=3).map(tuple),
)


@st.composite
def blocks(draw):
    scale = st.one_of(st.sampled_from(["e8m0", "bf16", "fp16", "fp32", "e4m3fn", "ue5m3"]).map(hn.format), floats())
    fields = draw(
        st.fixed_dictionaries(
            {
                "size": sizes,
                "scale": scale,
                "rule": st.one_of(st.none(), st.sampled_from([*hn.SCALE_RULES, "mse(4,6)", "absmax(2.5)"])),
                "zero_point": st.sampled_from([True, False, False, False, 8]),
                "tensor_scale": st.one_of(st.none(), st.just(hn.format("fp32")), floats()),
                "division": st.sampled_from(["exact", "rounded", "reciprocal"]),
            }
        )
    )
    tile = isinstance(fields["size"], tuple)
    axes = draw(st.permutations(range(-3, 3))) if tile else [draw(st.integers(-3, 3))]
    fields["axis"] = tuple(axes[: len(fields["size"])]) if tile else axes[0]
    element = draw(scalars | st.sampled_from(["e2m1", "e4m3fn", "int4", "nf4"]).map(hn.format))
    return valid(lambda: hn.Block(element, **fields))


@given(scalars)
@quick
def test_every_scalar_format_reads_back(fmt):
    assert hn.format(str(fmt)) == fmt


@given(blocks())
@quick
def test_every_block_format_reads_back(fmt):
    text = str(fmt)
    assert hn.format(text) == fmt
    assert hn.format(text.upper()) == fmt
    assert hash(hn.format(text)) == hash(fmt)


@given(floats(bits=9), st.data())
@quick
def test_any_small_float_decodes_and_encodes_like_the_oracle(fmt, data):
    from halfulp.numerics import _oracle

    codes = np.arange(2**fmt.bits, dtype=np.uint8 if fmt.bits <= 8 else np.uint16)
    values = hn.decode(codes, fmt, dtype="float64")
    exacts = [_oracle.decode(fmt, int(c)) for c in codes]
    assert np.array_equal(values, np.array([float(v) for v in exacts]), equal_nan=True)
    between = np.float64([data.draw(st.sampled_from(values.tolist())) * f for f in (0.9, 1.25, -1.0625)])
    for x in np.concatenate([values, between]):
        given_ = x if np.isnan(x) or np.isinf(x) or (x == 0 and np.signbit(x)) else _oracle.Fraction(float(x))
        assert hn.encode(x, fmt) == _oracle.encode(fmt, given_), x


def test_names_are_what_str_prints():
    for known, fmt in hn.NAMED.items():
        assert str(fmt) == known
        assert hn.format(known) is fmt
        assert hn.format(fmt) is fmt
    for fmt in SMALL_FORMATS + WIDE_FORMATS:
        assert hn.format(str(fmt)) == fmt
        assert not str(fmt).startswith("Float(")


def test_aliases():
    for alias, known in hn.ALIASES.items():
        assert hn.format(alias) == hn.NAMED[known]
        assert hn.format(alias.upper()) == hn.NAMED[known]
        assert alias not in hn.NAMED
    import ml_dtypes

    for kind in (
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float6_e2m3fn",
        "float4_e2m1fn",
        "float8_e8m0fnu",
    ):
        assert hn.format(np.dtype(getattr(ml_dtypes, kind)).name).bits in (4, 6, 8, 16)


def test_short_names_of_usual_blocks():
    for text in (
        "int4:g128",
        "int4:g128:asym",
        "int8:channel",
        "int8:tensor",
        "e4m3fn:channel",
        "nf4:g64",
        "mxfp4:rule=even",
        "mxfp8:g16",
        "nvfp4:axis=0",
        "nvfp4:division=rounded",
        "int4:g32:scale=fp16",
        "e2m1:g16:scale=e4m3fn",
        "uint4:g128:asym:scale=e8m0:rule=absmax",
        "e4m3fn:128x128",
        "mxfp4:16x32:axis=-3,-1",
        "nvfp4:rule=mse(4,6)",
        "nvfp4:division=reciprocal",
        "uint4b8:g128",
        "int8sm:channel",
        "posit8:g32",
        "binary8p4se:channel",
        "log4.3:tensor",
    ):
        assert str(hn.format(text)) == text
    assert str(hn.Block("e2m1", 32)) == "mxfp4"
    assert str(hn.format("int8:token")) == "int8:channel"


def test_equal_formats_are_one_value():
    a, b = hn.Float(4, 3, inf=False, nan="top"), hn.format("e4m3fn")
    assert a == b
    assert hash(a) == hash(b)
    assert a != hn.format("e4m3")
    assert hn.Int(8) != hn.Int(8, signed=False)
    assert len({hn.format("mxfp4"), hn.Block("e2m1"), hn.Block(hn.format("e2m1"), 32, "e8m0", "floor")}) == 1
    for fmt in [hn.format("mxfp4"), hn.format("int4:g128:asym"), hn.format("nf4")]:
        assert pickle.loads(pickle.dumps(fmt)) == copy.deepcopy(fmt) == fmt
    with pytest.raises(AttributeError):
        a.mantissa = 4


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("e4m3fm", "e4m3fn"),
        ("mxpf4", "mxfp4"),
        ("nvpf4", "nvfp4"),
        ("bfloat", "bfloat16"),
        ("bf_16", "bf16"),
        ("int-4", "int4"),
        ("float8_e4m3", "float8_e4m3"),
        ("int4:g128:asymm", "asym"),
        ("int4:128", "g128"),
        ("int4:chanel", "channel"),
        ("int8:channel:rle=absmax", "rule="),
        ("int4:g128:scale=bf17", "bf16"),
        ("posti8", "posit8"),
        ("binray", "binary"),
        ("binary8p3sx", "binary8p3se"),
        ("log4,3", "log4.3"),
        ("int4:g129q", "g129"),
        ("e4m3fn:128x128x", "128x128"),
        ("uint8:channel:zero_pont=128", "zero_point="),
    ],
)
def test_typos_name_what_is_near(text, near):
    if text == near:
        assert hn.format(text) == hn.format("e4m3")
        return
    with pytest.raises(ValueError, match=r"cannot read .* as a number format; did you mean") as error:
        hn.format(text)
    message = str(error.value)
    assert near in message.split("?")[0]
    assert _names.GRAMMAR in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read '' as a number format"),
        ("quux", r"cannot read 'quux' as a number format\. A format is a name"),
        ("int17", "'int17' is no number format: integers have 1 to 16 bits here, got 17"),
        ("int1n", "'int1n' is no number format: integers have 2 to 16 bits"),
        ("int0", "integers have 1 to 16 bits here, got 0"),
        ("uint0", "integers have 1 to 16 bits here, got 0"),
        ("uint4n", "narrow=True is for signed integers"),
        ("e0m3", "Float needs exponent >= 1"),
        ("e8m24", "Float of 33 bits: at most 32 signed"),
        ("ue8m24", "at most 32 signed, 31 unsigned"),
        ("e12m3", "has numbers that float64 has not"),
        ("e4m3b2000", "has numbers that float64 has not"),
        ("e8m0", None),
        ("e5m0", 'nan="ieee" needs inf=True and mantissa >= 1; use nan="top"'),
        ("ue4m3fnuz", 'nan="negative_zero" needs a signed zero code'),
        ("e1m0fn", "has no finite number besides zero"),
        ("codebook(1)", "a codebook is 2 to 65536 finite values in ascending order"),
        ("codebook(1,0)", "in ascending order"),
        ("codebook(a,b)", "could not convert string to float: 'a'"),
        ("fixed8.2000", "fraction=2000 is beyond float64"),
        ("int4:asym", "has block options but no block: add :g{size}, :channel or :tensor"),
        ("int4:g0", "block size 0: a whole number from 1"),
        ("int4:g8:rule=abs", "scale rule 'abs': choose one of floor, ceil"),
        ("int4:g8:axis=x", "block axis 'x': a whole number"),
        ("int4:g8:scale=mxfp4", "a block's scale is a Float, got mxfp4"),
        ("int4:g8:tensor_scale=int8", "a block's tensor_scale is a Float, got int8"),
        ("e2m1:g8:asym", "a zero point needs an integer element, two's complement or unsigned, and the rule 'absmax'"),
        ("e2m1:g8:division=fast", "division 'fast': choose 'exact', 'rounded', 'reciprocal'"),
    ],
)
def test_what_a_wrong_name_says(text, message):
    if message is None:
        assert hn.format(text).bits == 8
        return
    with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("(", r"\(").replace(")", r"\)")):
        hn.format(text)


@pytest.mark.parametrize("thing", [5, None, 4.5, ["e4m3fn"], np.float32, b"e4m3fn"])
def test_what_is_no_format_says_so(thing):
    with pytest.raises(ValueError, match="a number format is a name such as 'e4m3fn' or a Format, got"):
        hn.format(thing)
    with pytest.raises(ValueError, match="a number format is a name"):
        hn.encode(np.ones(3), thing)


def test_contradictory_fields():
    for make, message in [
        (lambda: hn.Float(4, 3, nan="quiet"), "nan='quiet': choose True, False or one of"),
        (lambda: hn.Float(4, 3, inf=False, nan="ieee"), 'nan="ieee" needs inf=True'),
        (lambda: hn.Float(4, 3, zero=False), "zero=False needs subnormal=False"),
        (lambda: hn.Float(4, 3, signed=False, negative_zero=True), "the format has no free code for it"),
        (lambda: hn.Codebook((0.0, np.nan)), "finite values in ascending order"),
        (lambda: hn.Codebook((0.0, np.inf)), "finite values"),
        (lambda: hn.Codebook((1.0, 1.0)), "ascending order"),
        (lambda: hn.Fixed(17), "integers have 1 to 16 bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()


def test_properties_of_known_formats():
    for text, bits, largest, smallest in [
        ("e4m3fn", 8, 448.0, 2.0**-9),
        ("e5m2", 8, 57344.0, 2.0**-16),
        ("e2m1", 4, 6.0, 0.5),
        ("e3m2", 6, 28.0, 0.0625),
        ("e2m3", 6, 7.5, 0.125),
        ("e8m0", 8, 2.0**127, 2.0**-127),
        ("bf16", 16, 3.3895313892515355e38, 2.0**-133),
        ("fp16", 16, 65504.0, 2.0**-24),
        ("e4m3fnuz", 8, 240.0, 2.0**-10),
        ("e5m2fnuz", 8, 57344.0, 2.0**-17),
        ("e3m4", 8, 15.5, 2.0**-6),
    ]:
        fmt = hn.format(text)
        assert (fmt.bits, fmt.max, fmt.min_positive) == (bits, largest, smallest)
    assert hn.format("mxfp4").bits_per_element == 4.25
    assert hn.format("nvfp4").bits_per_element == 4.5
    assert hn.format("int4:g128:asym").bits_per_element == 4 + 20 / 128
    assert (hn.Int(4).low, hn.Int(4).high, hn.Int(4, narrow=True).low) == (-8, 7, -7)


@pytest.mark.parametrize(
    "text", ["int\u0664", "int4:g\u0661\u0662\u0668", "codebook(\u0660,1)", "e\u0664m3", "\uff49nt4"]
)
def test_only_ascii_digits_are_digits(text):
    with pytest.raises(ValueError, match=r"cannot read .* as a number format"):
        hn.format(text)


def test_other_spellings():
    for text, fmt in [
        ("binary8p3", hn.p3109(8, 3)),
        ("p3109_k8p3uf", hn.p3109(8, 3, False, False)),
        ("binary8p4sf", hn.format("e4m3fnuz")),
        ("posit16es2", hn.Posit(16)),
        ("log4", hn.Log(4)),
        ("uint8:channel:zero_point=128", hn.Block(hn.Int(8, False, offset=128), "channel", "fp32")),
        ("e4m3fn:128x128:axis=1,0", hn.Block("e4m3fn", (128, 128), "fp32", axis=(0, 1))),
        ("mxint8-symmetric", hn.Block(hn.Fixed(8, 6, narrow=True))),
        ("mxint8_symmetric", hn.Block(hn.Fixed(8, 6, narrow=True))),
        ("msfp12", hn.Block(hn.Fixed(4, 2, sign_magnitude=True), 16)),
        ("nvfp4:rule=mse( 6.0,4)", hn.Block("e2m1", 16, "e4m3fn", "mse(4,6)", tensor_scale="fp32")),
    ]:
        assert hn.format(text) == fmt, text
    bits = {f"msfp{n}": n - 8 + 8 / 16 for n in range(11, 17)}
    assert {name: hn.format(name).bits_per_element for name in bits} == bits
