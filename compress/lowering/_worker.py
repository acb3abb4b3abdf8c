"""Compiles jobs for TPUs: ``python -m halfulp.compress.lowering._worker FOLDER``; see `_compile`.

FOLDER/jobs.json: what to compile. Of each job come FOLDER/NAME.json, what the compiler said, and FOLDER/NAME, its dump.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any


def _compiled(job: dict[str, Any]) -> str:
    import jax
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    module, _, name = job["function"].partition(":")
    function, shapes = getattr(importlib.import_module(module), name)(**job["arguments"])
    devices = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices
    place = SingleDeviceSharding(devices[0])
    jitted = jax.jit(function, in_shardings=place, out_shardings=place)
    text = jitted.lower(*shapes).compile().as_text()
    return text or ""


def main(room: Path) -> None:
    """Compile all, or die trying."""
    dump = room / "dump"
    for job in json.loads((room / "jobs.json").read_text()):
        answer: dict[str, Any] = {"error": None, "text": ""}
        try:
            answer["text"] = _compiled(job)
        except Exception as error:  # whatever a compiler says
            answer["error"] = f"{type(error).__name__}: {error}"
        if dump.exists():
            # what the next one compiles has a folder of its own
            (room / job["name"]).mkdir()
            for path in dump.iterdir():
                shutil.move(path, room / job["name"] / path.name)
        path = room / f"{job['name']}.json"
        path.write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
