"""Where the words come from that a model is calibrated or scored on."""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIKITEXT2 = "Salesforce/wikitext:wikitext-2-raw-v1"
_INSTEAD = 'a local file or "embedded" needs no network'


@dataclass(frozen=True)
class Text:
    """A text, where it came from, and the SHA-256 of its UTF-8 bytes."""

    source: str
    content: str
    sha256: str


def text(source: str = "embedded", *, split: str = "test", column: str = "text") -> Text:
    r"""Text to calibrate or score on.

    >>> text().content[:22]
    'The "assert" statement'

    source: one of
    - "embedded": the topics of the standard library's `pydoc_data.topics`, in sorted order, joined by a blank
      line: about 0.5 MB of English technical prose that needs no download. It differs between versions of
      Python, so the version is in `Text.source`, and the hash in `Text.sha256`;
    - the path of a UTF-8 file, taken byte for byte: its `sha256` is that of the file;
    - "wikitext2" (Salesforce/wikitext:wikitext-2-raw-v1), or any id of a data set on the Hugging Face Hub,
      with ":config" after it where it has several: the rows of `column` in `split`, joined by "\n\n".
    `split` and `column` matter to data sets only.

    Raises FileNotFoundError for what looks like a path and is none, or for an unknown data set; ValueError
    for an empty or undecodable text, an unknown config, split or column; ModuleNotFoundError without the
    extra `halfulp[eval]`; ConnectionError where the Hub cannot be reached.
    """
    if not isinstance(source, (str, Path)) or not str(source).strip():
        raise ValueError(f'text source {source!r}: expected "embedded", a path, or the id of a data set')
    name = str(source)
    if name == "embedded":
        label, content = f"pydoc_data.topics of Python {platform.python_version()}", _embedded()
    elif isinstance(source, Path) or os.path.exists(Path(name).expanduser()) or _like_path(name):
        label, content = name, _file(Path(name).expanduser())
    else:
        name = WIKITEXT2 if name == "wikitext2" else name
        label, content = f"{name} {split}/{column}", _dataset(name, split, column)
    if not content.strip():
        raise ValueError(f"{label} holds no text; give a source with words in it")
    return Text(label, content, hashlib.sha256(content.encode()).hexdigest())


def _like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or Path(name).suffix in {".txt", ".md", ".json", ".jsonl"}


def _embedded() -> str:
    try:
        from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise FileNotFoundError(
            "this Python was built without pydoc_data.topics, the embedded text; give a local file"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _file(path: Path) -> str:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give one UTF-8 text file in it")
    if not path.exists():
        raise FileNotFoundError(
            f'no file {path}; give an existing UTF-8 file, "embedded", "wikitext2" or the id of a data set'
        )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}; "
            "convert it, for instance with iconv -t utf-8"
        ) from None


def _dataset(name: str, split: str, column: str) -> str:
    try:
        import datasets
    except ImportError:
        raise ModuleNotFoundError(
            f"{name!r} is not a file here, and as the id of a data set it needs the package `datasets`: "
            f"pip install 'halfulp[eval]', or {_INSTEAD}"
        ) from None
    place, _, config = name.partition(":")
    try:
        rows: Any = datasets.load_dataset(place, config or None, split=split)
    except FileNotFoundError as error:  # datasets' own DatasetNotFoundError is one
        raise FileNotFoundError(
            f"{name!r} is neither a file here nor a data set that can be read on the Hugging Face Hub "
            f"({_line(error)}); {_INSTEAD}"
        ) from None
    except (ValueError, KeyError) as error:
        raise ValueError(f"the data set {name!r} with split {split!r} cannot be read: {_line(error)}") from None
    except Exception as error:  # OSError of datasets, or whatever its HTTP client of the day raises
        raise ConnectionError(
            f"{name!r} is not a file here, and as a data set it could not be fetched "
            f"({type(error).__name__}: {_line(error)}); {_INSTEAD}"
        ) from error
    names = list(rows.column_names)
    if column not in names:
        raise ValueError(f"the data set {name!r} has no column {column!r}; it has {', '.join(names)}")
    cells = list(rows[column])
    if not all(isinstance(cell, str) for cell in cells):
        kinds = sorted({type(cell).__name__ for cell in cells})
        raise ValueError(
            f"column {column!r} of {name!r} holds {' and '.join(kinds)}, expected strings only; "
            f"its columns are {', '.join(names)}"
        )
    return "\n\n".join(cells)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
