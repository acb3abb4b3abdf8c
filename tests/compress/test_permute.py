"""Permutation of channels: the same model, of which N:M keeps more."""

import itertools
import json

import numpy as np
import pytest
import torch

from halfulp.compress import (
    calibration,
    chain,
    compress,
    gptq,
    load,
    open_checkpoint,
    permute,
    plan_of,
    prune,
    quantize,
    shrink,
)
from halfulp.compress._prune import NM, mask
from halfulp.compress._rewrites import rewritten
from halfulp.compress.methods import permutation, retained
from halfulp.compress.rotate import prove
from halfulp.recipes import read_recipe

from .common import checkpoint, weights
from .test_calibrated import calm, resumed_equals_whole, sequences
from .test_rotate_families import MODELS, make

# the search


def score(out, n, seed=0):
    rng = np.random.default_rng(seed)
    return np.abs(rng.normal(size=(out, n))) * np.exp(rng.normal(size=n))


@pytest.mark.parametrize(
    ("keep", "group", "n"), [(2, 4, 32), (1, 4, 16), (3, 4, 16), (4, 8, 32), (1, 2, 10), (3, 7, 21)]
)
def test_no_swap_of_two_channels_is_left_that_would_retain_more(keep, group, n):
    given = score(6, n)
    order = permutation(given, keep, group, sweeps=1000)
    assert sorted(order) == list(range(n))
    found = retained(given[:, order], keep, group)
    assert found > retained(given, keep, group)
    for i, j in itertools.combinations(range(n), 2):
        other = order.copy()
        other[[i, j]] = other[[j, i]]
        assert retained(given[:, other], keep, group) <= found * (1 + 1e-5)


def test_retained_is_what_the_mask_of_prune_keeps():
    given = torch.from_numpy(score(5, 24))
    for n, m in ((2, 4), (3, 8), (1, 2)):
        assert retained(given, n, m) == pytest.approx(float(given[mask(given, NM(n, m))].sum()), rel=1e-6)


def test_two_groups_reach_the_best_of_all_partitions():
    given = score(3, 8)
    best = max(
        retained(given[:, [*one, *(set(range(8)) - set(one))]], 2, 4) for one in itertools.combinations(range(8), 4)
    )
    found = retained(given[:, permutation(given, 2, 4)], 2, 4)
    assert retained(given, 2, 4) < found <= best * (1 + 1e-6)


@pytest.mark.parametrize("n", [4, 520, 1028])
def test_more_channels_than_are_looked_at_together(n):
    given = score(4, n, seed=n)
    values = [retained(given[:, permutation(given, 2, 4, sweeps=s)], 2, 4) for s in (0, 1, 6)]
    assert values[0] == retained(given, 2, 4)
    assert values == sorted(values)
    assert n == 4 or values[2] > values[1] > values[0]
    assert np.array_equal(permutation(given, 2, 4, seed=3), permutation(given, 2, 4, seed=3))


@pytest.mark.parametrize("given", [np.zeros((3, 8)), np.ones((3, 8)), np.full((2, 8), 1e-44), np.full((2, 8), 3e38)])
def test_where_nothing_is_gained_channels_stay(given):
    assert permutation(given, 2, 4).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (np.ones(8), {}, "shape \\[8\\]"),
        (np.ones((2, 10)), {}, "divides the channels"),
        (-np.ones((2, 8)), {}, "negative"),
        (np.full((2, 8), np.nan), {}, "NaN"),
        (np.ones((2, 8)), {"sweeps": -1}, "sweeps"),
        (np.ones((2, 8)), {"seed": 0.5}, "seed"),
    ],
)
def test_what_cannot_be_searched_is_named(given, options, message):
    with pytest.raises(ValueError, match=message):
        permutation(given, 2, 4, **options)


# the rewrite


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("permute") / "model", dtype=torch.float32, tensors=calm())


@pytest.mark.parametrize("name", MODELS)
def test_every_family_computes_the_same_with_the_same_numbers(tmp_path, name):
    original = make(name, tmp_path, torch.float64)
    # sizes of the models are odd on purpose
    channels = "2:4" if name in ("qwen2-moe", "qwen3-moe", "gpt2-untied") else "3:7"
    moved = chain(permute("1:2", pairs="heads"), permute(channels, pairs="channels"))
    moved = rewritten(original, moved.rewrites, None)[0]
    assert prove(original, moved) < 1e-12
    changed = 0
    for tensor in original.tensors:
        a, b = original.read(tensor), moved.read(tensor)
        assert torch.equal(a.flatten().sort().values, b.flatten().sort().values)
        if not torch.equal(a, b):
            changed += 1
            assert torch.equal(torch.cat([moved.read(tensor, slice(i, i + 9)) for i in range(0, len(b), 9)]), b)
    assert changed >= 2 * 2  # v and o, or gate, up and down, of two blocks


@pytest.mark.parametrize("by", ["magnitude", "wanda"])
def test_more_is_retained_and_the_zeros_are_where_the_mask_says(tmp_path, source, by):
    steps = chain(permute("2:4", by=by), prune("2:4", by=by), gptq("int4:g16"))
    manifest = compress(source, steps, tmp_path / "out", calibration=calibration(sequences()))
    notes = [note for note in manifest["notes"] if "permuted for 2:4" in note]
    assert len(notes) == 2
    model = load(tmp_path / "out")
    moved = compress(source, permute("2:4", by=by), tmp_path / "moved", calibration=calibration(sequences()))
    assert moved["notes"][:2] == notes
    dense = load(tmp_path / "moved").state_dict()
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            assert ((weight.reshape(-1, 4) == 0).sum(-1) >= 2).all()
            if by == "magnitude":
                assert (weight[~mask(dense[name], NM(2, 4))] == 0).all()
    plain = open_checkpoint(source)
    for layer in range(2):
        for module in ("mlp.down_proj", "self_attn.o_proj"):
            name = f"model.layers.{layer}.{module}.weight"
            if by == "magnitude":
                assert retained(dense[name].abs(), 2, 4) > 1.005 * retained(plain.read(name).abs(), 2, 4)
            assert not torch.equal(dense[name], plain.read(name))


def test_heads_stay_whole_and_query_heads_of_a_group_go_alike(source):
    plain = open_checkpoint(source)
    moved = permute("2:4", pairs="heads").rewrite(plain)
    v, o = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "vo")
    before, after = plain.read(v).reshape(2, 16, -1), moved.read(v).reshape(2, 16, -1)
    columns = [plain.read(o).reshape(-1, 4, 16), moved.read(o).reshape(-1, 4, 16)]
    for group in range(2):
        order = [int((before[group] == row).all(-1).nonzero()) for row in after[group]]
        assert sorted(order) == list(range(16)) != order
        for head in (2 * group, 2 * group + 1):
            assert torch.equal(columns[1][:, head], columns[0][:, head, order])
    assert torch.equal(
        moved.read("model.layers.1.mlp.down_proj.weight"), plain.read("model.layers.1.mlp.down_proj.weight")
    )


@pytest.mark.parametrize("by", ["magnitude", "wanda"])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, source, by, monkeypatch):
    steps = chain(permute("2:4", by=by), prune("2:4", by=by), gptq("int4:g16"))
    resumed_equals_whole(tmp_path, source, steps, calibration(sequences()), monkeypatch, 12)


def test_another_order_is_another_run(tmp_path, source, monkeypatch):
    from halfulp.compress._stream import StreamWriter

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamWriter, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(source, permute("2:4"), tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(
        "halfulp.compress._permute.permutation", lambda score, *a, **k: np.arange(score.shape[1])[::-1].copy()
    )
    with pytest.raises(ValueError, match="another run"):
        compress(source, permute("2:4"), tmp_path / "out")


def test_experts_that_saw_nothing_go_by_magnitude(tmp_path):
    tensors = weights("qwen3_moe", torch.float32)
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate.weight"][2] = 0
        tensors[f"model.layers.{layer}.mlp.gate.weight"][:2] *= 50
    folder = checkpoint(tmp_path / "model", "qwen3_moe", torch.float32, tensors=tensors)
    manifest = compress(folder, permute(by="wanda"), tmp_path / "out", calibration=calibration([[5]]))
    assert any("the calibration never reached them: model.layers.0.mlp.experts" in note for note in manifest["notes"])
    ids = sequences(2)
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path / "out")(ids).logits, load(folder)(ids).logits, rtol=1e-3, atol=1e-3)


def test_the_plan_needs_no_search_and_a_recipe_says_it(tmp_path, source, monkeypatch):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: p\nsteps:\n  - permute: {pattern: 2:4, pairs: [channels]}\n  - prune: {pattern: 2:4}\n")
    steps = read_recipe(path)[0].transform()
    assert steps.transforms == (permute("2:4", pairs=["channels"]), prune("2:4"))
    monkeypatch.setattr("halfulp.compress._permute.permutation", None)
    assert "channels are permuted for 2:4 when the recipe runs" in str(plan_of(open_checkpoint(source), steps))
    assert "follow from the calibration" in str(plan_of(open_checkpoint(source), permute(by="wanda")))


def test_a_shrunken_model_is_permuted_too(tmp_path, source):
    steps = chain(shrink(channels=48), permute("2:4"), prune("2:4"))
    compress(source, steps, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["halfulp_shrink"]
    assert config["halfulp_permute"]
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_what_cannot_be_permuted_is_named(tmp_path, source):
    for options, message in [
        ({"pattern": "0.5"}, "permute is for N:M patterns"),
        ({"pairs": "norm"}, "choose of heads, channels"),
        ({"pairs": ()}, "no pairs"),
        ({"by": "sparsegpt"}, "'magnitude', 'wanda'"),
        ({"sweeps": 0}, "sweeps=0"),
    ]:
        with pytest.raises(ValueError, match=message):
            permute(**options)
    with pytest.raises(ValueError, match="divides no run of inputs"):
        permute("2:5").rewrite(open_checkpoint(source))
    assert any("5 does not divide" not in note for note in permute("2:3").notes(open_checkpoint(source)))
    with pytest.raises(ValueError, match="needs a calibration"):
        compress(source, permute(by="wanda"), tmp_path / "out")
    with pytest.raises(ValueError, match="put it before the steps that change it"):
        chain(prune("2:4"), permute("2:4"))
    compress(source, quantize("int8:channel"), tmp_path / "int8")
    with pytest.raises(ValueError, match="quantized already"):
        permute().rewrite(open_checkpoint(tmp_path / "int8"))
    broken = calm()
    broken["model.layers.1.mlp.down_proj.weight"][3, 3] = float("nan")
    folder = checkpoint(tmp_path / "nan", dtype=torch.float32, tensors=broken)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj.*NaN"):
        permute().rewrite(open_checkpoint(folder))
