"""compress() on whole checkpoints: what lies in the output, and what a run survives."""

import errno
import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from halfulp.compress import (
    _compress,
    _stream,
    _tensorwise,
    chain,
    compress,
    open_checkpoint,
    plan_of,
    prune,
    quantize,
)
from halfulp.compress._safetensors import JOURNAL
from halfulp.numerics import cast, format

from .common import checkpoint, digests, run_python, shapes, weights

INT4 = quantize("int4:g32:asym")
SHARD = 20_000


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source") / "m", shard_bytes=60_000)


def stored_tensors(folder):
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


# what lies in the output


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("shard_bytes", [None, 50_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_is_accounted_for(tmp_path, kind, shard_bytes, dtype):
    source = checkpoint(tmp_path / "m", kind, dtype, shard_bytes)
    manifest = compress(source, INT4, tmp_path / "out", shard_bytes=shard_bytes or 10**9)
    assert manifest["tensors"].keys() == shapes(kind).keys()
    named = [name for n, e in manifest["tensors"].items() for name in e.get("stored", [n])]
    held = stored_tensors(tmp_path / "out")
    assert sorted(held) == sorted(named)
    given = weights(kind, dtype)
    for name, entry in manifest["tensors"].items():
        assert entry["shape"] == list(shapes(kind)[name])
        if "format" not in entry:
            assert torch.equal(held[name], given[name])
            assert held[name].dtype == dtype
            assert entry["why"]
        else:
            assert 0 < entry["relative_error"] < 0.2
            expected = cast(given[name].float(), format(entry["format"]))
            assert entry["zeros"] == int((expected == 0).sum())
            error = (expected - given[name].float()).norm() / given[name].float().norm()
            assert entry["relative_error"] == pytest.approx(float(error), rel=1e-4)
    if shard_bytes:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        found = {n: p.name for p in (tmp_path / "out").glob("*.safetensors") for n in load_file(p)}
        assert index["weight_map"] == found
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in held.values())
    assert open_checkpoint(tmp_path / "out").tensors.keys() == held.keys()


def test_side_files_go_along_byte_for_byte_and_the_config_keeps_its_words(tmp_path, source):
    compress(source, INT4, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    before, after = (json.loads((p / "config.json").read_text()) for p in (source, tmp_path / "out"))
    assert {k: v for k, v in after.items() if k != "quantization_config"} == before
    assert not list((tmp_path).glob("*.partial"))
    assert not (tmp_path / "out" / JOURNAL).exists()


def test_the_tokenizer_works_from_the_output(tmp_path, source):
    from transformers import AutoTokenizer

    compress(source, INT4, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w5 nothing").input_ids == [6, 8, 0]


def test_a_tied_head_stays_tied(tmp_path):
    source = checkpoint(tmp_path / "m", tied=True)
    compress(source, quantize("int8:channel", ignore="lm_head"), tmp_path / "out")
    assert not [name for name in stored_tensors(tmp_path / "out") if "lm_head" in name]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_pruning_alone_gives_a_plain_checkpoint(tmp_path, source):
    manifest = compress(source, prune("2:4"), tmp_path / "out")
    assert manifest["layout"] == "plain"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    held = stored_tensors(tmp_path / "out")
    for name, entry in manifest["tensors"].items():
        if entry["action"] == "2:4":
            assert entry["zeros"] >= held[name].numel() // 2
            assert (held[name].unflatten(-1, (-1, 4)).count_nonzero(dim=-1) <= 2).all()


def test_a_mask_survives_in_the_bytes(tmp_path, source):
    compress(source, chain(prune("2:4"), quantize("int4:g32:asym")), tmp_path / "out")
    from halfulp.compress._load import tensors

    for name, tensor in tensors(open_checkpoint(tmp_path / "out")):
        if name.endswith("_proj.weight"):
            assert (tensor.unflatten(-1, (-1, 4)).count_nonzero(dim=-1) <= 2).all()


def test_the_source_may_be_one_file_or_shards(tmp_path, source):
    single = checkpoint(tmp_path / "single")
    for name, where in (("a", source), ("b", single)):
        compress(where, INT4, tmp_path / name)
    assert stored_tensors(tmp_path / "a").keys() == stored_tensors(tmp_path / "b").keys()
    b = stored_tensors(tmp_path / "b")
    assert all(torch.equal(t, b[name]) for name, t in stored_tensors(tmp_path / "a").items())


def test_progress_goes_to_the_end(tmp_path, source):
    seen = []
    compress(source, INT4, tmp_path / "out", progress=seen.append)
    assert [p.name for p in seen] == list(open_checkpoint(source).tensors)
    assert seen[-1].done == seen[-1].total == sum(t.nbytes for t in weights().values())


# the same bytes, whatever happens


@pytest.mark.parametrize("transform", [INT4, chain(prune(0.5), quantize("nvfp4"))], ids=["rows", "whole"])
def test_two_runs_and_two_threads_give_the_same_bytes(tmp_path, source, transform, monkeypatch):
    monkeypatch.setattr(_tensorwise, "_CHUNK_BYTES", 4096)  # several pieces a tensor
    before = torch.get_num_threads()
    try:
        for name, threads in (("a", 1), ("b", 1), ("c", 2)):
            torch.set_num_threads(threads)
            compress(source, transform, tmp_path / name)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert digests(tmp_path / "a") == digests(tmp_path / "b") == digests(tmp_path / "c")


def test_pieces_do_not_show_in_the_bytes(tmp_path, source, monkeypatch):
    compress(source, INT4, tmp_path / "whole")
    monkeypatch.setattr(_tensorwise, "_CHUNK_BYTES", 1)
    compress(source, INT4, tmp_path / "pieces")
    assert digests(tmp_path / "whole") == digests(tmp_path / "pieces")


KILLED = """
import os, signal, sys, torch
from halfulp.compress import compress, quantize
from halfulp.compress._stream import StreamWriter
torch.set_num_threads(1)
source, out, at, shard = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
count = 0
put = StreamWriter._put
def stop(self, fd, view, offset, what):
    global count
    count += 1
    if count == at:  # half of the bytes are down, and then the power goes
        os.pwrite(fd, view[: len(view) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, fd, view, offset, what)
StreamWriter._put = stop
compress(source, quantize("int4:g32:asym"), out, shard_bytes=shard)
print("puts", count)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, source):
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    puts = run_python(KILLED, source, out, 10**9, SHARD).stdout.split()[-1]
    return out, int(puts)


@pytest.mark.parametrize("share", [0.02, 0.4, 0.75, 0.999])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, source, undisturbed, share):
    whole, puts = undisturbed
    at = max(2, int(puts * share))
    done = run_python(KILLED, source, tmp_path / "out", at, SHARD, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out").exists()
    with pytest.raises((ValueError, FileNotFoundError)):
        open_checkpoint(tmp_path / "out.partial")
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out") == digests(whole)
    assert not (tmp_path / "out.partial").exists()


def test_what_was_done_is_not_done_again(tmp_path, source, undisturbed, monkeypatch):
    whole, puts = undisturbed
    run_python(KILLED, source, tmp_path / "out", puts // 2, SHARD, check=False)
    journal = (tmp_path / "out.partial" / JOURNAL).read_bytes().count(b"\n") - 1
    assert journal > 5
    written = []
    real = _stream.StreamWriter.write
    monkeypatch.setattr(
        _stream.StreamWriter,
        "write",
        lambda self, key, *rest: (written.append(key), real(self, key, *rest))[1],
    )
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert len(written) == len(shapes("llama")) - journal
    assert digests(tmp_path / "out") == digests(whole)


@pytest.mark.parametrize("call", ["rename", "rmdir"])
def test_a_stop_between_the_last_byte_and_the_rename_is_made_good(tmp_path, source, undisturbed, monkeypatch, call):
    def stop(*args):
        raise KeyboardInterrupt

    if call == "rmdir":
        (tmp_path / "out").mkdir()
        monkeypatch.setattr("pathlib.Path.rmdir", stop)
    else:
        monkeypatch.setattr(os, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    monkeypatch.undo()
    monkeypatch.setattr(_tensorwise, "_compressed", stop)  # nothing is computed again
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out") == digests(undisturbed[0])


def test_a_stop_before_the_journal_goes_is_made_good(tmp_path, source, undisturbed, monkeypatch):
    monkeypatch.setattr(_compress.StreamWriter, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    monkeypatch.undo()
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out") == digests(undisturbed[0])


def test_another_run_in_the_partial_directory_is_an_error_with_a_way_out(tmp_path, source, undisturbed):
    run_python(KILLED, source, tmp_path / "out", undisturbed[1] // 2, SHARD, check=False)
    before = digests(tmp_path / "out.partial")
    for other in (quantize("int8:channel"), quantize("int4:g32:asym", kv="int8:token")):
        with pytest.raises(ValueError, match=r"out\.partial belongs to another run .*: delete it or pass another -o"):
            compress(source, other, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out.partial") == before
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)


def test_a_finished_partial_directory_of_another_recipe_is_not_renamed(tmp_path, source, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(source, INT4, tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"delete it or pass another -o"):
        compress(source, quantize("int8:channel"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    compress(source, INT4, tmp_path / "out")


def test_a_changed_source_does_not_complete_an_earlier_output(tmp_path, monkeypatch):
    # same names, shapes and recipe, other numbers: what lies finished in OUT.partial is not this run's
    def stop(*args):
        raise KeyboardInterrupt

    first = checkpoint(tmp_path / "m")
    monkeypatch.setattr(os, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(first, INT4, tmp_path / "out")
    monkeypatch.undo()
    shutil.rmtree(first)
    second = checkpoint(tmp_path / "m", seed=1)
    with pytest.raises(ValueError, match="delete it or pass another -o"):
        compress(second, INT4, tmp_path / "out")


# what is refused


def test_an_output_that_exists_is_not_touched(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"out exists: pass another -o, or remove it first"):
        compress(source, INT4, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match=r"file exists"):
        compress(source, INT4, tmp_path / "file")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_an_empty_directory_will_do_and_parents_are_made(tmp_path, source):
    (tmp_path / "out").mkdir()
    compress(source, INT4, tmp_path / "out")
    compress(source, INT4, tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "halfulp.json").is_file()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_is_named_and_nothing_looks_finished(tmp_path, bad):
    held = weights()
    held["model.layers.1.mlp.up_proj.weight"][7, 3] = bad
    source = checkpoint(tmp_path / "m", tensors=held)
    for transform in (INT4, quantize("nvfp4"), prune("2:4")):
        with pytest.raises(
            ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity, .*: repair"
        ):
            compress(source, transform, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial" / "halfulp.json").exists()
        with pytest.raises(ValueError, match="unfinished output"):
            open_checkpoint(tmp_path / "out.partial")
        shutil.rmtree(tmp_path / "out.partial")


def test_nan_in_a_tensor_that_is_kept_is_kept(tmp_path):
    held = weights()
    held["model.norm.weight"][0] = float("nan")
    compress(checkpoint(tmp_path / "m", tensors=held), INT4, tmp_path / "out")
    assert stored_tensors(tmp_path / "out")["model.norm.weight"][0].isnan()


def test_a_compressed_source_is_refused_by_its_method(tmp_path, source):
    for name, fmt, method in (("theirs", "int4:g32", "compressed-tensors"), ("ours", "nf4:g32", "halfulp")):
        compress(source, quantize(fmt), tmp_path / name)
        with pytest.raises(ValueError, match=rf"is quantized already \({method}\): start from the uncompressed"):
            compress(tmp_path / name, INT4, tmp_path / "again")
    assert not (tmp_path / "again.partial").exists()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (chain(), "the recipe touches no tensor of this model"),
        (quantize("int4:g32", ignore="*"), "the recipe touches no tensor of this model"),
        (quantize("int4:g32", ignore="lm_haed"), "matches no module of the model; near names: lm_head"),
        (quantize("int4:g32", targets="nothing"), "target pattern 'nothing' matches no module"),
    ],
)
def test_nothing_is_written_where_nothing_is_matched(tmp_path, source, transform, message):
    with pytest.raises(ValueError, match=message):
        compress(source, transform, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_layout_that_is_none_is_refused_and_both_can_be_asked_for(tmp_path, source):
    with pytest.raises(ValueError, match="layout 'gguf': choose"):
        compress(source, INT4, tmp_path / "out", layout="gguf")
    for layout in ("halfulp", "compressed-tensors"):
        assert compress(source, INT4, tmp_path / layout, layout=layout)["layout"] == layout


def test_a_full_disk_is_one_sentence_before_anything_is_written(tmp_path, source, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match=r"1000") as caught:
        compress(source, INT4, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_while_writing_can_be_gone_on_from(tmp_path, source, undisturbed, monkeypatch):
    real, count = os.pwrite, 0

    def full(fd, data, offset):
        nonlocal count
        count += 1
        if count > 60:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        OSError, match=r"is full and \d+ bytes are still to be written: free that much, then run"
    ) as caught:
        compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out") == digests(undisturbed[0])


def test_a_disk_that_is_full_only_for_the_small_files_says_the_same(tmp_path, source, undisturbed, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_compress, "_write_json", full)
    with pytest.raises(OSError, match=r"out\.partial is full: free some space, then run the same command again"):
        compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    monkeypatch.undo()
    compress(source, INT4, tmp_path / "out", shard_bytes=SHARD)
    assert digests(tmp_path / "out") == digests(undisturbed[0])


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        compress(tmp_path / "nowhere", INT4, tmp_path / "out")


def test_the_output_may_not_be_the_source(tmp_path, source):
    before = digests(source)
    with pytest.raises(FileExistsError):
        compress(source, INT4, source)
    assert digests(source) == before


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight.codes", "model.layers.0.mlp.up_proj.weight_scale"])
def test_a_name_that_the_output_needs_itself_is_an_error(tmp_path, name):
    held = weights() | {name: torch.ones(4)}
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        compress(
            checkpoint(tmp_path / "m", tensors=held),
            quantize("nf4:g32" if name.endswith("codes") else "int4:g32"),
            tmp_path / "out",
        )


def test_scalars_and_empty_tensors_pass_through(tmp_path):
    held = weights() | {
        "a.scalar": torch.tensor(3.5),
        "a.empty": torch.zeros(0, 4),
        "a.ints": torch.arange(5),
    }
    compress(checkpoint(tmp_path / "m", tensors=held), INT4, tmp_path / "out")
    found = stored_tensors(tmp_path / "out")
    for name in ("a.scalar", "a.empty", "a.ints"):
        assert torch.equal(found[name], held[name])
        assert found[name].dtype == held[name].dtype


@pytest.mark.parametrize("fmt", ["int4:g32", "int8:channel", "nf4:g32", "nvfp4", "mxfp4", "int4:channel:asym"])
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (1, 1)])
def test_degenerate_matrices_pass_or_are_refused_in_a_sentence(tmp_path, fmt, shape):
    held = {"model.embed_tokens.weight": torch.ones(128, 64), "a.q_proj.weight": torch.ones(shape)}
    source = checkpoint(tmp_path / "m", tensors=held)
    from halfulp.compress._load import tensors

    compress(source, quantize(fmt), tmp_path / "out")
    found = dict(tensors(open_checkpoint(tmp_path / "out")))["a.q_proj.weight"]
    assert tuple(found.shape) == shape


def test_plans_of_bare_shapes_and_of_a_checkpoint_agree(source):
    a = plan_of(open_checkpoint(source), INT4)
    b = plan_of(shapes("llama"), INT4)
    by_name = {row.name: row for row in b.rows}
    assert all((row.kind, row.weights) == (by_name[row.name].kind, by_name[row.name].weights) for row in a.rows)


@pytest.mark.parametrize("fmt", ["e4m3fn", "int4", "bf16", "nf4"])
def test_formats_without_blocks_go_through(tmp_path, source, fmt):
    manifest = compress(source, quantize(fmt), tmp_path / "out")
    from halfulp.compress._load import tensors

    found = dict(tensors(open_checkpoint(tmp_path / "out")))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[name], cast(weights()[name].float(), fmt))
    assert manifest["layout"] == "halfulp"


@pytest.mark.parametrize("size", [3e38, 1e-40, 0.0])
def test_errors_are_finite_numbers_at_the_ends_of_the_range(tmp_path, size):
    held = {"model.embed_tokens.weight": torch.ones(128, 64), "a.q_proj.weight": torch.full((4, 64), size)}
    manifest = compress(checkpoint(tmp_path / "m", tensors=held), quantize("int8:channel"), tmp_path / "out")
    assert 0 <= manifest["tensors"]["a.q_proj.weight"]["relative_error"] <= 1
    json.loads((tmp_path / "out" / "halfulp.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("empty", [None, {}])
def test_a_config_that_says_nothing_about_quantization_is_a_plain_one(tmp_path, empty):
    source = checkpoint(tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": empty}))
    compress(source, INT4, tmp_path / "out")
