"""The run record: round trips, refusals with the file and the field, atomic writing."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from halfulp.eval import _record
from halfulp.eval._record import (
    Accuracy,
    Estimate,
    ModelId,
    Record,
    TensorResult,
    environment,
    peak_rss_bytes,
    read_records,
    write_record,
)


def record(**changes: Any) -> Record:
    fields: dict[str, Any] = {
        "kind": "compress",
        "name": "out",
        "created": "2026-01-31T12:00:00Z",
        "command": ["halfulp", "compress", "a model", "-o", "out"],
        "versions": {"python": "3.11.9"},
        "machine": {"cpu": "a CPU", "cores": 2},
        "seed": 0,
        "model": ModelId(source="a model", parameters=10),
        "tensors": [TensorResult(name="w", shape=[2, 5], action="int4:g128", bits_per_weight=4.1, relative_error=0.1)],
    }
    return Record(**(fields | changes))


def accuracy(perplexity: float) -> Accuracy:
    return Accuracy(
        text="t",
        text_sha256="0",
        tokens=9,
        windows=1,
        window=9,
        stride=9,
        bos="none",
        perplexity=Estimate(value=perplexity, se=math.nan),
    )


def test_round_trip_keeps_everything_and_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    write_record(record(notes=["ü – ‖w‖"]), tmp_path / "deep" / "a.json")
    write_record(record(notes=["ü – ‖w‖"]), tmp_path / "b.json")
    assert read_records([tmp_path / "deep" / "a.json"]) == [record(notes=["ü – ‖w‖"])]
    assert (tmp_path / "deep" / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_infinite_and_nan_results_survive_as_valid_json(tmp_path: Path) -> None:
    write_record(record(accuracy=accuracy(math.inf)), tmp_path / "a.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    back = read_records([tmp_path])[0].accuracy
    assert back is not None
    assert back.perplexity.value == math.inf
    assert back.perplexity.se is not None
    assert math.isnan(back.perplexity.se)


def test_a_folder_is_searched_in_depth_and_its_other_json_is_passed_over(tmp_path: Path) -> None:
    for name in ("b/halfulp.json", "a/halfulp.json", "a/.hidden.json", ".cache/c.json"):
        write_record(record(name=name), tmp_path / name)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "list.json").write_text('["halfulp_record"]')
    (tmp_path / "nested.json").write_text('{"a": {"halfulp_record": 1}}')
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "broken.json").write_text("{")
    assert [r.name for r in read_records([tmp_path])] == ["a/halfulp.json", "b/halfulp.json"]
    twice = [tmp_path / "b/halfulp.json", tmp_path, tmp_path / "a" / ".." / "b/halfulp.json"]
    assert [r.name for r in read_records(twice)] == ["b/halfulp.json", "a/halfulp.json"]
    assert len(read_records(tmp_path)) == 2  # type: ignore[arg-type]  # one path is forgiven


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", 'not a halfulp record: it has no "halfulp_record" key'),
        ("[1]", "not a halfulp record"),
        ("", "not readable as JSON"),
        ("\xff\xfe", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"halfulp_record": 1, "kind": "compress"', "not readable as JSON"),
        ('{"halfulp_record": 2}', "record of version 2, and this halfulp reads version 1"),
        ('{"halfulp_record": 1}', r"kind: field required \(and \d+ more\)"),
    ],
)
def test_a_file_named_directly_must_be_a_record(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        read_records([file])
    assert "bad.json" in str(caught.value)


def change(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        data = data[int(part)] if part.isdigit() else data[part]  # type: ignore[call-overload]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "guess"),
        ("created", "yesterday"),
        ("created", "2026-01-31T12:00:00"),
        ("created", "2026-01-31T12:00:00+02:00"),
        ("tensors.0.relative_error", "much"),
        ("tensors.0.shape", "2x5"),
        ("model.size", 3),
        ("cwd", "/home/me"),
    ],
)
def test_a_malformed_field_is_named_even_in_a_folder(tmp_path: Path, path: str, value: Any) -> None:
    data = json.loads(record().model_dump_json())
    change(data, path, value)
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=path.replace(".", r"\.")) as caught:
        read_records([tmp_path])
    assert "bad.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_found_and_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no halfulp record in"):
        read_records([tmp_path])
    with pytest.raises(ValueError, match="an empty list"):
        read_records([])
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*absent"):
        read_records([tmp_path / "absent"])


def test_records_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        record().name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        record(colour="red")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    write_record(record(name="old"), file)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_record.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_record(record(name="new"), file)
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert read_records([file])[0].name == "old"


def test_a_folder_as_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="add a file name"):
        write_record(record(), tmp_path)


def test_environment_names_versions_and_the_machine_but_not_its_owner() -> None:
    versions, machine = environment()
    assert {"python", "torch", "numpy", "halfulp"} <= versions.keys()
    assert isinstance(machine["cores"], int)
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert os.uname().nodename not in map(str, machine.values())
    assert record(versions=versions, machine=machine).machine == machine


def test_peak_memory_is_of_this_process_and_grows_with_it() -> None:
    code = (
        "from halfulp.eval._record import peak_rss_bytes as peak\n"
        "before = peak(); held = bytearray(b'x') * 400_000_000; print(peak() - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 200e6 < int(grown.stdout) < 500e6
    assert (peak_rss_bytes() or 0) > 10e6
