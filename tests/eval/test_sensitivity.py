"""Sensitivities are what `compare` finds of a model of which one group is rounded; killed runs lose nothing."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from halfulp.compress import calibration, compress, load, open_checkpoint, quantize
from halfulp.compress.mixed import Sensitivity, allocate, mixed
from halfulp.eval import compare
from halfulp.eval._sensitivity import estimate, sensitivity
from halfulp.eval._sensitivity_plots import sensitivity_picture, write_sensitivity_picture
from halfulp.eval._windows import Window

pytest.importorskip("transformers")

# the checkpoints of the neighbouring folder, which is no package seen from here
_spec = spec_from_file_location("checkpoints", Path(__file__).parents[1] / "compress" / "common.py")
common = module_from_spec(_spec)
_spec.loader.exec_module(common)

IDS = [[5, 6, 7, 8, 9, 3, 4], [9, 8, 7, 100, 4], [1, 2, 3, 4, 5, 6, 7]]
READ = calibration(IDS)
WINDOWS = [Window(tuple(ids), 1) for ids in IDS]
FORMATS = ["int3:g32", "int8:channel"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("sources")
    return {kind: common.checkpoint(home / kind, kind, torch.float32) for kind in common.MODELS}


@pytest.fixture(scope="module")
def llama(folders):
    return sensitivity(folders["llama"], FORMATS, calibration=READ)


@pytest.mark.parametrize("kind", list(common.MODELS))
@pytest.mark.parametrize("groups", ["layer", "fused", "block", "role"])
def test_each_figure_is_that_of_a_compressed_model(folders, tmp_path, kind, groups):
    checkpoint = open_checkpoint(folders[kind])
    found = sensitivity(checkpoint, FORMATS, calibration=READ, groups=groups)
    assert sum(g.tensors for g in found.groups) == sum("_proj" in n and "bias" not in n for n in checkpoint.tensors)
    original = load(folders[kind])
    for place in (0, -1):
        group = found.groups[place]
        step = quantize("int3:g32", targets=[f"re:{p}" for p in group.patterns])
        compress(checkpoint, step, tmp_path / str(place))
        there = compare(load(tmp_path / str(place)), original, WINDOWS)
        assert group.option("int3:g32").window_kl == pytest.approx(there.window_kl, rel=1e-5)
        assert estimate(found, group, "int3:g32").se == pytest.approx(there.kl.se, rel=1e-5)


def test_a_tied_head(tmp_path):
    folder = common.checkpoint(tmp_path / "tied", "llama", torch.float32, tied=True)
    found = sensitivity(folder, ["int3:g32"], calibration=READ)
    group = found.worst("int3:g32")[0]
    compress(folder, quantize("int3:g32", targets=[f"re:{p}" for p in group.patterns]), tmp_path / "out")
    there = compare(load(tmp_path / "out"), load(folder), WINDOWS)
    assert found.kl(group, "int3:g32") == pytest.approx(there.kl.value, rel=1e-5)


def test_groups(folders, llama):
    assert [len(llama.groups), llama.groups[0].block, llama.groups[-1].block] == [14, 0, 1]
    fused = {g.role: g.fused.removeprefix("model.layers.0.") for g in llama.groups if g.block == 0}
    qkv, both = "self_attn.q_proj/k_proj/v_proj", "mlp.gate_proj/up_proj"
    assert fused == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), qkv),
        **dict.fromkeys(("gate_proj", "up_proj"), both),
        "o_proj": "",
        "down_proj": "",
    }
    together = sensitivity(folders["llama"], FORMATS, calibration=READ, groups="fused")
    assert {g.name.removeprefix("model.layers.0.") for g in together.groups if g.block == 0} == {
        qkv,
        both,
        "self_attn.o_proj",
        "mlp.down_proj",
    }
    roles = sensitivity(folders["llama"], FORMATS, calibration=READ, groups="role")
    assert {g.fused for g in roles.groups} == {"", f"model.layers.*.{qkv}", f"model.layers.*.{both}"}
    experts = sensitivity(folders["qwen3_moe"], FORMATS, calibration=READ)
    shared = [g for g in experts.groups if g.fused.endswith("layers.0.mlp.experts")]
    assert [(g.tensors, g.name.rpartition(".")[2]) for g in shared] == [
        (4, f"{part}_proj") for part in ("down", "gate", "up")
    ]
    with pytest.raises(ValueError, match="groups='tensor': choose 'layer', 'fused', 'block', 'role'"):
        sensitivity(folders["llama"], FORMATS, calibration=READ, groups="tensor")


def test_what_changes_nothing_loses_nothing(folders):
    found = sensitivity(folders["llama"], ["fp32", "int4:g32", "keep"], calibration=READ)
    for group in found.groups:
        assert group.option("fp32").window_kl == group.option("keep").window_kl == (0.0, 0.0, 0.0)
        assert found.kl(group, "int4:g32") > 0
        assert found.bits(group, "keep") == found.bits(group, "fp32") == 32
        assert found.bits(group, "int4:g32") == 4.5


def test_memory_changes_no_figure(folders, llama):
    told = []
    tight = sensitivity(
        folders["llama"],
        FORMATS,
        calibration=READ,
        memory=1,
        progress=lambda done, total, what: told.append((done, total)),
    )
    assert tight == llama
    assert told[-1] == (42, 42)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_killed_run_goes_on(folders, llama, tmp_path):
    path = tmp_path / "unfinished" / "s.jsonl"
    ran = []

    def stop(done, total, what):
        ran.append((done, total))
        if done > limit:
            raise KeyboardInterrupt

    limit = 28
    with pytest.raises(KeyboardInterrupt):
        sensitivity(folders["llama"], FORMATS, calibration=READ, resume=path, memory=1, progress=stop)
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 7
    path.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    limit = 10**9
    ran.clear()
    assert sensitivity(folders["llama"], FORMATS, calibration=READ, resume=path, progress=stop) == llama
    assert ran[0][1] == 7 * 2 + 2 * 2
    assert len(path.read_text().splitlines()) == 1 + 14
    ran.clear()
    assert sensitivity(folders["llama"], FORMATS, calibration=READ, resume=path, progress=stop) == llama
    assert not ran
    for changes in ({"formats": ["int4:g32"]}, {"calibration": calibration(IDS[:1])}, {"groups": "fused"}):
        with pytest.raises(ValueError, match="is of another model, text or choice of formats: delete it"):
            sensitivity(folders["llama"], **{"formats": FORMATS, "calibration": READ, "resume": path, **changes})
    (tmp_path / "mine.txt").write_text("dear diary")
    with pytest.raises(ValueError, match="no file of an unfinished run"):
        sensitivity(folders["llama"], FORMATS, calibration=READ, resume=tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "dear diary"


def test_what_cannot_be_measured(folders, tmp_path):
    source = folders["llama"]
    for options, message in (
        ({"formats": []}, "no formats to measure"),
        ({"formats": ["keep"]}, "no formats to measure"),
        ({"formats": ["int4:g32"], "calibration": calibration([[5]])}, "window 0 has 1 token"),
        (
            {"formats": ["int4:g32"], "targets": ["linear", "lm_head"]},
            "lm_head.weight lies outside of the decoder blocks",
        ),
        ({"formats": ["int4:g32"], "ignore": ["nobody"]}, "matches no module"),
        ({"formats": ["int4:g60"], "ragged": "error"}, "do not divide"),
    ):
        with pytest.raises(ValueError, match=message):
            sensitivity(source, **{"calibration": READ, **options})
    tensors = common.weights("llama", torch.float32)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    broken = common.checkpoint(tmp_path / "broken", "llama", torch.float32, tensors=tensors)
    with pytest.raises(ValueError, match="NaN or infinity"):
        sensitivity(broken, FORMATS, calibration=READ)
    compress(source, quantize("int8:channel"), tmp_path / "done")
    with pytest.raises(ValueError, match="quantized already"):
        sensitivity(tmp_path / "done", FORMATS, calibration=READ)


def test_an_unknown_family_is_not_fused(folders, monkeypatch):
    from halfulp.compress.mixed import _groups

    def unknown(checkpoint):
        raise ValueError("the structure of model_type 'new' is not known")

    monkeypatch.setattr(_groups, "graph_of", unknown)
    found = sensitivity(folders["llama"], ["int3:g32"], calibration=READ)
    assert not any(g.fused for g in found.groups)
    assert "which layers runtimes fuse is not known" in found.notes[0]


def test_from_figures_to_a_model(folders, llama, tmp_path):
    (tmp_path / "s.json").write_text(llama.to_json())
    assert Sensitivity.read(tmp_path / "s.json") == llama
    step = mixed(tmp_path / "s.json", budget_bits=6, by="nearest")
    assert step.allocation == allocate(llama, budget_bits=6)
    compress(folders["llama"], step, tmp_path / "out")
    kl = compare(load(tmp_path / "out"), load(folders["llama"]), WINDOWS).kl.value
    everything = sum(llama.kl(g, "int3:g32") for g in llama.groups)
    assert 0 < kl < everything


def points(svg):
    root = ET.fromstring(svg)
    circles = [c for c in root.iter("{http://www.w3.org/2000/svg}circle") if c.find("{*}title") is not None]
    box = [float(x) for x in root.get("viewBox").split()]
    return circles, box


@pytest.mark.parametrize("groups", ["layer", "fused", "block", "role"])
def test_pictures(folders, groups):
    found = sensitivity(folders["llama"], FORMATS, calibration=READ, groups=groups)
    svg = sensitivity_picture(found)
    circles, _ = points(svg)
    assert len(circles) == 2 * len(found.groups)
    told = " ".join(c.find("{*}title").text for c in circles)
    assert all(g.name in told for g in found.groups)
    assert not re.search(r"\b(nan|inf)\b", svg)


def test_odd_pictures(llama, tmp_path):
    def changed(kl):
        groups = [replace(g, options=tuple(replace(o, window_kl=kl) for o in g.options)) for g in llama.groups]
        return replace(llama, groups=tuple(groups))

    assert "no format changes" in sensitivity_picture(changed((0.0, 0.0, 0.0)))
    assert len(points(sensitivity_picture(changed((0.0, 0.0, 9.0))))[0]) == 28
    alone = replace(changed((1.0,)), window_tokens=(6,), groups=changed((1.0,)).groups[:1])
    assert len(points(sensitivity_picture(alone))[0]) == 2
    odd = replace(llama, source="<&>")
    ET.parse(write_sensitivity_picture(odd, tmp_path / "a.svg"))
    assert "<svg" in write_sensitivity_picture(odd, tmp_path / "a.html").read_text()
    with pytest.raises(ValueError, match=r"\.svg or \.html"):
        write_sensitivity_picture(odd, tmp_path / "a.png")


def test_lines_of_json(llama):
    text = llama.to_json()
    assert len(text.splitlines()) == len(llama.groups) + 2
    assert json.loads(text)["formats"] == FORMATS
