"""Texts and windows: what is read, what is said where it cannot be, and which token is scored when."""

import hashlib
import platform
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from halfulp.compress import text


def sha(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def test_embedded_text_is_prose_with_its_python_and_hash() -> None:
    got = text()
    assert len(got.content) > 100_000
    assert "The try statement" in got.content or 'The "try" statement' in got.content
    assert platform.python_version() in got.source
    assert got.sha256 == sha(got.content)
    assert got == text("embedded")


def test_a_file_is_taken_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes("één\r\ntwee".encode())
    for source in (str(path), path):
        got = text(source)  # type: ignore[arg-type]
        assert got.content == "één\r\ntwee"
        assert got.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert got.source == str(path)


def test_bad_files_are_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"empty\.txt holds no text"):
        text(str(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8: byte 0xe9 at offset 3; convert"):
        text(str(tmp_path / "latin.txt"))
    with pytest.raises(IsADirectoryError, match="is a folder"):
        text(str(tmp_path))
    for missing in ("../gone", "gone.txt", "/gone/away"):
        with pytest.raises(FileNotFoundError, match=f"no file {missing}; give an existing"):
            text(missing)
    with pytest.raises(FileNotFoundError, match="no file gone; give"):
        text("./gone")
    for nothing in ("", "  ", 3, None):
        with pytest.raises(ValueError, match="text source"):
            text(nothing)  # type: ignore[arg-type]


class Rows(dict[str, list[Any]]):
    @property
    def column_names(self) -> list[str]:
        return list(self)


def hub(monkeypatch: pytest.MonkeyPatch, answer: Rows | Exception) -> list[Any]:
    """Put a `datasets` in place that answers so, and return the calls it gets."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Rows:
        calls.append((*args, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


def test_data_set_rows_are_joined_by_a_blank_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = hub(monkeypatch, Rows(text=["a", "", "b"], title=["x", "y", "z"]))
    got = text("wikitext2")
    assert got.content == "a\n\n\n\nb"
    assert got.source == "Salesforce/wikitext:wikitext-2-raw-v1 test/text"
    assert text("org/name", split="train", column="title").content == "x\n\ny\n\nz"
    assert calls == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", {"split": "test"}),
        ("org/name", None, {"split": "train"}),
    ]


def test_what_a_data_set_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, Rows(text=["a", 3], title=["x", "y"]))
    with pytest.raises(ValueError, match="has no column 'body'; it has text, title"):
        text("org/name", column="body")
    with pytest.raises(ValueError, match="holds int and str, expected strings"):
        text("org/name")
    hub(monkeypatch, Rows(text=[]))
    with pytest.raises(ValueError, match="holds no text"):
        text("org/name")
    hub(monkeypatch, ValueError('Unknown split "tset". Should be one of [...]'))
    with pytest.raises(ValueError, match=r"'org/name' with split 'tset' cannot be read: Unknown split"):
        text("org/name", split="tset")


def test_offline_and_missing_package_offer_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (ConnectionError("Couldn't reach it on the Hub\nmore"), RuntimeError("HTTP 500\nmore")):
        hub(monkeypatch, error)
        with pytest.raises(ConnectionError, match="could not be fetched") as caught:
            text("wikitext2")
        assert "\n" not in str(caught.value)
        assert 'a local file or "embedded" needs no network' in str(caught.value)
    hub(monkeypatch, FileNotFoundError("Dataset 'no/such' doesn't exist"))
    with pytest.raises(FileNotFoundError, match="neither a file here nor a data set"):
        text("no/such")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'halfulp\[eval\]'"):
        text("wikitext2")
