"""Learned rounding as a step: from a checkpoint to a checkpoint, block by block."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halfulp.compress import calibration, chain, compress, gptq, learn, load, open_checkpoint, prune, quantize
from halfulp.compress._compress import plan_of
from halfulp.compress._gptq import codes_of, rounded_of
from halfulp.compress.calibrate import Decoder, _experts
from halfulp.compress.methods import gptq as core_gptq
from halfulp.compress.methods import grid_of
from halfulp.compress.modules import compress_module

from .common import checkpoint, weights
from .test_calibrated import calm, files, moe, resumed_equals_whole, sequences

SOME = {"steps": 24, "batch": 4}
LAST = r"re:.*layers\.1\..*_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source") / "model", dtype=torch.float32, tensors=calm())


def facts(manifest):
    return {name: entry["facts"] for name, entry in manifest["tensors"].items() if entry.get("facts")}


def losses(manifest):
    """The loss of each block before and after, which all of its layers tell alike."""
    found = {}
    for name, told in facts(manifest).items():
        if "block_loss" in told:
            found.setdefault(name.split(".")[2], set()).add(tuple(told["block_loss"]))
    assert all(len(pairs) == 1 for pairs in found.values())
    return {block: next(iter(pairs)) for block, pairs in found.items()}


def outputs(folder, ids, blocks=(0, 1)):
    """The hidden states after each block."""
    found = {}
    model = load(folder)
    for k in blocks:
        model.model.layers[k].register_forward_hook(lambda m, a, out, k=k: found.setdefault(k, []).append(out))
    with torch.inference_mode():
        for row in ids:
            model(row[None])
    return {k: torch.cat([x[0] if isinstance(x, tuple) else x for x in xs]) for k, xs in found.items()}


@pytest.mark.parametrize("fmt", ["int4:g16", "int3:g16:asym", "mxfp4", "nvfp4", "nf4:g32", "e4m3fn:channel"])
def test_any_block_format_is_learned_and_never_above_its_start(tmp_path, source, fmt):
    step = learn(fmt, targets=LAST, **SOME)
    manifest = compress(source, step, tmp_path / "out", calibration=calibration(sequences(4, 16)))
    ((before, after),) = losses(manifest).values()
    assert after < before
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()
    assert manifest["tensors"]["model.layers.1.mlp.up_proj.weight"]["action"] == f"{step.weights} by learned rounding"


@pytest.mark.parametrize("options", [{"propagate": 0.5}, {"goal": "block"}, {"activations": "int8:token"}], ids=str)
def test_the_losses_told_are_those_of_the_model_that_is_written(tmp_path, source, options):
    ids = sequences(4, 20)
    step = learn("int3:g16", **SOME, **options)
    manifest = compress(source, step, tmp_path / "out", calibration=calibration(ids))
    start = replace(step, rounding=step.rounding.start)
    compress(source, start, tmp_path / "start", calibration=calibration(ids))
    want, got, first = (outputs(tmp_path / x if x else source, ids) for x in ("", "out", "start"))
    told = losses(manifest)
    # both are the targets of the first block, whose inputs are the original's
    assert float((first[0] - want[0]).square().mean()) == pytest.approx(told["0"][0], rel=1e-3)
    assert float((got[0] - want[0]).square().mean()) == pytest.approx(told["0"][1], rel=1e-3)
    assert told["0"][1] < 0.97 * told["0"][0]
    if options.get("goal") != "block":
        assert float((got[1] - want[1]).square().mean()) == pytest.approx(told["1"][1], rel=1e-3)
        return
    decoder = Decoder(open_checkpoint(source))
    with torch.inference_mode():
        states = decoder.start(list(ids))
        states.hidden[:] = list(got[0].reshape(len(ids), 1, *got[0].shape[-2:]))
        with decoder.block(1) as block:
            goal = torch.cat([decoder.run(block, 1, states, i) for i in range(len(ids))])
    assert float((got[1] - goal).square().mean()) == pytest.approx(told["1"][1], rel=1e-3)


def test_only_what_says_so_is_learned(tmp_path, source):
    steps = chain(
        learn("int4:g16", targets=r"re:.*layers\.1\.mlp\..*", **SOME),
        learn("int4:g16", targets="*.1.*.o_proj", rule="sign", **SOME),
        gptq("int4:g16", targets="*.v_proj"),
        quantize("int4:g16"),
    )
    manifest = compress(source, steps, tmp_path / "out", calibration=calibration(sequences(4, 16)))
    told = facts(manifest)
    layer = "model.layers.1"
    pairs = [told[f"{layer}.{name}_proj.weight"]["block_loss"] for name in ("mlp.up", "mlp.down", "self_attn.o")]
    assert pairs[0] == pairs[1]
    # one group after the other, in the order in which they run
    assert pairs[0][0] == pairs[2][1]
    assert "block_loss" not in told[f"{layer}.self_attn.v_proj.weight"]
    assert f"{layer}.self_attn.q_proj.weight" not in told


@pytest.mark.parametrize(
    ("kind", "share", "options"),
    [("llama", 0.9, {}), ("llama", 0.3, {"goal": "block", "propagate": 1.0}), ("qwen3_moe", 0.3, {})],
    ids=["late", "early", "moe"],
)
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, kind, share, options, monkeypatch):
    folder = checkpoint(tmp_path / "model", kind, torch.float32)
    step = learn("nvfp4", targets="*_proj", steps=4 if kind == "qwen3_moe" else 20, batch=1, **options)
    stop = int(share * len(plan_of(open_checkpoint(folder), step).rows))
    resumed_equals_whole(tmp_path, folder, step, calibration(sequences(3, 16)), monkeypatch, stop)


def test_runs_agree_and_another_seed_is_another(tmp_path, source):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        step = learn("int3:g16", seed=seed, targets=LAST, **SOME)
        compress(source, step, tmp_path / name, calibration=calibration(sequences(12, 16)))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert files(tmp_path / "a")["model.safetensors"] != files(tmp_path / "c")["model.safetensors"]


@pytest.mark.parametrize(("by", "fmt"), [("magnitude", "nvfp4"), ("sparsegpt", "int4:g16:asym")])
def test_pruned_weights_stay_zero(tmp_path, source, by, fmt):
    steps = chain(prune("2:4", by=by), learn(fmt, targets=LAST, **SOME))
    manifest = compress(source, steps, tmp_path / "out", calibration=calibration(sequences(4, 16)))
    assert any(after < before for before, after in losses(manifest).values())
    for name, weight in load(tmp_path / "out").named_parameters():
        if name.endswith("_proj.weight"):
            assert ((weight == 0).reshape(-1, 4).sum(-1) >= 2).all()


def test_an_expert_that_no_token_reaches_is_not_learned(tmp_path, monkeypatch):
    folder = moe(tmp_path / "model", 3)
    forward = _experts.Experts.forward

    def routed(self, hidden, chosen, share):
        return forward(self, hidden, torch.where(chosen == 2, 1, chosen), share)  # none to the third

    monkeypatch.setattr(_experts.Experts, "forward", routed)
    given = calibration(sequences(4, 24))
    manifest = compress(folder, learn("nvfp4", targets=LAST, **SOME), tmp_path / "out", calibration=given)
    told = facts(manifest)
    for name in ("gate", "up", "down"):
        place = "model.layers.1.mlp.experts"
        assert told[f"{place}.2.{name}_proj.weight"]["fallback"].endswith("other experts saw, not learned")
        assert "block_loss" not in told[f"{place}.2.{name}_proj.weight"]
        before, after = told[f"{place}.1.{name}_proj.weight"]["block_loss"]
        assert after < before
    monkeypatch.undo()
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_layers_that_run_as_one_keep_their_scale(tmp_path):
    tensors = calm()
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 9
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=tensors)
    step = learn("nvfp4", targets=LAST, **SOME)
    manifest = compress(folder, step, tmp_path / "out", calibration=calibration(sequences(4, 16)))
    ((before, after),) = losses(manifest).values()
    assert after < before
    written = load_file(tmp_path / "out" / "model.safetensors")
    scales = {float(written[f"model.layers.1.self_attn.{p}_proj.weight_global_scale"]) for p in "qkv"}
    assert len(scales) == 1


@pytest.mark.parametrize(
    "options", [{"activations": "mxfp8"}, {"activations": "int8:tensor", "static": True}], ids=["dynamic", "static"]
)
def test_inputs_in_formats_let_gradients_through(tmp_path, source, options, monkeypatch):
    step = learn("int3:channel", goal="block", **SOME, **options)
    given = calibration(sequences(4, 16))
    resumed_equals_whole(tmp_path, source, step, given, monkeypatch, 16)
    manifest = json.loads((tmp_path / "out" / "halfulp.json").read_text())
    assert all(after < before for before, after in losses(manifest).values())
    # a layer whose output is read through a rounded input is learned too
    start = replace(step, rounding=step.rounding.start)
    compress(source, start, tmp_path / "start", calibration=given)
    written = [load_file(tmp_path / x / "model.safetensors") for x in ("out", "start")]
    names = [n for n in written[0] if "layers.0" in n and "v_proj.weight" in n]
    assert any(not torch.equal(written[0][n], written[1][n]) for n in names)


def test_weights_that_lie_across_and_short_blocks_are_learned(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=40, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    ids = sequences(4, 24)
    manifest = compress(tmp_path / "gpt2", learn("int3:g16", **SOME), tmp_path / "out", calibration=calibration(ids))
    told = losses(manifest)
    assert all(after < before for before, after in told.values())
    found = outputs_of_gpt2(tmp_path / "out", ids), outputs_of_gpt2(tmp_path / "gpt2", ids)
    assert float((found[0] - found[1]).square().mean()) == pytest.approx(told["0"][1], rel=1e-3)


def outputs_of_gpt2(folder, ids):
    """After the first block."""
    found, model = [], load(folder)
    model.transformer.h[0].register_forward_hook(lambda m, a, out: found.append(out[0] if type(out) is tuple else out))
    with torch.inference_mode():
        for row in ids:
            model(row[None])
    return torch.cat(found)


@pytest.mark.parametrize("fmt", ["int4:g8", "int4:g8:asym", "nvfp4", "mxfp4", "nf4:g32", "int8:channel"])
@pytest.mark.parametrize("across", [False, True])
def test_a_rounding_is_read_back_from_its_codes(fmt, across):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 100))
    fmt = replace(grid_of(fmt).fmt, axis=0) if across else grid_of(fmt).fmt
    one = core_gptq(rng.normal(size=(24, 40)).astype(np.float32), x @ x.T, fmt)
    back = rounded_of(codes_of(one, across, fmt), across)
    for name in ("index", "scale", "shift", "tensor_scale"):
        np.testing.assert_array_equal(getattr(back, name), getattr(one, name))


def test_a_layer_without_a_start_stays_and_the_rest_is_learned(tmp_path):
    tensors = calm()
    # the values are zero, and so is all that o_proj sees
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 0
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=tensors)
    manifest = compress(
        folder, learn("int4:g16", targets=LAST, **SOME), tmp_path / "out", calibration=calibration(sequences(4, 16))
    )
    told = facts(manifest)["model.layers.1.self_attn.o_proj.weight"]
    assert told["fallback"].startswith("rounded to nearest")
    assert "block_loss" not in told
    assert "block_loss" in facts(manifest)["model.layers.1.mlp.up_proj.weight"]


def test_what_cannot_be_is_said(tmp_path, source):
    for options, message in [
        ({"rule": "hard"}, "'sign', 'soft'"),
        ({"goal": "logits"}, "'model', 'block'"),
        ({"steps": 0}, "steps=0"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"damp": -1}, "damp"),
        ({"seed": -1}, "seed"),
        ({"weights": "e4m3fn"}, "needs a format with scales"),
        ({"weights": "int8:tensor"}, "blocks along the inputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            learn(**{"weights": "int4:g16", **options})
    with pytest.raises(ValueError, match="learned rounding needs a calibration"):
        compress(source, learn("int4:g16"), tmp_path / "out")
    with pytest.raises(ValueError, match="take gptq for modules"):
        compress_module(torch.nn.Sequential(torch.nn.Linear(16, 16)), learn("int4:g16"), [torch.ones(2, 16)])
    assert not list(tmp_path.iterdir())


def test_tensors_outside_of_blocks_are_nearest(tmp_path):
    folder = checkpoint(tmp_path / "model", dtype=torch.bfloat16, tensors=weights())
    steps = chain(learn("int4:g16", steps=1), learn("int8:channel", targets="lm_head"))
    manifest = compress(folder, steps, tmp_path / "out", calibration=calibration(sequences(3, 16)))
    assert "int8:channel" in manifest["tensors"]["lm_head.weight"]["action"]
    assert set(losses(manifest)) == {"0", "1"}
