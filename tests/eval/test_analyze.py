"""Analyses of files: the figures are those of the tensors, memory is bounded, sources and patterns are checked."""

import csv
import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from halfulp import numerics as hn
from halfulp.eval import _analysis_plots as plots
from halfulp.eval._analyze import analyze
from halfulp.eval._tensors import open_tensors

FORMATS = ["mxfp4", "nvfp4", "int4:g32"]


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    made = {
        f"model.layers.{i}.{kind}.weight": torch.from_numpy(rng.standard_t(3 + i, (24, 64)).astype(np.float32))
        for i in range(3)
        for kind in ("self_attn.q_proj", "mlp.down_proj")
    }
    made["model.embed_tokens.weight"] = torch.randn(50, 64, generator=torch.manual_seed(0)).bfloat16()
    made["model.norm.weight"] = torch.ones(64)
    made["model.steps"] = torch.arange(4)
    return made


@pytest.fixture(scope="module")
def path(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "weights.safetensors"
    save_file(tensors, path)
    return path


def test_figures_are_those_of_each_tensor(path, tensors):
    found = analyze(path, FORMATS)
    assert len(found.tensors) == 7
    assert found.skipped == ("1 of other than floats", "1 of one axis")
    for t in found.tensors:
        assert list(t.stats) == list(hn.error_report(tensors[t.spec.name], FORMATS).rows)
    assert [t.first for t in found.tensors] == sorted(t.first for t in found.tensors)
    name, whole, each = found.totals()[1]
    assert name == "nvfp4"
    assert len(each) == 7
    assert whole.count == sum(t.numel() for n, t in tensors.items() if t.ndim == 2)
    noise = sum(hn.error_stats(t, "nvfp4").noise for t in tensors.values() if t.ndim == 2)
    assert math.isclose(whole.noise, noise, rel_tol=1e-12)


def test_a_source_is_read_a_few_rows_at_a_time(path, monkeypatch):
    from halfulp.numerics.analysis import _stream as _analysis

    monkeypatch.setattr(_analysis, "CHUNK", 300)
    opened = open_tensors(path)
    asked = []

    def read(name, rows):
        asked.append(rows.stop - rows.start)
        return opened.read(name, rows)

    found = analyze(type(opened)(opened.source, opened.specs, read), FORMATS)
    assert max(asked) <= 300 // 64
    plain = analyze(path, FORMATS)
    for a, b in zip(found.tensors, plain.tensors):
        assert [s.clipped for s in a.stats] == [s.clipped for s in b.stats]
        assert all(math.isclose(s.noise, t.noise, rel_tol=1e-12) for s, t in zip(a.stats, b.stats))


def test_numpy_files(tmp_path):
    x = np.random.default_rng(1).standard_normal((16, 96))
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", a=x, b=x[0], c=np.arange(3))
    np.savez_compressed(tmp_path / "z.npz", a=x.astype(np.float16))
    (one,) = analyze(tmp_path / "x.npy", ["int4:g32"]).tensors
    assert one.spec.name == "x"
    assert one.stats[0] == hn.error_stats(x, "int4:g32")
    found = analyze(tmp_path / "x.npz", ["int4:g32"])
    assert [t.spec.name for t in found.tensors] == ["a"]
    assert found.tensors[0].stats == one.stats
    (half,) = analyze(tmp_path / "z.npz", ["fp16"]).tensors
    assert half.stats[0].noise == 0
    vectors = tmp_path / "v.npz"
    np.savez(vectors, b=x[0], d=np.float32(3))
    assert len(analyze(vectors, ["e4m3fn"]).tensors) == 2
    save_file({"s": torch.tensor(0.3)}, tmp_path / "s.safetensors")
    assert analyze(tmp_path / "s.safetensors", ["e4m3fn"]).count == 1
    bad = tmp_path / "o.npy"
    np.save(bad, np.array([None]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"o\.npy is no array that can be read"):
        analyze(bad, ["e4m3fn"])
    (tmp_path / "n.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"n\.npz is no npz file that can be read"):
        analyze(tmp_path / "n.npz", ["e4m3fn"])


def test_blocks_lie_along_the_axis_that_is_summed_over(tmp_path):
    """gpt2 stores its linear weights [in, out]."""
    x = torch.randn(64, 40, generator=torch.manual_seed(0)) * torch.exp2(torch.arange(64.0) / 8)[:, None]
    save_file({"h.0.mlp.c_fc.weight": x}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (found,) = analyze(tmp_path, ["int4:g32"]).tensors
    assert found.stats[0].noise == hn.error_stats(x, "int4:g32:axis=0").noise
    assert str(found.stats[0].format) == "int4:g32"


def test_the_best_format_of_each_tensor(path, tensors):
    found = analyze(path, ["mxfp4"], under=4.5, tensors=["*.q_proj", "embed_tokens"])
    assert [t.spec.name.split(".")[-2] for t in found.tensors].count("q_proj") == 3
    assert len(found.tensors) == 4
    for t in found.tensors:
        best = hn.best_format(tensors[t.spec.name], 4.5, keep=3)
        assert t.ranking == best
        assert t.best.noise <= t.stats[0].noise
    assert [name for name, *_ in found.totals()] == ["mxfp4", "best <= 4.5"]
    only = analyze(path, under=3, tensors=["model.norm"])
    assert len(only.tensors[0].ranking) > 3


def test_progress_covers_every_number_once(path):
    seen = []
    analyze(path, FORMATS, under=4, progress=lambda done, total, name: seen.append((done, total, name)))
    assert [done for done, *_ in seen] == sorted({done for done, *_ in seen})
    assert seen[-1][0] == seen[-1][1] == 7 * 24 * 64 - 24 * 64 + 50 * 64


def test_what_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="name formats to compare, or give the bits to stay under"):
        analyze(path)
    with pytest.raises(ValueError, match=r"'\*\.k_proj' matches no tensor of .*; near names: .*q_proj"):
        analyze(path, FORMATS, tensors=["*.k_proj"])
    with pytest.raises(ValueError, match=r"'model\.steps' matches only model\.steps of I64: no floats"):
        analyze(path, FORMATS, tensors=["model.steps"])
    with pytest.raises(ValueError, match=r"under 0\.5 bits: give a number from 1 to 32"):
        analyze(path, under=0.5)
    save_file({"steps": torch.arange(3)}, tmp_path / "i.safetensors")
    with pytest.raises(ValueError, match="has no tensors of floating-point numbers"):
        analyze(tmp_path / "i.safetensors", FORMATS)


def test_csv_has_every_figure(path):
    found = analyze(path, FORMATS, under=4.5)
    rows = list(csv.DictReader(io.StringIO(found.csv())))
    assert len(rows) == 7 * 4
    first = found.tensors[0]
    assert rows[0]["tensor"] == first.spec.name
    assert float(rows[0]["sqnr_db"]) == first.stats[0].sqnr_db
    assert rows[3]["chosen"] == "best"
    assert rows[3]["format"] == str(first.best.format)


@pytest.mark.parametrize("patterns", [(), ("embed_tokens",), ("model.norm",)])
@pytest.mark.parametrize("formats", [["mxfp4"], [*FORMATS, "fp32"]])
def test_pictures_and_pages(path, tmp_path, patterns, formats):
    found = analyze(path, formats, tensors=patterns)
    svg = plots.analysis_file(found, tmp_path / "a.svg").read_text()
    root = ET.fromstring(svg)
    words = "".join(root.itertext())
    exact = patterns == ("model.norm",) and formats == ["mxfp4"]
    assert ("no format changes these tensors" in words) == exact
    assert exact or all(name in words for name in formats if name != "fp32")
    if not patterns:
        cells = [
            r for r in root.iter("{http://www.w3.org/2000/svg}rect") if re.fullmatch("h[0-6]|unknown", r.get("class"))
        ]
        assert len(cells) == 7 * len(formats) + 7  # and the squares of the legend
    page = plots.analysis_file(found, tmp_path / "a.html", ["halfulp", "analyze", "x"]).read_text()
    assert all(t.spec.name in page for t in found.tensors)
    assert "halfulp analyze x" in page
    assert not re.search(r"<script|(href|src)=", page)


def test_a_darker_square_is_a_worse_tensor():
    worse, better = (plots._cell(0, 0, 10, value, 10.0, 30.0, "t") for value in (10.0, 30.0))
    assert 'class="h6"' in worse
    assert 'class="h0"' in better
    assert 'class="unknown"' in plots._cell(0, 0, 10, math.inf, 10.0, 30.0, "t")


def test_other_endings_are_refused_before_the_work(tmp_path):
    with pytest.raises(ValueError, match=r"a\.png: give a name that ends in \.csv, \.svg, \.html"):
        plots.check_ending(tmp_path / "a.png")
