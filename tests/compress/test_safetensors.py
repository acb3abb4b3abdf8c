"""Our safetensors reader and writer against the safetensors package, and against kills and damage."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch

from halfulp.compress import _stream as stream
from halfulp.compress._safetensors import (
    CODES,
    INDEX,
    JOURNAL,
    TORCH_DTYPES,
    TensorSpec,
    read_header,
    read_tensor,
)
from halfulp.compress._stream import StreamWriter, layout_shards, require_space

# The package's reader does not know F8_E8M0, although its writer does.
BOTH_WAYS = [code for code in TORCH_DTYPES if code != "F8_E8M0"]
SHAPES = [(), (1,), (3,), (0,), (4, 0, 2), (5, 7), (2, 3, 5)]


def random_tensor(code: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, so NaNs with payloads and negative zeros too (0 and 1 for BOOL)."""
    dtype = TORCH_DTYPES[code]
    size = TensorSpec("", code, shape).nbytes
    generator = torch.Generator().manual_seed(seed)
    top = 2 if code == "BOOL" else 256
    return torch.randint(0, top, (size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def random_model(codes: list[str] = BOTH_WAYS) -> dict[str, torch.Tensor]:
    pairs = [(code, shape) for code in codes for shape in SHAPES]
    return {f"t.{i}.{code}": random_tensor(code, shape, i) for i, (code, shape) in enumerate(pairs)}


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


def write_all(directory: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = 10**9) -> None:
    writer = StreamWriter(directory, specs_of(tensors), shard_bytes, "f")
    for name, tensor in tensors.items():
        writer.write(name, {name: tensor}, {})
    writer.finish()


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


# ---------------------------------------------------------------- reading


def test_reads_what_the_package_writes_bit_for_bit(tmp_path: Path) -> None:
    tensors = random_model(list(TORCH_DTYPES))
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt", "note": "é"})
    entries, metadata = read_header(path)
    assert metadata == {"format": "pt", "note": "é"}
    assert entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert bits(read_tensor(path, entries[name])) == bits(tensor)


def test_entries_come_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"b": torch.zeros(2), "a": torch.zeros(3), "c": torch.zeros(1).double()}, path)
    offsets = [entry.offset for entry in read_header(path)[0].values()]
    assert offsets == sorted(offsets)
    assert list(read_header(path)[0]) == ["c", "a", "b"]


@pytest.mark.parametrize("rows", [slice(0, 2), slice(3, 5), slice(-2, None), slice(2, 2), slice(4, 99), slice(4, 1)])
@pytest.mark.parametrize("shape", [(5, 7), (5,), (5, 2, 3), (5, 0), (0, 3)])
def test_rows(tmp_path: Path, rows: slice, shape: tuple[int, ...]) -> None:
    tensor = random_tensor("BF16", shape)
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": tensor, "other": torch.ones(3)}, path)
    entry = read_header(path)[0]["w"]
    assert bits(read_tensor(path, entry, rows)) == bits(tensor[rows])


def test_rows_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4, 2), "s": torch.tensor(1.0)}, path)
    entries = read_header(path)[0]
    with pytest.raises(ValueError, match=r"tensor 's' has no dimensions"):
        read_tensor(path, entries["s"], slice(0, 1))
    with pytest.raises(ValueError, match=r"'w': rows slice\(0, 4, 2\) have a step"):
        read_tensor(path, entries["w"], slice(0, 4, 2))


def test_a_file_that_shrank_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4, 2)}, path)
    entry = read_header(path)[0]["w"]
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(ValueError, match=r"x.safetensors: tensor 'w': the file ends 3 bytes early"):
        read_tensor(path, entry)


def test_truncated_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.arange(4.0), "b": torch.ones(2).bfloat16()}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x\.safetensors is not a whole.*Download or write") as caught:
            read_header(path)
        assert f"has {size}" in str(caught.value)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"has {len(whole)} bytes, but the file has {len(whole) - 1}"):
        read_header(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=f"has {len(whole)} bytes, but the file has {len(whole) + 1}"):
        read_header(path)


def item(begin: int, end: int, shape: object = (2,), dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"{]", "header is not valid JSON"),
        (b"\xff\xfe{}", "header is not valid JSON"),
        (b"[" * 100_000, "header is not valid JSON"),
        (b"[]", "header is not a JSON object"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        ({"__metadata__": {"a": 1}}, "__metadata__ does not map strings"),
        ({"__metadata__": []}, "__metadata__ does not map strings"),
        ({"a": 3}, "tensor 'a' lacks dtype, shape or two data_offsets"),
        ({"a": {"dtype": "U8", "shape": [2]}}, "tensor 'a' lacks"),
        ({"a": item(0, 2) | {"data_offsets": [0, 1, 2]}}, "tensor 'a' lacks"),
        ({"a": item(0, 2) | {"data_offsets": "02"}}, "of the wrong kind"),
        ({"a": item(0, 2, shape="2")}, "of the wrong kind"),
        ({"a": item(0, 2, dtype=["U8"])}, "of the wrong kind"),
        ({"a": item(0, True, [1])}, "of the wrong kind"),
        ({"a": item(0, 2, [-2])}, "sizes must be integers"),
        ({"a": item(0, 2, [2.0])}, "sizes must be integers"),
        ({"a": item(0, 2, [True])}, "sizes must be integers"),
        ({"a": item(0, 2, [3])}, "is U8 [3], 3 bytes, but lies at 0 to 2"),
        ({"a": item(2, 0, [2])}, "lies at 2 to 0"),
        ({"a": item(-2, 0, [2])}, "lies at -2 to 0"),
        ({"a": item(0, 8, [2**40, 2**40])}, "bytes, but lies at 0 to 8"),
        ({"a": item(0, 2), "b": item(1, 3)}, "tensor 'b' starts at 1, not 2, and so overlaps"),
        ({"a": item(0, 2), "b": item(4, 6)}, "tensor 'b' starts at 4, not 2, and so leaves a hole"),
        ({"a": item(1, 3)}, "tensor 'a' starts at 1, not 0, and so leaves a hole"),
        ({"a": item(0, 9, [9])}, "but the file has"),
        ({"w.up": item(0, 2, dtype="Q4_K")}, "tensor 'w.up' has the unsupported dtype 'Q4_K'"),
        ({"w.up": item(0, 2, [4], "F4")}, "tensor 'w.up' has the unsupported sub-byte dtype 'F4'"),
        ({"w.up": item(0, 3, [4], "F6_E2M3")}, "unsupported sub-byte dtype 'F6_E2M3'"),
    ],
)
def test_malformed_header(tmp_path: Path, header: object, says: str) -> None:
    path = raw_file(tmp_path / "bad.safetensors", header, b"\0" * 6)
    with pytest.raises(ValueError, match=r"bad\.safetensors") as caught:
        read_header(path)
    assert says in str(caught.value)


def test_header_longer_than_the_file_or_absurd(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes((500).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="header ends at byte 508, but the file has 10 bytes"):
        read_header(path)
    path.write_bytes(b"\xff" * 8 + b"{}")
    with pytest.raises(ValueError, match=f"header has {2**64 - 1} bytes, more than"):
        read_header(path)


def test_f4_written_by_the_package_is_named(tmp_path: Path) -> None:
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("this torch has no float4_e2m1fn_x2")
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    with pytest.raises(ValueError, match=r"x.safetensors: tensor 'w' has the unsupported sub-byte dtype 'F4'"):
        read_header(path)


# ---------------------------------------------------------------- layout and writing


@pytest.mark.parametrize("shard_bytes", [1, 100, 10**9])
def test_the_package_reads_what_we_write_bit_for_bit(tmp_path: Path, shard_bytes: int) -> None:
    tensors = random_model()
    write_all(tmp_path, tensors, shard_bytes)
    assert not (tmp_path / JOURNAL).exists()
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        loaded |= safetensors.torch.load_file(path)
    assert {name: bits(t) for name, t in loaded.items()} == {name: bits(t) for name, t in tensors.items()}
    ours = {n: read_tensor(p, e) for p in tmp_path.glob("*.safetensors") for n, e in read_header(p)[0].items()}
    assert {name: bits(t) for name, t in ours.items()} == {name: bits(t) for name, t in tensors.items()}


def test_e8m0_goes_through(tmp_path: Path) -> None:
    if "F8_E8M0" not in TORCH_DTYPES:
        pytest.skip("this torch has no float8_e8m0fnu")
    tensor = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    write_all(tmp_path, {"s": tensor})
    path = tmp_path / "model.safetensors"
    assert bits(read_tensor(path, read_header(path)[0]["s"])) == bits(tensor)
    with safetensors.safe_open(path, "np") as file:
        assert file.get_slice("s").get_dtype() == "F8_E8M0"


def test_format_entry_alignment_and_index(tmp_path: Path) -> None:
    tensors = {
        "flag": torch.tensor([True, False, True]),
        "w": torch.ones(3, 5).bfloat16(),
        "d": torch.ones(2).double(),
    }
    write_all(tmp_path / "one", tensors)
    assert sorted(files_of(tmp_path / "one")) == ["model.safetensors"]
    entries, metadata = read_header(tmp_path / "one" / "model.safetensors")
    assert metadata == {"format": "pt"}  # IO-04
    assert all(e.offset % TORCH_DTYPES[e.spec.dtype].itemsize == 0 for e in entries.values())
    assert min(e.offset for e in entries.values()) % 8 == 0

    write_all(tmp_path / "many", tensors, 33)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(files_of(tmp_path / "many")) == [*names, INDEX]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 3 + 30 + 16},
        "weight_map": {"d": names[1], "flag": names[0], "w": names[0]},
    }
    for name in names:
        with safetensors.safe_open(tmp_path / "many" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {k for k, v in index["weight_map"].items() if v == name}


def test_transformers_loads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    write_all(tmp_path, model.state_dict(), 4000)
    config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert {n: bits(t) for n, t in loaded.items()} == {n: bits(t) for n, t in model.state_dict().items()}


def test_layout() -> None:
    specs = [TensorSpec(name, "U8", (size,)) for name, size in [("a", 4), ("b", 6), ("c", 11), ("d", 10), ("e", 0)]]
    shards = layout_shards(specs, 10)
    assert [[e.spec.name for e in s.entries] for s in shards] == [["a", "b"], ["c"], ["d", "e"]]
    assert [s.name for s in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert layout_shards(specs, 31)[0].name == "model.safetensors"
    assert layout_shards(specs, 10) == layout_shards(list(specs), 10)
    assert all(len(s.header) % 8 == 0 for s in shards)
    with pytest.raises(ValueError, match="shard size is 0 bytes"):
        layout_shards(specs, 0)
    with pytest.raises(ValueError, match="'a' is given twice"):
        layout_shards([specs[0], specs[0]], 10)
    with pytest.raises(ValueError, match="'__metadata__' is given twice or reserved"):
        layout_shards([TensorSpec("__metadata__", "U8", (1,))], 10)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded", "parameter", "conjugate", "wide"])
def test_views_are_written_in_logical_order(tmp_path: Path, view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_CHUNK", 64)  # so that small tensors go in many chunks
    base = torch.randn(30, 42)
    tensor = {
        "transposed": base.T,
        "strided": base[::3, 1::2],
        "expanded": base[:, :1].expand(30, 50),
        "parameter": torch.nn.Parameter(base),
        "conjugate": torch.randn(5, 6, dtype=torch.complex64).conj(),
        "wide": base.reshape(2, 630).T.contiguous().T[:1],
    }[view]
    write_all(tmp_path, {"w": tensor})
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")["w"]
    assert torch.equal(loaded, tensor.resolve_conj())


def test_chunks_instead_of_tensors(tmp_path: Path) -> None:
    tensor = torch.randn(10, 6)
    data = tensor.numpy()
    given = {
        "rows": (row for row in data),
        "bytes": data.tobytes(),
        "tensors": iter(tensor.split(3)),
        "mixed": [data[:0], data[:4].tobytes(), bytearray(data[4:5]), memoryview(data[5:]), b""],
    }
    writer = StreamWriter(tmp_path, [TensorSpec(n, "F32", (10, 6)) for n in given], 10**6, "f")
    writer.write("all", given, {})
    writer.finish()
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name in given)


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    StreamWriter(tmp_path, [], 10, "f").finish()
    assert safetensors.torch.load_file(tmp_path / "model.safetensors") == {}


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """200 MB through a process that may grow by 40 MB: written in chunks, re-hashed, read by rows."""
    code = """
import resource, sys, torch
from pathlib import Path
from halfulp.compress._safetensors import *
from halfulp.compress._stream import StreamWriter
out, rows = Path(sys.argv[1]), 50_000
spec = TensorSpec("w", "F32", (rows, 1024))
chunk = torch.arange(1024.).expand(1000, 1024).contiguous()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
writer = StreamWriter(out, [spec, TensorSpec("v", "F32", (9,))], 10**9, "f")
before = peak()
writer.write("w", {"w": (chunk for _ in range(rows // 1000))}, {})
writer = StreamWriter(out, [spec, TensorSpec("v", "F32", (9,))], 10**9, "f")
assert list(writer.done) == ["w"]
writer.write("v", {"v": torch.ones(9)}, {})
writer.finish()
entries, _ = read_header(out / "model.safetensors")
for i in range(0, rows, 1000):
    assert torch.equal(read_tensor(out / "model.safetensors", entries["w"], slice(i, i + 1000)), chunk)
print(peak() - before)
"""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40


# ---------------------------------------------------------------- refusals


def test_write_refuses(tmp_path: Path) -> None:
    specs = [TensorSpec("layer.weight", "BF16", (2, 3)), TensorSpec("b", "F32", (2,))]
    writer = StreamWriter(tmp_path, specs, 10**6, "f")
    good = torch.ones(2, 3).bfloat16()
    with pytest.raises(ValueError, match=r"'layer.wieght' was not announced; near names: \['layer.weight'\]"):
        writer.write("0", {"layer.wieght": good}, {})
    with pytest.raises(ValueError, match=r"is torch.float32 \[2, 3\], and was announced as BF16 \[2, 3\]"):
        writer.write("0", {"layer.weight": good.float()}, {})
    with pytest.raises(ValueError, match=r"is torch.bfloat16 \[3, 2\], and was announced as BF16 \[2, 3\]"):
        writer.write("0", {"layer.weight": good.reshape(3, 2)}, {})
    with pytest.raises(ValueError, match="announced with 8 bytes, and 6 were given"):
        writer.write("0", {"b": [b"abc", b"def"]}, {})
    with pytest.raises(ValueError, match="announced with 8 bytes, and 12 were given"):
        writer.write("0", {"b": [b"abcdef", b"abcdef"]}, {})
    with pytest.raises(ValueError, match="note of group '0' cannot be written as JSON"):
        writer.write("0", {"b": b"12345678"}, {"when": object()})
    with pytest.raises(ValueError, match=r"tensor 'b' is torch.strided on meta"):
        writer.write("0", {"b": torch.empty(2, device="meta")}, {})
    with pytest.raises(ValueError, match=r"tensor 'b' is torch.sparse_coo"):
        writer.write("0", {"b": torch.ones(2).to_sparse()}, {})
    with pytest.raises(ValueError, match=r"2 tensors are not written yet: b, layer.weight"):
        writer.finish()
    assert writer.done == {}
    assert writer.remaining == 20
    writer.write("0", {"b": b"12345678"}, {"a": (1, 2)})
    assert writer.done == {"0": {"a": [1, 2]}}
    assert writer.remaining == 12
    with pytest.raises(ValueError, match="group '0' is written already"):
        writer.write("0", {}, {})
    with pytest.raises(ValueError, match="tensor 'b' was written by another group"):
        writer.write("1", {"b": b"12345678"}, {})
    with pytest.raises(ValueError, match=r"1 tensor is not written yet: layer.weight"):
        writer.finish()
    writer.write("1", {"layer.weight": good}, {})
    writer.finish()
    with pytest.raises(ValueError, match="finished or closed"):
        writer.write("2", {}, {})
    with pytest.raises(ValueError, match="finished already"):
        writer.finish()
    with pytest.raises(ValueError, match=r"holds model.safetensors and no journal .* pass another -o"):
        StreamWriter(tmp_path, specs, 10**6, "f")
    assert sorted(files_of(tmp_path)) == ["model.safetensors"]


def test_another_runs_directory(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "F32", (2,))]
    StreamWriter(tmp_path, specs, 10**6, "f").write("0", {"a": torch.ones(2)}, {})
    before = files_of(tmp_path)
    other = [TensorSpec("a", "F32", (3,))]
    for specs_now, shard_bytes, fingerprint in [(specs, 10**6, "g"), (other, 10**6, "f")]:
        with pytest.raises(ValueError, match=r"belongs to another run .*: delete it or pass another -o"):
            StreamWriter(tmp_path, specs_now, shard_bytes, fingerprint)
    assert files_of(tmp_path) == before


def test_two_processes(tmp_path: Path) -> None:
    code = """
import sys
from halfulp.compress._safetensors import *
from halfulp.compress._stream import StreamWriter
StreamWriter(sys.argv[1], [TensorSpec("a", "F32", (2,))], 99, "f")
"""
    writer = StreamWriter(tmp_path, [TensorSpec("a", "F32", (2,))], 99, "f")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert "ValueError: another process is writing in" in done.stderr
    writer.close()
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- kills and damage

Plan = namedtuple("Plan", "tensors groups specs")


@pytest.fixture
def plan() -> Plan:
    parts = [("q", "U8", (8, 9)), ("scale", "BF16", (8,)), ("bias", "F32", ())]
    tensors = {f"layer.{i}.{part}": random_tensor(code, shape, i) for i in range(5) for part, code, shape in parts}
    groups = {f"layer.{i}": {n: t for n, t in tensors.items() if n.startswith(f"layer.{i}.")} for i in range(5)}
    return Plan(tensors, groups, specs_of(tensors))


def run(plan: Plan, directory: Path, stop_after: int = 99) -> list[str]:
    """The caller's loop; the keys that this run wrote itself."""
    writer = StreamWriter(directory, plan.specs, 200, "f")
    wrote = []
    for key, tensors in plan.groups.items():
        if key in writer.done:
            assert writer.done[key] == {"key": key}
            continue
        if len(wrote) == stop_after:
            return wrote
        writer.write(key, tensors, {"key": key})
        wrote.append(key)
    writer.finish()
    return wrote


@pytest.fixture
def undisturbed(plan: Plan, tmp_path: Path) -> dict[str, bytes]:
    run(plan, tmp_path / "undisturbed")
    return files_of(tmp_path / "undisturbed")


@pytest.mark.parametrize("stop_after", range(6))
def test_resume_after_a_stop(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path, stop_after: int) -> None:
    out = tmp_path / "out"
    assert len(run(plan, out, stop_after)) == min(stop_after, 5)
    if stop_after < 5:
        assert (out / JOURNAL).exists()
        assert len(run(plan, out)) == 5 - stop_after
    assert files_of(out) == undisturbed


def test_stopped_again_and_again(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [run(plan, out, 1) for _ in plan.groups] == [[key] for key in plan.groups]
    assert files_of(out) == undisturbed


def test_resume_with_the_journal_cut(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out, copy = tmp_path / "out", tmp_path / "copy"
    run(plan, out, 2)
    journal = (out / JOURNAL).read_bytes()
    first = journal.index(b"\n") + 1
    for size in [*range(first, len(journal), 11), len(journal)]:
        shutil.copytree(out, copy)
        (copy / JOURNAL).write_bytes(journal[:size])
        assert len(run(plan, copy)) == 5 - (journal[:size].count(b"\n") - 1)
        assert files_of(copy) == undisturbed
        shutil.rmtree(copy)


def test_resume_with_a_torn_first_line(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / JOURNAL).write_bytes(b'{"halfulp_jour')
    assert len(run(plan, out)) == 5
    assert files_of(out) == undisturbed


def test_resume_after_damage_anywhere(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """One flipped bit in any file: what it belongs to, and everything after, is written again."""
    out, copy = tmp_path / "out", tmp_path / "copy"
    run(plan, out, 3)
    again = set()
    for name, whole in files_of(out).items():
        start = whole.index(b"\n") + 1 if name == JOURNAL else 0
        for place in range(start, len(whole), 61):
            shutil.copytree(out, copy)
            (copy / name).write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            again.add(len(run(plan, copy)))
            assert files_of(copy) == undisturbed
            shutil.rmtree(copy)
    assert again == {2, 3, 4, 5}


def test_resume_with_a_shard_lost_or_cut(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(plan, out, 4)
    (out / "model-00001-of-00003.safetensors").unlink()
    os.truncate(out / "model-00002-of-00003.safetensors", 300)
    assert run(plan, out)[0] == "layer.0"
    assert files_of(out) == undisturbed


def test_a_damaged_note_is_not_believed(plan: Plan, tmp_path: Path) -> None:
    run(plan, tmp_path, 2)
    text = (tmp_path / JOURNAL).read_text()
    (tmp_path / JOURNAL).write_text(text.replace('"note": {"key": "layer.1"}', '"note": {"key": "layer.9"}'))
    assert list(StreamWriter(tmp_path, plan.specs, 200, "f").done) == ["layer.0"]


@pytest.mark.parametrize("signal_after", [1, 3])
def test_resume_after_sigkill(plan: Plan, undisturbed: dict[str, bytes], tmp_path: Path, signal_after: int) -> None:
    """A real process, killed between two chunks of a tensor."""
    torch.save(plan.groups, tmp_path / "groups.pt")
    code = """
import os, signal, sys, torch
from halfulp.compress._safetensors import *
from halfulp.compress._stream import StreamWriter
groups = torch.load(sys.argv[1])
specs = [TensorSpec(n, CODES[t.dtype], tuple(t.shape)) for g in groups.values() for n, t in g.items()]
writer = StreamWriter(sys.argv[2], specs, 200, "f")
def dying(tensor):
    data = tensor.numpy().tobytes()
    yield data[:30]
    os.kill(os.getpid(), signal.SIGKILL)
for i, (key, tensors) in enumerate(groups.items()):
    if i == int(sys.argv[3]):
        tensors[key + ".q"] = dying(tensors[key + ".q"])
    writer.write(key, tensors, {"key": key})
"""
    args = [sys.executable, "-c", code, tmp_path / "groups.pt", tmp_path / "out", str(signal_after)]
    assert subprocess.run(args, capture_output=True).returncode == -9
    assert len(run(plan, tmp_path / "out")) == 5 - signal_after
    assert files_of(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", range(0, 2200, 150))
def test_a_full_disk(
    plan: Plan,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    code: int,
) -> None:
    left = [room]
    real = os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        count = min(left[0], len(data))
        if not count:
            raise OSError(code, "no")
        left[0] -= count
        return real(fd, data[:count], offset)

    monkeypatch.chdir(tmp_path)
    out = Path("out")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match=r"the disk of out/[^/ ]+ is full and \d+ bytes are still") as caught:
            run(plan, out)
    assert caught.value.errno == code
    run(plan, out)
    assert files_of(out) == undisturbed


def test_a_full_disk_in_one_process(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same writer goes on once there is room: no half line stays in the journal."""
    writer = StreamWriter(tmp_path, plan.specs, 10**6, "f")
    real = os.pwrite
    journal_writes = []

    def torn(fd: int, data: memoryview, offset: int) -> int:
        if bytes(data[:7]) == b'{"key":':
            journal_writes.append(offset)
            return real(fd, data[:9], offset)
        if journal_writes:
            raise OSError(errno.ENOSPC, "no")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", torn)
        with pytest.raises(OSError, match=JOURNAL):
            writer.write("layer.0", plan.groups["layer.0"], {})
    assert (tmp_path / JOURNAL).read_bytes().split(b"\n")[1:] == [b""]
    for key, tensors in plan.groups.items():
        writer.write(key, tensors, {})
    assert list(StreamWriter(tmp_path, plan.specs, 10**6, "f").done) == list(plan.groups)


def test_require_space(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "there" / "yet", 1000)
    with pytest.raises(OSError, match=rf"{tmp_path}/x needs {10**18} bytes and its disk has \d+") as caught:
        require_space(tmp_path / "x", 10**18)
    assert caught.value.errno == errno.ENOSPC
