"""How fast a checkpoint streams through a recipe, as a share of a plain copy of its files, and in how much memory.

    python benchmarks/stream.py --gb 12 --kills 20

Makes a synthetic Llama-shaped bfloat16 checkpoint of the size asked for in a scratch directory, copies it, and
compresses it with the real command line. ``--kills N`` also kills a second run N times at random moments, lets it
finish, and compares the two outputs byte for byte. Needs twice the size in disk space.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from halfulp.compress._safetensors import TensorSpec
from halfulp.compress._stream import StreamWriter

HIDDEN, INNER, VOCABULARY = 4096, 11008, 32000


def specs(layers: int) -> list[TensorSpec]:
    """The tensors of a Llama of the 7B shape with a given depth."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes += [(f"{layer}self_attn.{part}_proj.weight", (HIDDEN, HIDDEN)) for part in "qkvo"]
        shapes += [(f"{layer}mlp.{part}_proj.weight", (INNER, HIDDEN)) for part in ("gate", "up")]
        shapes.append((f"{layer}mlp.down_proj.weight", (HIDDEN, INNER)))
        shapes += [(f"{layer}{part}_layernorm.weight", (HIDDEN,)) for part in ("input", "post_attention")]
    shapes += [("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCABULARY, HIDDEN))]
    return [TensorSpec(name, "BF16", shape) for name, shape in shapes]


def make(folder: Path, gigabytes: float) -> int:
    """Write the checkpoint; its bytes. Numbers repeat after 16 million, which no step of a recipe can tell."""
    fixed = sum(spec.nbytes for spec in specs(0))
    each = sum(spec.nbytes for spec in specs(1)) - fixed
    layers = max(1, round((gigabytes * 1e9 - fixed) / each))
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def numbers(spec: TensorSpec, start: int) -> Iterator[torch.Tensor]:
        left = spec.numel
        while left:
            piece = noise[start : start + left]
            yield piece
            left, start = left - piece.numel(), 0

    writer = StreamWriter(folder, specs(layers), 5 * 10**9, "synthetic")
    for i, spec in enumerate(specs(layers)):
        writer.write(spec.name, {spec.name: numbers(spec, 7919 * i % (1 << 23))}, {})
    writer.finish()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(spec.nbytes for spec in specs(layers))


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def killed_run(command: list[str], out: Path, kills: int, seconds: float) -> None:
    """Kill a run at random moments; raise if a directory ever looks finished; then let it finish."""
    dice = random.Random(0)
    partial = out.with_name(out.name + ".partial")
    for i in range(kills):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(dice.uniform(0.3, 2 * seconds / kills))
            print(f"finished after {i} kills")
            return
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if out.exists() or (partial / "config.json").exists():
            raise SystemExit(f"after kill {i + 1} the output looks finished")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"finished after {kills} kills")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--recipe", default="w4a16-g128")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        nbytes = make(folder / "model", options.gb)
        largest = max(spec.nbytes for spec in specs(1))
        os.sync()
        start = time.perf_counter()
        shutil.copytree(folder / "model", folder / "copy")
        os.sync()
        copy = time.perf_counter() - start
        shutil.rmtree(folder / "copy")

        def command(out: str) -> list[str]:
            cli = [sys.executable, "-m", "halfulp.recipes._cli", "compress", str(folder / "model")]
            return [*cli, "-r", options.recipe, "-o", str(folder / out), "--runs", str(folder / "runs")]

        start = time.perf_counter()
        subprocess.run(command("whole"), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        record = json.loads((folder / "runs" / "whole.compress.json").read_text())
        peak = record["peak_rss_bytes"]
        print(f"{nbytes / 1e9:.2f} GB in bfloat16, largest tensor {largest / 1e6:.0f} MB, recipe {options.recipe}")
        print(f"copy      {nbytes / copy / 1e6:7.0f} MB/s")
        print(f"compress  {nbytes / seconds / 1e6:7.0f} MB/s, {100 * copy / seconds:.0f} % of the copy's")
        print(
            f"peak memory {peak / 1e6:.0f} MB (bound: 1.2 x largest tensor + 1 GB = {1.2 * largest / 1e6 + 1e3:.0f} MB)"
        )
        if options.kills:
            killed_run(command("killed"), folder / "killed", options.kills, seconds)
            same = digests(folder / "killed") == digests(folder / "whole")
            print("byte-identical to the undisturbed run" if same else "DIFFERENT from the undisturbed run")
            raise SystemExit(not same)


if __name__ == "__main__":
    main()
