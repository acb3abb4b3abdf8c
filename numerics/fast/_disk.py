"""Compiled code on disk, so that only the first process compiles a loop.

numba's own cache numbers the files of a function's variants in an index. Of two processes that compile variants of
one function at the same time, both may take the same number, and a later one runs the code of the other variant; one
that is killed between index and file leaves the index to code of an older source. And what is compiled into a
function from other files does not count. Here each variant has a file of its own, which says what it was made from:
another source, machine or numba is another origin, and such a file counts for nothing. Files appear whole or not at
all; what cannot be read is compiled, what cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import pickle
import sys
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

_DIGEST = hashlib.sha256().digest_size
_HERE = Path(__file__).parent


@cache
def sources(folder: Path) -> str:
    """A digest of the Python files in a folder, and of the compiler's versions."""
    found = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)} ".encode() + content)
    return found.hexdigest()


class LoopFiles:
    """The files of one function's variants, in place of numba's index and its numbered files.

    ``stem``: where they are and how their names begin. ``origin``: what all of them are made from.
    """

    def __init__(self, stem: str, origin: str) -> None:
        self.stem, self.origin = stem, origin

    def _path(self, key: Any) -> str:
        signature, machine, (_, closure) = key
        # not of the code: a variant's new code replaces its old one
        name = hashlib.sha256(repr((signature, machine, closure)).encode()).hexdigest()
        return f"{self.stem}.{name[:24]}.loop"

    def load(self, key: Any) -> Any:
        """What was saved under the key and with the same origin, or None."""
        try:
            content = Path(self._path(key)).read_bytes()
        except OSError:
            return None
        digest, body = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(body).digest() != digest:  # cut short, by a full disk or a crash of the machine
            return None
        origin, saved = pickle.loads(body)
        return pickle.loads(saved) if origin == (self.origin, repr(key)) else None

    def save(self, key: Any, data: Any) -> None:
        """Keep the data; OSError where that is not possible."""
        body = pickle.dumps(((self.origin, repr(key)), dumps(data)))
        path = self._path(key)
        beside = f"{path}.{uuid.uuid4().hex[:16]}"
        try:
            with open(beside, "xb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise


class LoopCache(FunctionCache):
    """numba's cache of a function, over `LoopFiles`. Raises RuntimeError where no folder can be written: neither the
    one beside the function's file nor the user's cache."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        file = Path(inspect.getfile(function))
        origin = " ".join(sources(folder) for folder in (file.parent, _HERE))
        name = f"{file.stem}.{function.__qualname__}".replace("<locals>.", "")
        stem = f"{name}.{sys.implementation.cache_tag}"  # no line number, so that an edit leaves no files behind
        self._cache_file: Any = LoopFiles(os.path.join(self.cache_path, stem), origin)

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        """A folder that can no longer be written costs the file alone."""
        with contextlib.suppress(OSError):
            yield
