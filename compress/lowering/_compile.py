"""TPU programs from the TPU's own compiler, on a machine without one: in a process of their own, which may die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ._bundles import Program, parse
from ._targets import Target

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Job:
    """What to compile: ``module:function``, which called with the arguments (values that JSON has) gives a function
    of jax arrays and the shapes that it takes; and for which target. ``name``: a name for the program, its own."""

    name: str
    function: str
    target: Target
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What came of a job. ``error``: what the compiler said, or how it died; None if it did neither. ``programs``: the
    schedules by the compiler's names, kernels under their own. ``text``: the optimized HLO."""

    job: Job
    error: str | None
    programs: Mapping[str, Program]
    text: str


def can_compile() -> bool:
    """Is the TPU compiler here?"""
    return find_spec("libtpu") is not None and find_spec("jax") is not None


def compile_jobs(jobs: Sequence[Job], timeout: float = 600.0, path: Path | None = None) -> list[Compiled]:
    """Compile one after the other. A job that takes the compiler down costs itself alone; ``timeout`` in seconds is for
    all that one process of it compiles. path: a folder in which the functions' modules are looked for, too.

    Raises ImportError without the compiler, and ValueError for two jobs of one name.
    """
    if not can_compile():
        raise ImportError("TPU programs are compiled by libtpu: pip install 'halfulp[tpu]'")
    if len({job.name for job in jobs}) != len(jobs):
        raise ValueError("two jobs have one name")
    done: list[Compiled] = []
    with tempfile.TemporaryDirectory() as folder:
        while len(done) < len(jobs):
            rest = jobs[len(done) :]
            room = Path(tempfile.mkdtemp(dir=folder))
            died = _run(rest, room, timeout, path)
            for job in rest:
                answer = room / f"{job.name}.json"
                if not answer.exists():
                    break
                found = json.loads(answer.read_text())
                programs = _programs(room / job.name) if found["error"] is None else {}
                done.append(Compiled(job, found["error"], programs, found["text"]))
            else:
                continue
            done.append(Compiled(jobs[len(done)], died or "the compiler ended without a word", {}, ""))
    return done


def _run(jobs: Sequence[Job], room: Path, timeout: float, path: Path | None) -> str | None:
    """Run the worker on some jobs; how it died, if it did."""
    asked = [
        {"name": j.name, "function": j.function, "topology": j.target.topology, "arguments": dict(j.arguments)}
        for j in jobs
    ]
    (room / "jobs.json").write_text(json.dumps(asked))
    environment = {**os.environ, **_ENVIRONMENT}
    environment["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={room / 'dump'} --xla_jf_dump_llo_text=true"
    command = [sys.executable, "-m", "halfulp.compress.lowering._worker", str(room)]
    where = [*([str(path)] if path else []), str(_home()), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(where)
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"the compiler took longer than {timeout:g} s"
    if ended.returncode == 0:
        return None
    said = [line for line in ended.stderr.splitlines() if line.strip()]
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit status {ended.returncode}"
    fatal = next((line for line in said if line.startswith("F") or "Check fail" in line), said[-1] if said else "")
    return f"the compiler died by {how}: {fatal[-300:]}"


def _home() -> Path:
    """The folder that this halfulp is imported from."""
    import halfulp

    assert halfulp.__file__ is not None
    return Path(halfulp.__file__).parents[1]


def _programs(folder: Path) -> dict[str, Program]:
    """The final schedules that a compilation left."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        if "schedule-analysis" not in path.name:
            # time stamp - name - number - final_bundles.txt
            name = path.name.removesuffix("-final_bundles.txt").partition("-")[2].rpartition("-")[0]
            found[name] = parse(path.read_text())
    return {name: program for name, program in found.items() if not name.startswith("<")}
