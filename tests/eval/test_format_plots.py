"""Pictures of formats: well-formed, and what they draw is where it should be."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from halfulp import numerics as hn
from halfulp.eval import _format_plots as plots
from halfulp.eval import format_picture, write_picture

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    ["e3m2"],
    ["int8"],
    ["nf4"],
    ["fp32"],
    ["posit8"],
    ["e8m0"],
    ["binary"],
    ["mxfp4"],
    ["int4:channel"],
    ["e4m3fn:8x8"],
    ["e3m2", "e2m3", "posit8"],
    ["fp32", "bf16", "int8"],
    ["mxfp4", "nvfp4", "int4:g128:asym", "e4m3fn"],
    [f"e{e}m{7 - e}f" for e in range(1, 8)] + ["int8", "posit8", "log4.3"],
]


def parsed(names):
    return ET.fromstring(format_picture(names))


@pytest.mark.parametrize("names", CASES, ids="-".join)
def test_pictures_are_well_formed_and_stand_alone(names):
    text = format_picture(names)
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(href|src|url\()", text)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text)
    words = "".join(root.itertext())
    for name in names:
        assert plots.shorten(name, 17) in words
    _, _, width, height = map(float, root.get("viewBox").split())
    for line in root.iter(f"{SVG}line"):
        assert 0 <= float(line.get("x1")) <= width
        assert 0 <= float(line.get("y1")) <= height
    assert format_picture(names) == text


def test_a_stroke_for_every_number():
    path = [p for p in parsed(["e2m1"]).iter(f"{SVG}path") if p.get("class", "").startswith("values")]
    strokes = [len(re.findall("M", p.get("d"))) for p in path]
    # 13 and 2 subnormal ones on the linear axis, 6 and 1 on the log axis, which has only positive ones
    assert strokes == [13, 2, 6, 1]


def test_strokes_lie_where_their_numbers_are():
    lines = plots._lines(["e2m1"])
    across = plots._across(lines)
    path = [p for p in parsed(["e2m1"]).iter(f"{SVG}path") if p.get("class") == "values s0"][1]
    at = [float(x) for x in re.findall(r"M([\d.]+) ", path.get("d"))]
    numbers = [1, 1.5, 2, 3, 4, 6]
    assert at == [pytest.approx(across(math.log2(v)), abs=0.06) for v in numbers]


def test_curves_of_blocks_are_relative_to_their_largest():
    """In mxfp4 all below 1/16 of the largest may be lost, and nothing above it."""
    line = plots._lines(["mxfp4"])[0]
    x, error = plots._points(line, line.profile.error, plots._across([line]), True)
    lost = max(at for at, e in zip(x, error) if e >= 1)
    assert lost == pytest.approx(-4, abs=0.05)
    assert x[-1] == 0


def test_the_envelope_of_several_touches_the_peaks():
    line = plots._lines(["e3m2", "e2m3"])[0]
    x, error = plots._points(line, line.profile.error, plots._across([line]), False)
    inside = [e for at, e in zip(x, error) if -1.99 < at < 4.7]
    assert max(inside) == pytest.approx(1 / 9)
    assert min(inside) == pytest.approx(1 / 15)


@pytest.mark.parametrize("ending", [".svg", ".html"])
def test_files(tmp_path, ending):
    out = write_picture(["e3m2"], tmp_path / f"a{ending}")
    text = out.read_text()
    assert "<svg" in text
    assert ("<!doctype html>" in text) == (ending == ".html")


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a\.png: give a name that ends in \.svg or \.html"):
        write_picture(["e3m2"], tmp_path / "a.png")
    with pytest.raises(ValueError, match="no formats to draw"):
        format_picture([])
    with pytest.raises(ValueError, match="did you mean"):
        format_picture(["e4m3fm"])
    assert list(tmp_path.iterdir()) == []


def test_powers_in_print():
    assert plots.power(-12) == "2⁻¹²"
    assert hn.format("e3m2").bits == 6
