"""The command line as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from .common import tiny_llama

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


def halfulp(*args, cwd=None):
    command = [sys.executable, "-m", "halfulp.recipes._cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def refused(result, *words):
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_from_a_checkpoint_to_a_report(model, tmp_path):
    runs = tmp_path / "runs"
    for recipe in ("w8a8-int8", "w4a16-g128"):
        made = halfulp("compress", model, "-r", recipe, "-o", tmp_path / recipe, "--runs", runs)
        assert made.returncode == 0, made.stderr
        assert "bits per compressed weight" in made.stdout
    assert "note: " in made.stdout  # 128 does not divide 64
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 20)
    options = ["--text", text, "--window", 64, "--windows", 4, "--prompt", 8, "--new", 2, "--repeats", 3]
    scored = halfulp(
        "score", tmp_path / "w8a8-int8", tmp_path / "w4a16-g128", "--baseline", model, *options, "--runs", runs
    )
    assert scored.returncode == 0, scored.stderr
    assert "KL" in scored.stdout
    assert "dequantized to float32, eager torch" in scored.stdout
    record = json.loads((runs / "w4a16-g128.score.json").read_text())
    assert record["recipe"]["name"] == "w4a16-g128"
    assert record["accuracy"]["tokens"] == 4 * 63
    assert record["accuracy"]["kl"]["value"] > 0
    assert record["size"]["bits_per_weight"] > 4
    assert {t["action"] for t in record["tensors"]} == {"keep", "int4:g64", "int4:g128"}
    page = tmp_path / "report.html"
    reported = halfulp("report", runs, "-o", page)
    assert reported.returncode == 0, reported.stderr
    assert "w4a16-g128" in page.read_text()
    # a score of a damaged int4 model is worse than one of int8
    kl = {
        r: json.loads((runs / f"{r}.score.json").read_text())["accuracy"]["kl"]["value"]
        for r in ("w8a8-int8", "w4a16-g128")
    }
    assert kl["w4a16-g128"] > kl["w8a8-int8"] > 0


def test_the_plan_writes_nothing(model, tmp_path):
    shown = halfulp("compress", model, "-r", "mxfp4", "--plan", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "model.layers.1.mlp.down_proj.weight" in shown.stdout
    assert "mxfp4:rule=even" in shown.stdout
    assert list(tmp_path.iterdir()) == []


def test_bad_input_gets_one_sentence_and_leaves_nothing(model, tmp_path):
    out = tmp_path / "out"

    def compress(source, recipe="mxfp4", *more):
        return halfulp("compress", source, "-r", recipe, "-o", out, "--runs", tmp_path / "runs", *more)

    refused(compress(tmp_path / "nowhere"), "nowhere")
    refused(compress(model, "mxfp5"), "mxfp5", "mxfp4")
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\nsteps:\n  - quantize: {weights: int4:g64, bits: 4}\n")
    refused(compress(model, bad), "bad.yaml", "steps.0.quantize.bits", "weights")
    bad.write_text("name: x\nsteps:\n  - quantize: {weights: 'int4:g64', ignore: [lm_haed]}\n")
    refused(compress(model, bad), "lm_haed", "lm_head")
    refused(compress(model, "mxfp4", "--layout", "gguf"), "gguf", "compressed-tensors")
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "config.json").write_bytes((model / "config.json").read_bytes())
    data = (model / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-100])
    refused(compress(cut), "model.safetensors", str(len(data)), str(len(data) - 100))
    whole = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**whole, name: whole[name].to(torch.int32)}, cut / "model.safetensors", metadata={"format": "pt"})
    refused(compress(cut), name, "I32")
    (cut / "model.safetensors").rename(cut / "model-00001-of-00002.safetensors")
    index = {"weight_map": {n: "model-00002-of-00002.safetensors" for n in whole}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(compress(cut), "model-00002-of-00002.safetensors")
    assert not out.exists()
    assert not (tmp_path / "runs").exists()
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    refused(compress(model), str(out), "exists")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    refused(halfulp("report", tmp_path / "none", "-o", tmp_path / "r.html"), "none")
    refused(halfulp("score", model, "--windows", 10**6, "--runs", tmp_path / "runs"), "tokens")
    assert not (tmp_path / "r.html").exists()


def test_work_is_not_lost_to_a_slip(model, tmp_path):
    """Records that would overwrite each other, a place that is no directory, an output that is not ours."""
    (tmp_path / "file").write_text("x")
    refused(halfulp("compress", model, "-r", "fp8", "-o", tmp_path / "o", "--runs", tmp_path / "file"), "no directory")
    refused(halfulp("score", model, model, "--runs", tmp_path / "runs"), "two of the models are called tiny")
    refused(halfulp("report", tmp_path, "-o", tmp_path / "file.json"), "no halfulp record")
    partial = tmp_path / "o.partial"
    partial.mkdir()
    (partial / "precious.txt").write_text("x")
    refused(
        halfulp("compress", model, "-r", "fp8", "-o", tmp_path / "o"),
        "no unfinished run of this: delete it or pass another -o",
    )
    assert [path.name for path in partial.iterdir()] == ["precious.txt"]
    assert not (tmp_path / "o").exists()


def test_a_format_that_ruins_the_model_is_remarked_on(model, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\nsteps:\n  - quantize: {weights: int4}\n")
    made = halfulp("compress", model, "-r", recipe, "-o", tmp_path / "o", "--runs", tmp_path / "runs")
    assert made.returncode == 0, made.stderr
    assert "14 tensors lost more than half of their norm" in made.stdout
    assert "a format without a scale" in made.stdout


def test_formats_and_recipes_are_shown():
    listed = halfulp("formats")
    assert listed.returncode == 0, listed.stderr
    assert "nvfp4" in listed.stdout
    shown = halfulp("formats", "e2m1")
    assert "e2m1: floating point, 4 bits" in shown.stdout
    refused(halfulp("formats", "e4m3fm"), "e4m3fm", "e4m3fn")
    assert "sparse-2:4" in halfulp("recipes").stdout
    assert json.loads(halfulp("recipes", "--schema").stdout)["title"] == "Recipe"


def test_the_core_imports_fast_and_alone():
    """Neither jax nor transformers nor torch until used, and under a second."""
    code = (
        "import sys; import halfulp as hu; from halfulp import numerics; import numpy as np;"
        "hu.cast(np.float32([1.5]), 'e4m3fn');"
        "print(sorted({'jax','transformers','torch','datasets','gguf'} & set(sys.modules)))"
    )
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
        best = min(best, time.perf_counter() - start)
        assert run.stdout.strip() == "[]", run.stderr
    assert best < 1
