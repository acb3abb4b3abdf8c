"""The commands that show formats and analyse tensors, as a person meets them."""

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from halfulp.recipes import _cli

Result = namedtuple("Result", "code stdout stderr")


@pytest.fixture
def halfulp(capsys, monkeypatch):
    """The command line in this process, 80 columns wide: what it prints, and the code that it exits with."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["halfulp", *map(str, words)])
        try:
            _cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return Result(code, *capsys.readouterr())

    return run


def refused(result, *words):
    assert result.code == 1
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("analyze ")]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    path = tmp_path_factory.mktemp("arrays") / "x.npz"
    rng = np.random.default_rng(0)
    np.savez(path, a=rng.standard_normal((64, 96)), b=rng.standard_t(3, (32, 96)), steps=np.arange(3), bias=np.ones(5))
    return path


def test_a_format_is_shown(halfulp):
    shown = halfulp("format", "e3m2")
    assert shown.code == 0, shown.stderr
    for line in (
        "e3m2: floating point, 6 bits",
        "halfulp.Float(exponent=3, mantissa=2, inf=False, nan=False)",
        "code         s eee mm: a sign, 3 exponent bits (bias 3), 2 of mantissa",
        "codes        64: 63 numbers, +0 0x00, -0 0x20; no infinity, no NaN",
        "largest      ±28 = 1.75 * 2^4",
        "normal       from 0.25 = 2^-2",
        "subnormal    from 0.0625 = 2^-4: 6 of both signs, 9.4 % of the codes",
        "dynamic      8.81 binades, 53.0 dB from smallest to largest",
        "ulp of 1     0.25 = 2^-2; half of it, the unit roundoff, 0.125 = 2^-3",
        "too large    saturates to 28",
        "NaN          becomes 0",
        "2^4          4                16      20      24      28",
    ):
        assert line in shown.stdout.splitlines(), line
    assert shown.stdout == halfulp("formats", "e3m2").stdout


def test_the_command_runs_in_a_process_of_its_own():
    """And without torch, which takes a second to import."""
    code = "import sys, atexit; from halfulp.recipes._cli import main; sys.argv[1:] = ['format', 'e2m1']"
    code += "; atexit.register(lambda: print('torch' in sys.modules)); main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.startswith("e2m1: floating point, 4 bits"), run.stderr
    assert run.stdout.endswith("False\n")


def test_blocks_say_how_they_scale(halfulp):
    shown = halfulp("format", "nvfp4").stdout
    assert "nvfp4: e2m1, blocks of 16, 4.5 bits a number" in shown
    assert "block        16 elements of 4 bits, a scale of 8 bits, e4m3fn: 72 bits" in shown
    assert "number       element * scale * tensor scale" in shown
    assert "amax / 6 / tensor scale, rounded to nearest even to e4m3fn" in shown
    assert "e2m1: floating point, 4 bits" in shown
    assert "one scale a channel" in halfulp("format", "int8:channel").stdout
    assert "128 x 128" in halfulp("format", "e4m3fn:128x128").stdout


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal(width, halfulp, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for names in (["e3m2"], ["mxfp4"], ["fp32"], ["posit16", "bf16", "e5m2", "int8"]):
        for line in halfulp("format", *names).stdout.splitlines():
            assert len(line) <= width, line


def test_formats_are_compared_and_drawn(halfulp, tmp_path):
    out = tmp_path / "compare.svg"
    shown = halfulp("format", "e3m2", "e2m3", "posit8", "-o", out)
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["e3m2", "e2m3", "posit8"]
    assert lines[2].split() == ["largest", "28", "7.5", "1.67772e+07"]
    assert lines[-1] == str(out)
    assert out.read_text().startswith("<svg")
    refused(halfulp("format", "e3m2", "-o", tmp_path / "a.png"), "a.png", ".svg or .html")
    refused(halfulp("formats", "-o", out), "name the formats to draw")
    refused(halfulp("format", "e4m3fm"), "e4m3fm", "did you mean e4m3fn")


def test_codes_are_listed(halfulp):
    shown = halfulp("format", "e2m1", "--codes").stdout
    assert "0x7 0111         6" in shown
    assert "0x8 1000        -0" in shown
    refused(halfulp("format", "mxfp4", "--codes"), "too many codes")


def test_an_analysis_is_printed(halfulp, arrays, tmp_path):
    shown = halfulp(
        "analyze", arrays, "-f", "mxfp4,codebook(-1,0,1):channel", "--under", "4.5", "-o", tmp_path / "r.csv"
    )
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    told = "2 tensors, 9,216 numbers; left out: 1 of other than floats, 1 of one axis"
    assert told in " ".join(" ".join(lines[:3]).split())
    assert max(map(len, lines[:-1])) <= 80
    assert "SQNR in dB, the worst mxfp4 first" in lines
    assert any(line.split()[:1] == ["b"] for line in lines)
    totals = next(line for line in lines if line.startswith("all tensors"))
    assert "best <= 4.5" in totals
    for key in ("bits a number", "SQNR, dB", "clipped", "to zero", "subnormal", "cosine", "largest error"):
        assert any(line.startswith(key) for line in lines), key
    assert lines[-1] == str(tmp_path / "r.csv")
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 7
    one = halfulp("analyze", arrays, "b", "--under", "4.5")
    assert "the best of at most 4.5 bits a number" in one.stdout
    assert "mxfp8" not in one.stdout
    few = halfulp("analyze", arrays, "--rows", "1")
    assert "and 1 more: --rows 0 prints all of them" in few.stdout
    assert "analyze" in few.stderr
    assert "100%" in few.stderr


@pytest.mark.parametrize("ending", ["svg", "html"])
def test_an_analysis_is_drawn(halfulp, arrays, tmp_path, ending):
    out = tmp_path / f"a.{ending}"
    assert halfulp("analyze", arrays, "-f", "mxfp4,nvfp4", "-o", out).code == 0
    assert "<svg" in out.read_text()


def test_what_cannot_be_analysed_is_one_sentence(halfulp, arrays, tmp_path):
    refused(halfulp("analyze", arrays, "-o", tmp_path / "a.png"), "a.png", ".csv")
    refused(halfulp("analyze", tmp_path / "nowhere"), "nowhere")
    refused(halfulp("analyze", arrays, "-f", "mxfp5"), "mxfp5", "mxfp4")
    assert "matches no tensor" in halfulp("analyze", arrays, "q_proj").stderr
    assert list(tmp_path.iterdir()) == []


def test_the_readme_shows_what_is_printed(halfulp, tmp_path):
    """Its block of text is the beginning of the command's output, its picture the command's picture."""
    root = Path(__file__).parents[2]
    shown = halfulp("format", "e3m2", "-o", tmp_path / "e3m2.svg").stdout
    readme = (root / "README.md").read_text(encoding="utf-8")
    block = readme.split("$ halfulp format e3m2 -o docs/e3m2.svg")[1].split("\n", 1)[1].split("\n```")[0]
    assert shown.startswith(block)
    assert (root / "docs" / "e3m2.svg").read_text(encoding="utf-8") == (tmp_path / "e3m2.svg").read_text(
        encoding="utf-8"
    )
