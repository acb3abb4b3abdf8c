"""Facts of formats against the formats' own properties and the definitions, and profiles against casts."""

import math

import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics.analysis import _describe
from halfulp.numerics.analysis._describe import constructor, fate, scale_in_words, spans

from .common import SMALL_FORMATS, WIDE_FORMATS

TABLES = [hn.format(n) for n in ("nf4", "posit8", "posit8es0", "log4.3", "binary", "ternary")]


@pytest.mark.parametrize("fmt", [f for f in SMALL_FORMATS if isinstance(f, hn.Float)], ids=str)
def test_a_float_is_what_its_fields_say(fmt):
    facts = hn.describe(fmt)
    assert facts.max == fmt.max
    assert facts.min_positive == fmt.min_positive
    if fmt.zero and fmt.emin <= fmt.emax:
        assert facts.min_normal == 2.0**fmt.emin
        count = (2**fmt.mantissa - 1) * (1 + fmt.signed) * fmt.subnormal
        assert facts.subnormals == count
        full = fmt.max >= 2 * facts.min_normal
        if full:  # a whole binade: half an ulp above its first number
            half = 2.0 ** -(fmt.mantissa + 1)
            assert facts.worst_error == pytest.approx(half / (1 + half), rel=1e-12)
    one = float(hn.cast(np.array([1.0]), fmt)[0])
    if one == 1 and fmt.max > 1 and (not fmt.zero or (facts.min_normal and facts.min_normal <= 1)):
        assert facts.ulp_of_one == 2.0**-fmt.mantissa
    in_nans = [code for a, b in facts.nans for code in range(a, b + 1)]
    assert (fmt.nan_code in in_nans) == (fmt.nan_code is not None)
    assert bool(facts.infinities) == fmt.inf
    assert bool(facts.negative_zeros) == fmt.negative_zero
    assert facts.finite + len(in_nans) + (1 + fmt.signed) * fmt.inf == 2**fmt.bits


@pytest.mark.parametrize("fmt", [*SMALL_FORMATS, *TABLES], ids=str)
def test_codes_are_counted_once(fmt):
    facts, values = hn.describe(fmt), hn.values_of(fmt)
    known = np.isfinite(values)
    kinds = [facts.zeros, facts.negative_zeros, facts.infinities, facts.nans]
    counted = [sum(b - a + 1 for a, b in kind) for kind in kinds]
    assert counted[2] == np.isinf(values).sum()
    assert counted[3] == np.isnan(values).sum()
    assert counted[0] + counted[1] == (values == 0).sum()
    assert facts.finite == known.sum()
    numbers = hn.numbers_of(fmt)
    assert facts.distinct == len(numbers)
    assert (facts.lowest, facts.max) == (numbers[0], numbers[-1])
    assert (np.asarray(hn.cast(numbers, fmt)) == numbers).all()
    assert facts.symmetric == np.array_equal(numbers[numbers > 0], -numbers[numbers < 0][::-1])


@pytest.mark.parametrize("fmt", WIDE_FORMATS, ids=str)
def test_the_search_among_codes_finds_what_all_codes_show(fmt, monkeypatch):
    """Formats of 12 to 16 bits are small enough for both ways, and for the wider ones the fields tell."""
    facts = _describe._from_search(fmt) if isinstance(fmt, hn.Float) else None
    if facts is None:
        return
    assert (facts.max, facts.min_positive, facts.min_normal) == (fmt.max, fmt.min_positive, 2.0**fmt.emin)
    assert facts.subnormals == 2 * (2**fmt.mantissa - 1)
    assert facts.ulp_of_one == 2.0**-fmt.mantissa
    assert facts.nans[0][1] == 2 ** (fmt.bits - 1) - 1
    if fmt.bits <= 16:
        assert facts == _describe._from_all_codes(fmt)


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e4m3fnuz", "e4m3ns", "e8m0", "ue4m3fn", "posit8", "e3m2"])
def test_both_ways_agree_on_small_formats(name):
    fmt = hn.format(name)
    assert _describe._from_search(fmt) == _describe._from_all_codes(fmt)


def test_known_figures():
    fp16 = hn.describe("fp16")
    assert (fp16.max, fp16.min_normal, fp16.min_positive) == (65504, 2**-14, 2**-24)
    assert (fp16.infinities, fp16.nans) == (((0x7C00,) * 2, (0xFC00,) * 2), ((0x7C01, 0x7FFF), (0xFC01, 0xFFFF)))
    e4m3 = hn.describe("e4m3fn")
    assert (e4m3.distinct, e4m3.infinities, e4m3.nans) == (253, (), ((0x7F, 0x7F), (0xFF, 0xFF)))
    assert e4m3.binades == pytest.approx(math.log2(448 * 512))
    assert e4m3.decibels == pytest.approx(20 * math.log10(448 * 512))
    int8 = hn.describe("int8")
    assert (int8.lowest, int8.max, int8.step, int8.symmetric) == (-128, 127, 1, False)
    assert hn.describe("int8n").unused == ((128, 128),)
    assert hn.describe("nf4").ulp_of_one is None
    assert hn.describe("log4.3").worst_error == pytest.approx(2 ** (1 / 16) - 1, rel=1e-9)
    with pytest.raises(ValueError, match="mxfp4 is a block format: describe its element e2m1 and its scale e8m0"):
        hn.describe("mxfp4")
    with pytest.raises(ValueError, match="tf32 has too many codes to list"):
        hn.values_of("tf32")


def test_what_becomes_of_the_ends():
    assert fate("fp16") == {"overflow": "becomes infinity", "infinity": "stays infinity", "NaN": "stays NaN"}
    assert fate("e2m1") == {"overflow": "saturates to 6", "infinity": "saturates to 6", "NaN": "becomes 0"}
    assert fate("int4")["overflow"] == "saturates to 7"


@pytest.mark.parametrize("name", [*hn.NAMED, "int4:g128:asym", "e3m4b2fnuz", "e4m3fn:128x128", "uint8:channel"])
def test_the_shown_call_makes_the_format(name):
    fmt = hn.format(name)
    spelled = constructor(fmt)
    assert eval(spelled, {n: getattr(hn, n) for n in hn.__all__}) == fmt


RULES = {
    "floor": "amax / 4, rounded down to a power of two",
    "ceil": "amax / 4, rounded up to a power of two",
    "even": "amax (first rounded to 2 significant bits) / 4, rounded down to a power of two",
    "rceil": "amax / 6, rounded up to a power of two",
    "absmax": "amax / 6, rounded to nearest even to a power of two",
    "midmax": "amax / 7, rounded up to a power of two",
    "absmax(4)": "amax / 4, rounded to nearest even to a power of two",
    "mse": "amax over 3, 6 or 12, rounded to nearest even to a power of two: the one that loses least",
}


@pytest.mark.parametrize("rule", RULES)
def test_scale_rules_in_words(rule):
    assert scale_in_words(hn.format(f"mxfp4:rule={rule}")) == RULES[rule]


@pytest.mark.parametrize("rule", [r for r in RULES if r not in ("mse",)])
def test_the_words_are_what_happens(rule):
    """The target of the words, applied by hand, gives the scale."""
    words = scale_in_words(hn.format(f"mxfp4:rule={rule}"))
    amax = np.linspace(1.01, 15.9, 57).astype(np.float32)
    x = np.zeros((len(amax), 32), np.float32)
    x[:, 0] = amax
    target = float(words.split(" / ")[1].split(",")[0])
    exponent = np.log2((np.asarray(hn.cast(amax, "e8m1")) if "first" in words else amax) / target)
    whole = {"down": np.floor, "up": np.ceil}.get(words.split("rounded ")[-1].split()[0])
    nearest = np.where(2.0 ** (exponent % 1) >= 1.5, np.ceil(exponent), np.floor(exponent))
    expected = whole(exponent) if whole else nearest
    assert (np.asarray(hn.encode(x, f"mxfp4:rule={rule}").scale)[:, 0].astype(int) - 127 == expected).all()


def test_spans():
    assert spans(np.array([True, True, False, True])) == ((0, 1), (3, 3))
    assert spans(np.zeros(3, bool)) == ()


@pytest.mark.parametrize("name", ["e3m2", "e4m3fn", "int4", "nf4", "posit8", "log4.3", "ue4m3fn", "fixed8.6"])
def test_a_profile_with_every_gap_is_the_error_of_casts(name):
    fmt, profile = hn.format(name), hn.error_profile(name)
    x = profile.magnitude
    assert (np.diff(x) > 0).all()
    sides = [x, -x] if hn.describe(fmt).lowest < 0 else [x]
    errors = [np.abs(np.asarray(hn.cast(s, fmt, overflow="saturate")) - s) / x for s in sides]
    np.testing.assert_array_equal(profile.error, np.max(errors, axis=0))
    # nothing between the points is worse than the worse of its neighbours, within the range
    facts = hn.describe(fmt)
    rng = np.random.default_rng(0)
    inside = np.exp2(rng.uniform(math.log2(facts.min_positive), math.log2(facts.max), 4000))
    errors = np.max(
        [np.abs(np.asarray(hn.cast(s * inside, fmt)) - s * inside) / inside for s in (1, -1)[: len(sides)]], axis=0
    )
    at = np.searchsorted(x, inside)
    bound = np.maximum(profile.error[at], profile.error[np.maximum(at - 1, 0)])
    if facts.symmetric or len(sides) == 1:
        assert (errors <= bound * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "e8m0", "posit16"])
def test_a_profile_of_many_numbers_is_an_upper_bound(name):
    profile, facts = hn.error_profile(name), hn.describe(name)
    x = profile.magnitude
    middle = (x > (facts.min_normal or facts.min_positive)) & (x < facts.max)
    assert profile.error[middle].max() == pytest.approx(facts.worst_error, rel=1e-6)
    assert (np.diff(profile.magnitude) >= 0).all()


@pytest.mark.parametrize(
    "name", ["mxfp4", "nvfp4", "int4:g16", "int8:channel", "e4m3fn:tensor", "e2m1:4x8", "int4:g32:asym"]
)
def test_a_profile_of_blocks_bounds_the_errors_of_blocks(name):
    """Elements of random blocks, by their ratio to the largest, are off by no more than the profile says (whose
    steps are a 24th of an octave, hence a little room)."""
    profile = hn.error_profile(name)
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-3, 0, (64, 64))).astype(np.float32)
    top = 2.0 ** rng.uniform(0, 1)
    if name.endswith("tensor"):
        x[0, 0] = top
    else:
        x[:, ::4] = np.exp2(rng.uniform(0, 1, (64, 16)))
    y = np.asarray(hn.cast(x, name)).astype(np.float64)
    worst = np.abs(y - x).max()
    assert worst <= (profile.error * profile.magnitude).max() * 2 * 1.1
    assert profile.magnitude[-1] == 1
    assert (profile.typical <= profile.error + 1e-12).all()


def test_an_mx_block_loses_what_its_scale_rule_says():
    """floor: the largest number lies in [4, 8) scales, 8 saturates to 6, and below 1/4 scale all is lost."""
    profile = hn.error_profile("mxfp4")
    assert 0.2 < profile.error[-1] < 0.25
    lost = profile.magnitude[profile.error == 1]
    assert lost.max() == pytest.approx(1 / 16, rel=0.03)
    certain = profile.magnitude[profile.typical == 1]
    assert certain.max() == pytest.approx(1 / 32, rel=0.03)


def test_a_format_without_positive_numbers():
    assert hn.describe("int1").binades == 0
    with pytest.raises(ValueError, match="int1 has no number above zero"):
        hn.error_profile("int1")
