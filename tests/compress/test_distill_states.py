"""Runs that are killed, torn, finished, or somebody else's; and the way back to a checkpoint."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from halfulp.compress import open_checkpoint
from halfulp.compress._load import load
from halfulp.compress.distill import (
    Objective,
    Quantization,
    Settings,
    distill,
    save_student,
)
from halfulp.compress.shrink import shrink

from . import common
from .test_distill import equal, tiny, weights, windows

transformers = pytest.importorskip("transformers")

RUN = """
import os, signal, sys, warnings
warnings.filterwarnings("ignore", message="numpy.ndarray size changed")
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from halfulp.compress.distill import *
from tests.compress.test_distill import tiny, windows
from safetensors.torch import save_file
student = tiny(0, attention_dropout=0.2)
quantization = Quantization("int4:g8", activations="int8:token", learned=True)
def progress(now):
    if now.step == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
result = distill(student, tiny(1), windows(5), Settings(12, batch=2, every=2, warmup=2, learning_rate=3e-3),
    out=sys.argv[2], quantization=quantization, progress=progress,
    objective=Objective(features=Features({1: 2}, width="linear")))
save_file({k: v.detach().clone() for k, v in result.student.named_parameters()}, sys.argv[2] + ".safetensors")
"""


def run(out, kill=0):
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    done = subprocess.run(
        [sys.executable, "-c", RUN, root, str(out), str(kill)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    return done


def test_a_killed_run_ends_with_the_same_bits(tmp_path):
    """Killed between states, and right after one; with dropout, learned steps and a projection on their way."""
    whole = run(tmp_path / "whole")
    assert not whole.returncode, whole.stderr
    for kill in (5, 8):
        assert run(tmp_path / "killed", kill).returncode == -signal.SIGKILL
    assert sorted(p.name for p in (tmp_path / "killed").glob("step-*")) == ["step-00000008"]
    done = run(tmp_path / "killed")
    assert not done.returncode, done.stderr
    a, b = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("whole", "killed"))
    assert a == b
    histories = [
        [json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        for name in ("whole", "killed")
    ]
    for one in histories:
        assert [record["step"] for record in one] == list(range(1, 13))
        for record in one:
            record.pop("seconds")
    assert histories[0] == histories[1]
    for name in ("weights.safetensors", "optimizer.safetensors"):
        x, y = ((tmp_path / folder / "step-00000012" / name).read_bytes() for folder in ("whole", "killed"))
        assert x == y


def test_a_finished_run_is_not_done_again(tmp_path):
    first, again = tiny(0), tiny(0)
    distill(first, tiny(1), windows(4), Settings(3), out=tmp_path / "run")
    calls = []
    result = distill(again, tiny(1), windows(4), Settings(3), out=tmp_path / "run", progress=calls.append)
    assert not calls
    assert len(result.history) == 3
    assert equal(weights(first), weights(again))


def test_torn_files_are_passed_over(tmp_path):
    """A state that was being written, a torn line of the history, lines of steps that are to come again."""
    first, again = tiny(0), tiny(0)
    distill(first, tiny(1), windows(4), Settings(6), out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(now):
        if now.step == 5:
            raise Stop

    with pytest.raises(Stop):
        distill(tiny(0), tiny(1), windows(4), Settings(6, every=2), out=tmp_path / "run", progress=stop)
    torn = tmp_path / "run" / "step-00000006.partial"
    torn.mkdir()
    (torn / "weights.safetensors").write_bytes(b"half")
    with open(tmp_path / "run" / "history.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    result = distill(again, tiny(1), windows(4), Settings(6), out=tmp_path / "run")
    assert equal(weights(first), weights(again))
    assert [record["step"] for record in result.history] == list(range(1, 7))


def test_directories_of_others(tmp_path):
    distill(tiny(0), tiny(1), windows(2), Settings(1), out=tmp_path / "run")
    for change, says in [
        ({"settings": Settings(1, learning_rate=1e-3)}, "belongs to another run .settings"),
        ({"data": windows(3)}, "another run .data"),
        ({"student": tiny(2)}, "another run .student"),
        ({"teacher": tiny(2)}, "another run .teacher"),
        ({"objective": Objective("jsd")}, "another run .objective"),
        ({"quantization": Quantization("int8:channel")}, "another run .quantization"),
        ({"optimizer": lambda g: torch.optim.SGD(g, lr=1)}, "another run .optimizer"),
    ]:
        given = {"student": tiny(0), "teacher": tiny(1), "data": windows(2), "settings": Settings(1)} | change
        with pytest.raises(ValueError, match=says):
            distill(**given, out=tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else than a training run"):
        distill(tiny(0), tiny(1), windows(2), Settings(1), out=tmp_path / "other")
    with pytest.raises(ValueError, match="is a file: pass another directory"):
        distill(tiny(0), tiny(1), windows(2), Settings(1), out=tmp_path / "other" / "thesis.tex")


@pytest.mark.parametrize("tied", [False, True])
def test_save_student(tmp_path, tied):
    whole = open_checkpoint(common.checkpoint(tmp_path / "m", "llama", torch.float32, tied=tied))
    small = shrink(channels=64, layers=[1]).rewrite(whole)
    student = load(small)
    distill(student, load(whole), [common.IDS[0]], Settings(2))
    out = save_student(student, tmp_path / "out", small)
    names = {p.name for p in out.iterdir()}
    assert names == {"model.safetensors", "config.json", *(p.name for p in whole.side_files)}
    saved = open_checkpoint(out)
    assert list(saved.tensors) == list(small.tensors)
    assert ("lm_head.weight" in saved.tensors) != tied
    (result,) = common.in_transformers([out], tmp_path)
    torch.testing.assert_close(result["logits"], common.logits_of(student), rtol=0, atol=1e-6)
    assert not result["info"]
    half = save_student(student, tmp_path / "half", small, dtype=torch.bfloat16)
    assert {spec.dtype for spec in open_checkpoint(half).tensors.values()} == {"BF16"}
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    (tmp_path / "late").mkdir()
    os.rename(half, tmp_path / "late.partial")  # killed before the rename
    (tmp_path / "late").rmdir()
    late = save_student(student, tmp_path / "late", small, dtype=torch.bfloat16)
    assert open_checkpoint(late).sha256()
    (tmp_path / "mine.partial").mkdir()
    (tmp_path / "mine.partial" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is no unfinished output of this model: delete it"):
        save_student(student, tmp_path / "mine", small)
    assert (tmp_path / "mine.partial" / "notes.txt").exists()
    with pytest.raises(FileExistsError, match="exists: pass another directory"):
        save_student(student, out, small)
    with pytest.raises(ValueError, match=r"the model lacks model\.layers\.1\.input_layernorm\.weight"):
        save_student(student, tmp_path / "no", whole)
    with pytest.raises(ValueError, match="weights holds odd, of no parameter"):
        save_student(student, tmp_path / "no", small, weights={"odd": torch.ones(1)})


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_save_a_student_with_experts(tmp_path, kind):
    """In memory they are fused, in the checkpoint they are as they were."""
    whole = open_checkpoint(common.checkpoint(tmp_path / "m", kind, torch.float32))
    small = shrink(experts=2, channels=0.5).rewrite(whole)
    student = load(small)
    how = Quantization("int8:channel")
    result = distill(student, load(whole), [common.IDS[0]], Settings(2), quantization=how)
    assert any("experts" in name for name in result.weights)
    out = save_student(student, tmp_path / "out", small)
    again = load(open_checkpoint(out))
    assert torch.equal(common.logits_of(again), common.logits_of(student))
    (foreign,) = common.in_transformers([out], tmp_path)
    assert not foreign["info"]
