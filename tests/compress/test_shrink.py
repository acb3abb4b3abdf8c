"""Structured pruning: what is cut is cut alike everywhere, and what does nothing goes without a trace."""

import json
from dataclasses import replace

import pytest
import torch

from halfulp.compress import compress, open_checkpoint, quantize
from halfulp.compress._load import load
from halfulp.compress._stream import StreamWriter
from halfulp.compress.shrink import Importance, measure, shrink
from halfulp.numerics import decode, encode

from . import common

transformers = pytest.importorskip("transformers")


def made(tmp_path, kind="llama", dtype=torch.float32, edit=None, config=None, **changes):
    """A checkpoint whose tensors and config a test may edit first."""
    tensors = common.weights(kind, dtype, **changes)
    if edit:
        edit(tensors)
    folder = common.checkpoint(tmp_path / "source", kind, dtype, tensors=tensors, **changes)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return open_checkpoint(folder)


def written(checkpoint, folder):
    """A rewritten checkpoint on disk."""
    writer = StreamWriter(folder, list(checkpoint.tensors.values()), 10**9, "test")
    for name in checkpoint.tensors:
        writer.write(name, {name: checkpoint.read(name)}, {})
    writer.finish()
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


def same(a, b, tolerance=1e-6):
    torch.testing.assert_close(common.logits_of(a), common.logits_of(b), rtol=0, atol=tolerance)


def zero(tensors, ending, rows):
    for name, tensor in tensors.items():
        if name.endswith(ending):
            tensor[rows] = 0


@pytest.mark.parametrize("how", [{"channels": 64}, {"channels": 2 / 3, "multiple_of": 32}])
def test_channels_that_do_nothing(tmp_path, how):
    dead = torch.arange(1, 96, 3)

    def edit(tensors):
        for ending in ("gate_proj.weight", "up_proj.weight"):
            zero(tensors, ending, dead)
        for name, tensor in tensors.items():
            if name.endswith("down_proj.weight"):
                tensor[:, dead] = 0

    whole = made(tmp_path, edit=edit)
    model = load(whole)
    for by in ("magnitude", measure(model, list(common.IDS))):
        small = shrink(**how, by=by).rewrite(whole)
        assert small.config["intermediate_size"] == 64
        assert small.tensors["model.layers.0.mlp.down_proj.weight"].shape == (64, 64)
        same(load(small), model)


@pytest.mark.parametrize("by", ["magnitude", "measured", "list"])
def test_a_layer_that_is_the_identity(tmp_path, by):
    def edit(tensors):
        for ending in ("0.self_attn.o_proj.weight", "0.mlp.down_proj.weight"):
            tensors[f"model.layers.{ending}"].zero_()

    whole = made(tmp_path, edit=edit)
    model = load(whole)
    importance = measure(model, list(common.IDS))
    assert importance.layers[0].abs() < 1e-12
    layers = [1] if by == "list" else 1
    how = shrink(layers=layers, by=importance if by == "measured" else "magnitude")
    small = how.rewrite(whole)
    assert small.config["num_hidden_layers"] == 1
    assert not any(".layers.1." in name for name in small.tensors)
    same(load(small), model)
    assert "dropped 0 with 9 tensors" in how.notes(whole)[0]


@pytest.mark.parametrize(
    ("how", "heads", "groups"),
    [({"heads": 2}, 2, 2), ({"groups": 1}, 2, 1), ({"groups": 1, "heads": 1}, 1, 1), ({"heads": 0.5}, 2, 2)],
)
def test_heads_that_do_nothing(tmp_path, how, heads, groups):
    """Heads 1, 2 (of groups 0, 1) do nothing, or those of group 0."""
    quiet = {2: [1, 2], 1: [0, 1] if heads == 2 else [0, 1, 2]}[groups]

    def edit(tensors):
        for name, tensor in tensors.items():
            if name.endswith("o_proj.weight"):
                tensor.unflatten(1, (4, 16))[:, quiet] = 0
            if name.endswith("q_proj.weight"):
                tensor.unflatten(0, (4, 16))[quiet] *= 1e-3

    whole = made(tmp_path, edit=edit)
    model = load(whole)
    for by in ("magnitude", measure(model, list(common.IDS))):
        small = shrink(**how, by=by).rewrite(whole)
        got = [small.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")]
        assert got == [heads, groups, 16]
        same(load(small), model, 1e-5)


def test_heads_by_lists(tmp_path):
    whole = made(tmp_path)
    small = shrink(heads=[[0, 3], [1, 2]]).rewrite(whole)
    q = whole.read("model.layers.1.self_attn.q_proj.weight").unflatten(0, (4, 16))
    assert torch.equal(small.read("model.layers.1.self_attn.q_proj.weight"), q[[1, 2]].flatten(0, 1))
    assert small.config["num_key_value_heads"] == 2
    one = shrink(heads=[2, 3]).rewrite(whole)
    k = whole.read("model.layers.0.self_attn.k_proj.weight")
    assert torch.equal(one.read("model.layers.0.self_attn.k_proj.weight"), k[16:])
    assert one.config["num_key_value_heads"] == 1
    load(one), load(small)
    arrays = shrink(heads=torch.tensor([2, 3]), channels=common.IDS[0].numpy()).rewrite(whole)
    assert arrays.config["intermediate_size"] == 12
    with pytest.raises(ValueError, match=r"\[2, 1\] of the groups \[0, 1\] that share a key and a value"):
        shrink(heads=[0, 1, 2]).rewrite(whole)
    with pytest.raises(ValueError, match="keep different numbers of groups"):
        shrink(heads=[[0, 1], [1, 2]]).rewrite(whole)


def test_heads_with_their_own_keys(tmp_path):
    """Without groups heads are groups."""
    tensors = common.weights("llama", torch.float32)
    for i in range(2):
        for p in "kv":
            tensors[f"model.layers.{i}.self_attn.{p}_proj.weight"] = torch.randn(64, 64)
    folder = common.checkpoint(tmp_path / "m", "llama", torch.float32, tensors=tensors)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_key_value_heads": 4}))
    small = shrink(heads=2).rewrite(open_checkpoint(folder))
    assert (small.config["num_attention_heads"], small.config["num_key_value_heads"]) == (2, 2)
    load(small)
    with pytest.raises(ValueError, match=r"transformers refuses what would be left: .* not a multiple of the number"):
        shrink(heads=3).rewrite(open_checkpoint(folder))


@pytest.mark.parametrize("tied", [False, True])
def test_width(tmp_path, tied):
    """Features that are always zero; RMSNorm's mean is over fewer, which its weights can take back."""
    dead = torch.arange(0, 64, 4)
    alive = torch.tensor([i for i in range(64) if i % 4])

    def edit(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensor[:, dead] = 0
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor[dead] = 0
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
                tensor[:, dead] = 0
            if "norm" in name:
                tensor[dead] = 0

    whole = made(tmp_path, edit=edit, config={"rms_norm_eps": 1e-12}, tied=tied)
    model = load(whole)
    for by in ("magnitude", measure(model, list(common.IDS))):
        small = shrink(width=48, by=by).rewrite(whole)
        assert (small.config["hidden_size"], small.config["head_dim"]) == (48, 16)
        assert torch.equal(small.read("model.norm.weight"), whole.read("model.norm.weight")[alive])
        smaller = load(small)
        assert (smaller.lm_head.weight is smaller.model.embed_tokens.weight) == tied
        with torch.no_grad():
            for name, p in smaller.named_parameters():
                if "norm" in name:
                    p.mul_((64 / 48) ** 0.5)
        same(smaller, model, 1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("by", ["magnitude", "measured"])
def test_everything_at_once(tmp_path, kind, by):
    """Every tensor is of the shape that transformers makes of the new config, and reads alike in pieces."""
    whole = made(tmp_path, kind)
    importance = measure(load(whole), list(common.IDS)) if by == "measured" else by
    how = shrink(width=48, heads=2, channels=0.5, layers=1, experts=1, by=importance)
    small = how.rewrite(whole)
    assert small.config["num_experts_per_tok"] == 1
    assert len(small.config.get("layer_types", [0])) == 1
    assert common.logits_of(load(small)).isfinite().all()
    for name, spec in small.tensors.items():
        tensor = small.read(name)
        assert tuple(tensor.shape) == spec.shape
        pieces = [small.read(name, slice(i, i + 3)) for i in range(0, spec.shape[0], 3)]
        assert torch.equal(torch.cat(pieces), tensor)
        assert small.read(name, slice(0, 0)).shape == (0, *spec.shape[1:])
    folder = written(small, tmp_path / "small")
    (result,) = common.in_transformers([folder], tmp_path)
    assert "error" not in result
    assert not result["info"]
    torch.testing.assert_close(result["logits"], common.logits_of(load(small)), rtol=0, atol=1e-6)
    notes = "\n".join(how.notes(whole))
    assert "experts 4 -> 1" in notes
    if kind == "qwen3_moe":
        assert "dropped 9 tensors of experts" in notes


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_and_their_channels_that_do_nothing(tmp_path, kind):
    """Experts that no token goes to, and channels of each expert that are zero."""
    quiet = [0, 2]

    def edit(tensors):
        for i in range(2):
            layer = f"model.layers.{i}.mlp"
            if kind == "qwen3_moe":
                # the router sees a feature that is positive everywhere
                tensors[f"model.layers.{i}.post_attention_layernorm.weight"].abs_()
                for e in range(4):
                    dead = (torch.arange(16) * 2 + e % 2) % 32
                    for p in ("gate_proj", "up_proj"):
                        tensors[f"{layer}.experts.{e}.{p}.weight"][dead] = 0
                    tensors[f"{layer}.experts.{e}.down_proj.weight"][:, dead] = 0
            else:
                tensors[f"{layer}.router.bias"][quiet] = -1e6
                for e in range(4):
                    dead = torch.arange(48) * 2 + e % 2
                    for name in ("gate_up_proj", "gate_up_proj_bias"):
                        tensors[f"{layer}.experts.{name}"][e].unflatten(-1, (96, 2))[..., dead, :] = 0
                    tensors[f"{layer}.experts.down_proj"][e, dead] = 0

    whole = made(tmp_path, kind, edit=edit)
    model = load(whole)
    importance = measure(model, list(common.IDS))
    half = 16 if kind == "qwen3_moe" else 48
    for by in ("magnitude", importance):
        same(load(shrink(channels=half, by=by).rewrite(whole)), model, 1e-5)
    if kind == "gpt_oss":
        assert [importance.experts[i][quiet].tolist() for i in range(2)] == [[0, 0], [0, 0]]
        small = shrink(experts=2, by=importance).rewrite(whole)
        same(load(small), model, 1e-5)
    assert sum(importance.counts[0].tolist()) == 2 * common.IDS.numel()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({}, "nothing to shrink: give at least one of width, heads, groups, channels, layers, experts"),
        ({"layers": 1, "by": "luck"}, "by='luck': give 'magnitude', or what measure"),
        ({"layers": 1, "multiple_of": 0}, "multiple_of=0: give a whole number from 1"),
        ({"layers": 0}, r"layers=0: give how many of 2 stay, as a count from 1 to 2 or a fraction in \(0, 1\]"),
        ({"layers": 3}, "layers=3: give how many of 2 stay"),
        ({"channels": 1.5}, "channels=1.5: give how many of 96 stay"),
        ({"channels": True}, "channels=True: give how many"),
        ({"channels": "half"}, "channels='half': give how many"),
        ({"channels": [0, 0]}, r"channels of layer 0: \[0, 0\]; expected different indices from 0 to 95"),
        ({"channels": [[0], [1, 2]]}, r"channels: lists of \[1, 2\] entries"),
        ({"channels": [[0], [1], [2]]}, r"lists for 3 layers; give one list, or one for each of the layers \[0, 1\]"),
        ({"layers": [2]}, r"layers: \[2\]; expected different indices from 0 to 1"),
        ({"heads": 3}, "2 groups of 2 query heads keep equally many each; give a multiple of 2 up to 4"),
        ({"experts": 1}, "experts=1: the layers that stay have no experts"),
        ({"layers": 1, "by": Importance()}, "the importance has no scores of this model's layers"),
        ({"width": 9, "by": Importance(width=torch.ones(3))}, "has 3 scores of width, and the model 64"),
        ({"width": 9, "by": Importance(width=torch.full((64,), torch.nan))}, "importance scores hold NaN"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit(tmp_path, how, says):
    with pytest.raises(ValueError, match=says):
        shrink(**how).rewrite(made(tmp_path))


def test_unknown_tensors(tmp_path):
    """Kept where nothing could reach into them, refused where it could."""

    def edit(tensors):
        tensors["model.layers.1.self_attn.odd.weight"] = torch.ones(4, 4)

    whole = made(tmp_path, edit=edit)
    small = shrink(channels=48, layers=[1]).rewrite(whole)
    assert torch.equal(small.read("model.layers.0.self_attn.odd.weight"), torch.ones(4, 4))
    for how in ({"heads": 2}, {"width": 32}):
        with pytest.raises(ValueError, match=r"what the axes of model\.layers\.1\.self_attn\.odd\.weight run along"):
            shrink(**how).rewrite(whole)


def test_configs_that_cannot_follow(tmp_path):
    whole = made(tmp_path)
    for config, says in [
        ({"strange_layer_list": [1, 2]}, r"not known what strange_layer_list = \[1, 2\] of the config means"),
        ({"text_config": {"hidden_size": 64}}, "a multimodal model"),
        ({"hidden_size": 32}, "by its name and the config"),
        ({"num_hidden_layers": 1}, "is of layer 1, and num_hidden_layers is 1"),
        ({"quantization_config": {"quant_method": "awq"}}, "compressed already: shrink first, quantize after"),
    ]:
        with pytest.raises(ValueError, match=says):
            shrink(layers=[0]).rewrite(replace(whole, config=whole.config | config))
    with pytest.raises(ValueError, match="has no num_attention_heads or n_head"):
        shrink(layers=[0]).rewrite(replace(whole, config={"hidden_size": 64, "num_hidden_layers": 2}))


def test_through_compress(tmp_path):
    """A rewritten checkpoint is an ordinary source; different choices are different runs."""
    whole = made(tmp_path, dtype=torch.bfloat16)
    one, two = (shrink(layers=[i], channels=64).rewrite(whole) for i in (0, 1))
    assert one.config != two.config
    manifest = compress(one, quantize("int8:channel"), tmp_path / "out")
    assert manifest["tensors"]["model.layers.0.mlp.up_proj.weight"]["shape"] == [64, 64]
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    loaded = load(tmp_path / "out").state_dict()
    for name in one.tensors:
        entry, value = manifest["tensors"][name], one.read(name)
        if "format" in entry:
            codes = encode(value, entry["format"])
            value = decode(codes)
        assert torch.equal(loaded[name], value.float()), name
    with pytest.raises(ValueError, match="compressed already"):
        shrink(layers=[0]).rewrite(open_checkpoint(tmp_path / "out"))


def test_shrunk_twice(tmp_path):
    """One after the other as at once; the config tells choices apart through both."""
    whole = made(tmp_path)
    once = shrink(layers=[1], channels=list(range(0, 96, 2))).rewrite(whole)
    twice = shrink(channels=list(range(0, 96, 2))).rewrite(shrink(layers=[1]).rewrite(whole))
    other = shrink(channels=list(range(0, 96, 2))).rewrite(shrink(layers=[0]).rewrite(whole))
    assert list(once.tensors) == list(twice.tensors)
    assert all(torch.equal(once.read(name), twice.read(name)) for name in once.tensors)
    assert twice.config != other.config
