"""`halfulp sensitivity`: a table, a picture and a file that mixed precision takes."""

import xml.etree.ElementTree as ET
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from halfulp.compress.mixed import Sensitivity, mixed
from halfulp.recipes._sensitivity import sensitivity

pytest.importorskip("transformers")

# the checkpoints of the neighbouring folder, which is no package seen from here
_spec = spec_from_file_location("checkpoints", Path(__file__).parents[1] / "compress" / "common.py")
common = module_from_spec(_spec)
_spec.loader.exec_module(common)


@pytest.fixture(scope="module")
def app():
    app = typer.Typer()
    app.command()(sensitivity)
    return app


@pytest.fixture
def run(app, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    common.checkpoint(tmp_path / "model", "llama", torch.float32)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i % 90}" for i in range(300)))

    def call(*args):
        return CliRunner().invoke(app, ["model", "--text", "text.txt", "--windows", "2", "--window", "8", *args])

    return call


def test_table_picture_and_file(run, tmp_path):
    done = run("-f", "int3:g32,int8:channel", "-o", "s.json", "--rows", "3", "--bits", "4", "--bits", "8.5")
    assert done.exit_code == 0, done.output
    found = Sensitivity.read(tmp_path / "s.json")
    assert found.formats == ("int3:g32", "int8:channel")
    assert [group.name in done.output for group in found.worst("int3:g32")] == [True] * 3 + [False] * 11
    assert "and 11 more: --rows 0 prints all" in done.output
    assert "14 tokens in 2 windows of 2 sequences of at most 8 tokens of text.txt" in " ".join(done.output.split())
    assert "at most 4 bits per weight: 3." in done.output
    assert "at most 8.5 bits per weight" in done.output
    ET.parse(tmp_path / "s.svg")
    assert not list(tmp_path.glob("*partial"))
    assert mixed("s.json", budget_bits=4).allocation.bits <= 4


def test_all_rows_and_keep(run):
    done = run("-f", "keep,int3:g32", "--rows", "0", "--ignore", "*.mlp.*", "--groups", "fused")
    assert done.exit_code == 0, done.output
    assert done.output.count("q_proj/k_proj/v_proj") == 2
    assert "more:" not in done.output


def test_mistakes_are_told_before_the_work(run, tmp_path):
    for args, message in (
        (["-o", "s.yaml"], "ends in .json"),
        (["-f", ""], "no formats to measure"),
        (["-f", "int4:g32", "--groups", "x"], "choose 'layer'"),
    ):
        done = run(*args)
        assert isinstance(done.exception, ValueError)
        assert message in str(done.exception)
    assert not (tmp_path / "s.json").exists()
