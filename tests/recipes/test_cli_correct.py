"""halfulp compress, then correct, then score: the adapter's folder is a model like any other."""

import json

import pytest
from typer.testing import CliRunner

from halfulp.recipes._cli import app

from .common import tiny_llama


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)


RECIPES = {
    "plain": "name: plain\nsteps: [{quantize: {weights: 'int3:g32'}}]\n",
    "rotated": "name: rotated\nsteps: [{rotate: {residual: null}}, {quantize: {weights: 'int3:g32'}}]\n",
    "smooth": (
        "name: smooth\ncalibration: {text: TEXT, sequences: 2, length: 16}\n"
        "steps: [{smooth: {}}, {quantize: {weights: 'int3:g32'}}]\n"
    ),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("correct")
    tiny_llama(home / "model")
    (home / "text.txt").write_text(" ".join(f"w{(i * i) % 61}" for i in range(400)))
    for name, text in RECIPES.items():
        (home / f"{name}.yaml").write_text(text.replace("TEXT", str(home / "text.txt")))
        done = invoke(
            "compress", home / "model", "-r", home / f"{name}.yaml", "-o", home / name, "--runs", home / "runs"
        )
        assert done.exit_code == 0, done.output
    return home


@pytest.mark.parametrize("name", RECIPES)
def test_any_recipe_is_corrected_and_what_it_rewrote_is_rewritten_again(home, name):
    done = invoke("correct", home / name, "--source", home / "model", "-o", home / f"{name}-a", "--rank", 4)
    assert done.exit_code == 0, done.output
    assert "rank 4 beside 14 layers" in done.output
    assert "relative error of weights" in done.output
    layers = json.loads((home / f"{name}-a" / "halfulp_adapter.json").read_text())["layers"]
    assert all(layer["after"] < layer["before"] < 0.5 for layer in layers.values())


def test_a_score_counts_the_adapter_and_is_better(home):
    adapter = home / "calibrated"
    options = ["--calibration", home / "text.txt", "--sequences", 8, "--length", 32, "--rank", 24]
    done = invoke("correct", home / "plain", "--source", home / "model", "-o", adapter, *options)
    assert "relative error of outputs" in done.output
    options = ["--baseline", home / "model", "--text", home / "text.txt", "--window", 64, "--windows", 4]
    done = invoke("score", home / "plain", adapter, *options, "--no-latency", "--runs", home / "runs")
    assert done.exit_code == 0, done.output
    plain, with_it = (json.loads((home / "runs" / f"{n}.score.json").read_text()) for n in ("plain", "calibrated"))
    assert with_it["accuracy"]["kl"]["value"] < 0.5 * plain["accuracy"]["kl"]["value"]
    told = json.loads((adapter / "halfulp_adapter.json").read_text())
    assert with_it["size"]["weight_bytes"] - plain["size"]["weight_bytes"] == told["bytes"]
    more = with_it["size"]["bits_per_weight"] - plain["size"]["bits_per_weight"]
    assert more == pytest.approx(told["bits_per_weight"]["adapter"])


def test_what_cannot_be_is_said_before_anything_runs(home):
    with pytest.raises(FileExistsError, match="exists"):
        invoke("correct", home / "plain", "--source", home / "model", "-o", home / "plain")
    with pytest.raises(ValueError, match="no output of halfulp"):
        invoke("correct", home / "model", "--source", home / "model", "-o", home / "x")
