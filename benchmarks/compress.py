"""What each way of compressing does to a model: ``python benchmarks/compress.py --calibration FILE --test FILE``.

Every row is a process of its own, timed from its start until the compressed model is written, and scored here
against the uncompressed model: perplexity, KL and agreement on windows spread evenly over the test text. The rows of
other tools (compress_peers.py) run in a Python that an option names, on the same weights, tokens and windows. What
is measured is kept in a file, a line of JSON a row, so that a run that was stopped goes on; ``-o`` writes a table.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import halfulp.compress as hc
from halfulp.compress import awq, chain, gptq, open_checkpoint, prune, quantize, rotate, smooth
from halfulp.compress._tokens import tokens_of
from halfulp.eval import compare, windows

W8, A8 = "int8:channel", "int8:token:rule=absmax_half:division=rounded"
RULES = ("floor", "ceil", "even", "rceil", "midmax", "mse")

OURS = {
    "int8 nearest": lambda: quantize(W8),
    "int4 g64 nearest": lambda: quantize("int4:g64"),
    "int4 g64 nearest, absmax/7.5": lambda: quantize("int4:g64:rule=absmax_half"),
    "int4 g64 nearest, mse": lambda: quantize("int4:g64:rule=mse"),
    "int4 g64 awq": lambda: chain(awq("int4:g64"), quantize("int4:g64")),
    "int4 g64 gptq": lambda: gptq("int4:g64"),
    "int4 g64 gptq, no order": lambda: gptq("int4:g64", order="none"),
    "int4 g64 gptq, static order": lambda: gptq("int4:g64", order="static"),
    "int4 g64 gptq, 2 sweeps": lambda: gptq("int4:g64", sweeps=2),
    "int4 g64 gptq, propagate 0.5": lambda: gptq("int4:g64", propagate=0.5),
    "int4 g64 gptq, propagate 1": lambda: gptq("int4:g64", propagate=1.0),
    "int4 g64 awq, gptq, propagate 0.5": lambda: chain(awq("int4:g64"), gptq("int4:g64", propagate=0.5)),
    "int4 g64 rotate, nearest": lambda: chain(rotate(), quantize("int4:g64")),
    "int4 g64 rotate, gptq, propagate 0.5": lambda: chain(rotate(), gptq("int4:g64", propagate=0.5)),
    "int4 g128 nearest": lambda: quantize("int4:g128"),
    "int4 g128 gptq": lambda: gptq("int4:g128"),
    "int4 g128 gptq, propagate 0.5": lambda: gptq("int4:g128", propagate=0.5),
    "int3 g64 nearest": lambda: quantize("int3:g64"),
    "int3 g64 gptq": lambda: gptq("int3:g64"),
    "int3 g64 gptq, propagate 0.5": lambda: gptq("int3:g64", propagate=0.5),
    "mxfp4 gptq": lambda: gptq("mxfp4"),
    "mxfp4 gptq, propagate 0.5": lambda: gptq("mxfp4", propagate=0.5),
    "mxfp4 rotate block:32, gptq, propagate 0.5": lambda: chain(rotate("block:32"), gptq("mxfp4", propagate=0.5)),
    "mxfp4 W4A4 nearest": lambda: quantize("mxfp4:rule=even", activations="mxfp4:rule=even"),
    "mxfp4 W4A4 gptq, propagate 0.5": lambda: gptq("mxfp4", activations="mxfp4:rule=even", propagate=0.5),
    "nvfp4 nearest": lambda: quantize("nvfp4"),
    "nvfp4 gptq": lambda: gptq("nvfp4"),
    "nvfp4 gptq, propagate 0.5": lambda: gptq("nvfp4", propagate=0.5),
    "nvfp4 W4A4 nearest": lambda: quantize("nvfp4", activations="nvfp4"),
    "nvfp4 W4A4 gptq, propagate 0.5": lambda: gptq("nvfp4", activations="nvfp4", propagate=0.5),
    "int8 W8A8 nearest": lambda: quantize(W8, activations=A8),
    "int8 W8A8 smooth": lambda: chain(smooth(0.5), quantize(W8, activations=A8)),
    "int8 W8A8 gptq, propagate 0.5": lambda: gptq(W8, activations=A8, propagate=0.5),
    "fp8 W8A8 nearest": lambda: quantize("e4m3fn:channel", activations="e4m3fn:token"),
    "fp8 W8A8 gptq, propagate 0.5": lambda: gptq("e4m3fn:channel", activations="e4m3fn:token", propagate=0.5),
    "2:4 magnitude": lambda: prune("2:4"),
    "2:4 wanda": lambda: prune("2:4", by="wanda"),
    "2:4 sparsegpt": lambda: prune("2:4", by="sparsegpt"),
    "50 % magnitude": lambda: prune("0.5"),
    "50 % wanda": lambda: prune("0.5", by="wanda"),
    "50 % sparsegpt": lambda: prune("0.5", by="sparsegpt"),
    "2:4 sparsegpt, int4 g64 gptq": lambda: chain(prune("2:4", by="sparsegpt"), gptq("int4:g64")),
    **{f"mxfp4 nearest, {rule}": lambda rule=rule: quantize(f"mxfp4:rule={rule}") for rule in RULES},
    **{f"mxfp6 nearest, {rule}": lambda rule=rule: quantize(f"mxfp6:rule={rule}") for rule in RULES},
    **{f"mxfp8 nearest, {rule}": lambda rule=rule: quantize(f"mxfp8:rule={rule}") for rule in RULES},
}

# name of the row: (a function of compress_peers.py, the distribution whose version counts)
PEERS = {
    "llm-compressor: int4 g64 gptq": ("llmcompressor_gptq", "llmcompressor"),
    "llm-compressor: int4 g64 awq": ("llmcompressor_awq", "llmcompressor"),
    "llm-compressor: nvfp4 nearest": ("llmcompressor_nvfp4", "llmcompressor"),
    "llm-compressor: mxfp4 nearest": ("llmcompressor_mxfp4", "llmcompressor"),
    "llm-compressor: 2:4 sparsegpt": ("llmcompressor_sparse24", "llmcompressor"),
    "llm-compressor: 50 % sparsegpt": ("llmcompressor_sparse50", "llmcompressor"),
    "llm-compressor: 50 % wanda": ("llmcompressor_wanda50", "llmcompressor"),
    "torchao: int4 g64 nearest": ("torchao_int4", "torchao"),
    "torchao: int8 nearest": ("torchao_int8", "torchao"),
    "torchao: mxfp4 nearest": ("torchao_mxfp4", "torchao"),
    "GPTQModel: int4 g64 gptq": ("gptqmodel_gptq", "gptqmodel"),
}


def one(name, options, out):
    """Compress as a row says; what the process used goes to OUT.used."""
    torch.set_num_threads(1)
    transform = OURS[name]()
    ids = hc.calibration(options.calibration, sequences=options.sequences, length=options.length)
    hc.compress(options.model, transform, out, calibration=ids)
    used = {"cpu_s": time.process_time(), "rss_mb": peak_mb()}
    Path(f"{out}.used").write_text(json.dumps(used))


def peak_mb():
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Judge:
    """The uncompressed model and the windows."""

    def __init__(self, options):
        self.checkpoint = open_checkpoint(options.model)
        text = Path(options.test).read_text(encoding="utf-8")
        ids, bos = tokens_of(self.checkpoint, text)
        self.windows = windows(ids, window=options.window, count=options.windows, bos=bos)
        self.base = hc.load(self.checkpoint)

    def scores(self, model):
        """A model against the uncompressed one."""
        found = compare(model, self.base, self.windows)
        kl, top1, base = found.kl, found.top1, found.baseline_perplexity
        scores = {"ppl": found.perplexity.value, "kl": kl.value, "kl_se": kl.se, "top1": top1.value}
        return scores | {"base_ppl": base.value}


def ours(name, options, folder):
    """A row of ours: the model, and what making it took."""
    out = folder / "out"
    command = [sys.executable, __file__, "--one", name, "--into", str(out), "--model", options.model]
    command += ["--calibration", options.calibration, "--test", options.test]
    command += ["--sequences", str(options.sequences), "--length", str(options.length)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    manifest = json.loads((out / "halfulp.json").read_text())
    rows = [t for t in manifest["tensors"].values() if "format" in t]
    weights = sum(t["shape"][0] * t["shape"][1] for t in rows)
    bits = sum(t["bits_per_weight"] * t["shape"][0] * t["shape"][1] for t in rows) / weights if rows else None
    return hc.load(out), {**json.loads(Path(f"{out}.used").read_text()), "bits": bits, "version": version("halfulp")}


def plain_model(options, folder):
    """The model as safetensors in float32, and the calibration's ids, for tools that read only those."""
    source = folder / "source"
    checkpoint = open_checkpoint(options.model)
    checkpoint.copy_side_files(source)
    tensors = {name: checkpoint.read(name).float().contiguous() for name in checkpoint.tensors}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": "float32", "torch_dtype": "float32"}))
    ids = hc.calibration(options.calibration, sequences=options.sequences, length=options.length).tokens(checkpoint)
    (folder / "ids.json").write_text(json.dumps([row.tolist() for row in ids]))
    return source


def peer(name, options, folder):
    """A row of another tool, None where no option says where it is."""
    function, package = PEERS[name]
    python = dict(pair.split("=", 1) for pair in options.peer).get(package)
    if python is None:
        return None
    source, out = plain_model(options, folder), folder / "peer.safetensors"
    script = Path(__file__).with_name("compress_peers.py")
    command = [python, str(script), function, str(source), str(folder / "ids.json"), str(out)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"})
    model = hc.load(options.model)
    weights, parameters = load_file(out), dict(model.named_parameters())
    with torch.no_grad():
        for parameter, weight in weights.items():
            parameters[parameter].copy_(weight)
    return model, json.loads(Path(f"{out}.used").read_text())


def table(rows, options):
    """All rows in Markdown."""
    lines = [
        "| row | bits | perplexity | KL | top-1 | CPU s | peak MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in [*OURS, *PEERS]:
        if (row := rows.get(name)) is not None:
            shown = f"{name} ({row['version']})" if name in PEERS else name
            bits = "" if row.get("bits") is None else f"{row['bits']:.2f}"
            lines.append(
                f"| {shown} | {bits} | {row['ppl']:.3f} | {row['kl']:.4f} ± {row['kl_se']:.4f} | {row['top1']:.3f} "
                f"| {row['cpu_s']:.0f} | {row['rss_mb']:.0f} |"
            )
    base = next((row["base_ppl"] for row in rows.values() if "base_ppl" in row), None)
    head = (
        f"Written by `benchmarks/compress.py` on {datetime.date.today()}: {options.model}, calibrated on "
        f"{options.sequences} x {options.length} tokens of {Path(options.calibration).name} of wikitext-2, scored on "
        f"{options.windows} windows of {options.window} tokens of {Path(options.test).name}"
        + (f" (uncompressed: perplexity {base:.3f})" if base else "")
        + f", on {platform.machine()}, one thread. KL is to the uncompressed model, in nats a token, ± one standard "
        "error over windows. CPU seconds are of the whole process up to the written model, start and load included."
    )
    return "\n".join(["# What compression does to a model", "", head, "", *lines, ""])


def main():
    """Run what is wanted and not known yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--calibration", required=True, help="text to calibrate on")
    parser.add_argument("--test", required=True, help="text to score on")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--rows", nargs="*", help="names, or the starts of names, of the rows to run; all by default")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="PACKAGE=PYTHON", help="where a peer is installed"
    )
    parser.add_argument("--results", type=Path, default=Path("compress-results.jsonl"), help="what has been measured")
    parser.add_argument("-o", "--out", type=Path, help="write a table in Markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one, options, options.into)
        return
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    setting = [options.model, options.sequences, options.length, options.windows, options.window]
    rows = {row["name"]: row for row in known if row.get("setting", setting) == setting}
    wanted = [n for n in [*OURS, *PEERS] if not options.rows or any(n.startswith(start) for start in options.rows)]
    judge = None
    for name in wanted:
        if name in rows:
            continue
        folder = Path(tempfile.mkdtemp())
        try:
            made = ours(name, options, folder) if name in OURS else peer(name, options, folder)
            if made is None:
                print(f"{name}: left out, no --peer {PEERS[name][1]}=PYTHON")
                continue
            judge = judge or Judge(options)
            rows[name] = {"name": name, "setting": setting, **judge.scores(made[0]), **made[1]}
        except subprocess.CalledProcessError as error:
            print(f"{name}: failed with exit status {error.returncode}")
            continue
        finally:
            shutil.rmtree(folder)
        with options.results.open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
        print(json.dumps(rows[name]), flush=True)
    if options.out:
        options.out.write_text(table(rows, options))


if __name__ == "__main__":
    main()
