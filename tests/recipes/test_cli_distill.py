"""halfulp compress with shrink, then halfulp distill: from a model to a smaller one that has learned."""

import json

import pytest
import torch
from typer.testing import CliRunner

from halfulp.compress import load
from halfulp.recipes._cli import app

from .common import tiny_llama

RECIPE = """
name: smaller
calibration: {text: TEXT, sequences: 4, length: 16}
steps:
  - shrink: {channels: 0.5, layers: 1, by: activations, multiple_of: 8}
  - prune: {pattern: "2:4"}
"""


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    tiny_llama(folder / "model")
    (folder / "text.txt").write_text(" ".join(f"w{(i * i) % 61}" for i in range(1200)))
    (folder / "recipe.yaml").write_text(RECIPE.replace("TEXT", str(folder / "text.txt")))
    done = invoke(
        "compress", folder / "model", "-r", folder / "recipe.yaml", "-o", folder / "small", "--runs", folder / "runs"
    )
    assert done.exit_code == 0, done.output
    return folder


def test_a_shrunken_model_learns_and_keeps_its_zeros(folder):
    config = json.loads((folder / "small" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (1, 64)
    options = [
        "--teacher",
        folder / "model",
        "--text",
        folder / "text.txt",
        "--steps",
        30,
        "--window",
        16,
        "--held-out",
        4,
    ]
    done = invoke("distill", folder / "small", *options, "-o", folder / "learned", "--learning-rate", 0.01)
    assert done.exit_code == 0, done.output
    assert "30 steps" in done.output
    assert "pruned tensors kept their zeros" in done.output
    history = [json.loads(line) for line in (folder / "learned" / "distill.jsonl").read_text().splitlines()]
    assert history[-1]["loss"] < history[0]["loss"]
    before, after = (dict(load(folder / name).named_parameters()) for name in ("small", "learned"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(before[name], after[name])
    assert not after[name][before[name] == 0].any()
    assert not (folder / "learned.training").exists()


def test_what_cannot_be_is_said_before_anything_runs(folder):
    with pytest.raises(FileExistsError, match="exists"):
        invoke("distill", folder / "small", "--teacher", folder / "model", "-o", folder / "small")
    with pytest.raises(ValueError, match=r"has \d+ windows of 4096 tokens"):
        invoke(
            "distill",
            folder / "small",
            "--teacher",
            folder / "model",
            "--text",
            folder / "text.txt",
            "--window",
            4096,
            "-o",
            folder / "x",
        )
