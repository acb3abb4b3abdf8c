"""The digits example: it learns in every arm, and draws its curves."""

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "digits.py"


@pytest.mark.slow
def test_digits_are_learnt_in_every_arm(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("digits", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(
        sys, "argv", ["digits.py", "--epochs", "6", "--seeds", "2", "--out", str(tmp_path / "digits.svg")]
    )
    example.main()
    printed = capsys.readouterr().out
    accuracies = [float(v) for v in re.findall(r"    ([\d.]+) \+- [\d.]+ %", printed)]
    assert len(accuracies) == len(example.ARMS)
    assert min(accuracies) > 85
    root = ElementTree.parse(tmp_path / "digits.svg").getroot()
    paths = [node for node in root.iter() if node.tag.endswith("path")]
    assert len(paths) == 4 * len(example.ARMS)  # a line and a band in each of two panels
    assert not re.search("nan|inf", (tmp_path / "digits.svg").read_text())
