"""Compiled loops on disk: found again, never mistaken for each other, and never needed."""

import os
import subprocess
import sys
import textwrap

import numba
import numpy as np
import pytest

from halfulp import numerics as hn
from halfulp.numerics.fast import _disk
from halfulp.numerics.fast._disk import LoopCache, LoopFiles
from halfulp.numerics.fast._words import compiled

SIGNATURE, MACHINE = (numba.float32[::1], numba.int32), ("x86_64", "some cpu", "+avx2")
KEYS = [(SIGNATURE, MACHINE, ("code", closure)) for closure in ("true", "false")]


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The folder in which numba puts all compiled code."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def run(script, **environment):
    """What a fresh process prints."""
    return finish(start(script, **environment))


def start(script, **environment):
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def finish(process):
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out.split()


def test_variants_written_at_the_same_time_are_not_mistaken(tmp_path):
    one, other = (LoopFiles(str(tmp_path / "loop"), "source") for _ in range(2))
    assert one.load(KEYS[0]) is other.load(KEYS[1]) is None
    one.save(KEYS[0], "first")
    other.save(KEYS[1], "second")
    one.save(KEYS[0], "first")
    for files in (one, other):
        assert [files.load(key) for key in KEYS] == ["first", "second"]
    assert len(list(tmp_path.iterdir())) == 2


def test_code_of_another_source_counts_for_nothing(tmp_path):
    old, new = LoopFiles(str(tmp_path / "loop"), "old"), LoopFiles(str(tmp_path / "loop"), "new")
    old.save(KEYS[0], "old code")
    assert new.load(KEYS[0]) is None
    new.save(KEYS[0], "new code")
    assert new.load(KEYS[0]) == "new code"
    assert old.load(KEYS[0]) is None
    changed = (SIGNATURE, MACHINE, ("other code", "true"))
    assert new.load(changed) is None
    new.save(changed, "newer code")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_change_of_any_file_is_another_source(tmp_path):
    seen = set()
    for name, content in [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", ""), ("a.py", "x = 1"), ("c.txt", "")]:
        (tmp_path / name).write_text(content)
        _disk.sources.cache_clear()
        seen.add(_disk.sources(tmp_path))
    assert len(seen) == 4  # text files do not count


@pytest.mark.parametrize("damage", [lambda b: b[:100], lambda b: b"", lambda b: b[:-1] + b"?", lambda b: b"junk" * 50])
def test_a_damaged_file_is_no_file(tmp_path, damage):
    files = LoopFiles(str(tmp_path / "loop"), "source")
    files.save(KEYS[0], list(range(1000)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert files.load(KEYS[0]) is None


def doubled():
    """A new function each time, and one that nobody has compiled."""

    def twice(x):
        return 2 * x

    return twice


def test_a_loop_is_kept(place):
    assert compiled(doubled())(21) == 42
    (folder,) = place.iterdir()
    assert [path.name.split(".")[:3] for path in folder.iterdir()] == [["test_fast_disk", "doubled", "twice"]]
    again = compiled(doubled())
    assert again(21) == 42
    assert sum(again.stats.cache_hits.values()) == 1


def test_a_place_that_cannot_be_written_costs_the_files_alone(place, monkeypatch):
    lost = compiled(doubled())
    (folder,) = place.iterdir()
    folder.rmdir()
    folder.write_text("no folder")  # since its loop was made
    assert lost(21) == 42
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(_disk.FunctionCache._impl_class, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache function"):
        LoopCache(doubled())
    assert compiled(doubled())(21) == 42


WORK = """
    import sys
    import numpy as np
    from numba.core import event
    from halfulp import numerics as hn
    compiles = event.RecordingListener()
    event.register("numba:compile", compiles)
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    for name in sys.argv[1:] or {names}:
        for rounding in ("nearest_even", "up", hn.Stochastic(1)):
            if name not in ("nf4", "posit8", "nvfp4") or rounding == "nearest_even":
                codes = hn.encode(x, name, rounding=rounding)
                print(hash((hn.cast(x, name, rounding=rounding).tobytes(), hn.decode(codes, name).tobytes()
                    if isinstance(codes, np.ndarray) else hn.decode(codes).tobytes())))
    print(sum(record.is_start for _, record in compiles.buffer))
"""
NAMES = ["e4m3fn", "bf16", "int8", "nf4", "posit8", "e8m0", "mxfp4", "nvfp4", "int4:g32:asym"]


@pytest.mark.slow
def test_no_process_but_the_first_compiles(tmp_path):
    """And processes that compile at the same time get what one that is alone gets."""
    seed = {"PYTHONHASHSEED": "0"}
    script, backwards = (WORK.format(names=names) for names in (NAMES, NAMES[::-1]))
    alone = run(script, NUMBA_CACHE_DIR=str(tmp_path / "alone"), **seed)
    together = [start(s, NUMBA_CACHE_DIR=str(tmp_path / "shared"), **seed) for s in (script, backwards, script)]
    first, reverse, third = map(finish, together)
    assert int(alone[-1]) > 20
    for place in ("alone", "shared"):
        later = run(script, NUMBA_CACHE_DIR=str(tmp_path / place), **seed)
        assert later[:-1] == alone[:-1]
        assert later[-1] == "0"
    assert first[:-1] == third[:-1] == alone[:-1]
    assert sorted(reverse[:-1]) == sorted(alone[:-1])
    assert not list(tmp_path.glob("**/*.loop.*"))


def test_the_loops_are_those_that_are_kept():
    """What the engine compiles goes through `compiled`: a loop that a process has to compile again is an oversight."""
    hn.cast(np.zeros(2**15, np.float32), "e4m3fn")
    from halfulp.numerics.accumulate import _kernels, _sums
    from halfulp.numerics.fast import _block, _grid, _posit, _round, _table, _words

    loops = [_block.amaxes, _grid._turned_rest, _posit.posits(True), _round.rounder("mode", False, True)]
    loops += [_table.look_up, _words.flushes, _kernels._most, _sums.inverse]
    assert all(isinstance(loop._cache, LoopCache) for loop in loops)
