"""Methods that need a calibration, from a checkpoint to a checkpoint."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from halfulp.compress import (
    awq,
    calibration,
    chain,
    compress,
    gptq,
    load,
    open_checkpoint,
    prune,
    quantize,
    rotate,
    shrink,
    smooth,
)
from halfulp.compress._compress import plan_of
from halfulp.compress._stream import StreamWriter
from halfulp.compress.calibrate import Decoder, Seen, _experts, lockstep
from halfulp.compress.methods._gptq import gptq as core_gptq
from halfulp.compress.methods._grid import grid_of
from halfulp.numerics import decode

from .common import checkpoint, stopped_after, weights


def calm():
    """Weights of a network that small changes do not throw off its way."""
    made = weights(dtype=torch.float32)
    return {name: w * 0.3 if name.endswith("_proj.weight") else w for name, w in made.items()}


def sequences(count=6, length=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (count, length), generator=generator)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("source") / "model", dtype=torch.float32, tensors=calm())


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def resumed_equals_whole(tmp_path, folder, steps, given, monkeypatch, stop):
    """A run that is stopped after so many tensors, and goes on, ends with the bytes of one that is not."""
    compress(folder, steps, tmp_path / "whole", calibration=given)
    with stopped_after(monkeypatch, stop):
        compress(folder, steps, tmp_path / "out", calibration=given)
    assert not (tmp_path / "out").exists()
    compress(folder, steps, tmp_path / "out", calibration=given)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


# lockstep


def test_every_forward_is_the_plain_one_and_stops_once_at_each_layer():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
    x = torch.randn(5, 3, 4)
    want = [net(x[i]) for i in range(5)]
    done, visits = {}, []
    layers = {name: m for name, m in net.named_children() if isinstance(m, torch.nn.Linear)}
    for name, inputs in lockstep(lambda i: net(x[i]), 5, layers, done.__setitem__):
        visits.append((name, sorted(inputs)))
    assert visits == [(name, [0, 1, 2, 3, 4]) for name in layers]
    assert all(torch.equal(done[i], want[i]) for i in range(5))


def test_a_weight_replaced_on_the_way_is_the_one_that_is_used():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    done, seen = {}, {}
    with torch.no_grad():
        for name, inputs in lockstep(lambda i: net(torch.ones(1, 2)), 2, dict(net.named_children()), done.__setitem__):
            seen[name] = inputs[0].clone()
            net.get_submodule(name).weight.copy_(torch.eye(2) * 3)
    assert seen["1"].tolist() == [[3, 3]]
    assert done[1].tolist() == [[9, 9]]


def test_branches_are_served_in_order_and_what_none_reaches_is_left_out():
    a, b, c = (torch.nn.Linear(1, 1) for _ in range(3))
    steps = lockstep(
        lambda i: b(a(torch.ones(1))) if i else b(torch.ones(1)), 3, {"a": a, "b": b, "c": c}, lambda *_: None
    )
    assert [(name, sorted(inputs)) for name, inputs in steps] == [("a", [1, 2]), ("b", [0, 1, 2])]


def test_errors_come_out_and_no_thread_stays():
    import threading

    before = threading.active_count()
    layer = torch.nn.Linear(1, 1)

    def work(i):
        layer(torch.ones(1))
        raise RuntimeError(f"sequence {i}")

    with pytest.raises(RuntimeError, match="sequence 0"):
        list(lockstep(work, 3, {"l": layer}, lambda *_: None))
    steps = lockstep(lambda i: layer(torch.ones(1)), 3, {"l": layer}, lambda *_: None)
    next(steps)
    steps.close()
    assert threading.active_count() == before
    assert not layer._forward_pre_hooks


# statistics


def test_statistics_are_the_same_for_any_batch_and_padding():
    rows = [list(range(3, 3 + n)) for n in (5, 9, 2)]
    width = 9
    left = torch.tensor([[0] * (width - len(r)) + r for r in rows])
    right = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    masks = [torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])]
    masks.append(torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]))
    one = calibration(rows)
    assert calibration(left, mask=masks[0]).ids == calibration(right, mask=masks[1]).ids == one.ids


def test_sums_merge_and_are_those_of_the_tokens():
    x = torch.randn(40, 6, dtype=torch.float64)
    whole = Seen.of(x, {"second", "square", "amax", "total"})
    parts = Seen()
    for piece in x.split(7):
        parts += Seen.of(piece, {"second", "square", "amax", "total"})
    assert parts.tokens == whole.tokens == 40
    torch.testing.assert_close(parts.second, x.T @ x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.square, x.square().sum(0), rtol=1e-6, atol=0)
    assert torch.equal(parts.amax, x.float().abs().amax(0))
    with pytest.raises(ValueError, match="NaN"):
        Seen.of(torch.tensor([[1.0, float("nan")]]), {"second"})


def test_text_is_cut_evenly_and_says_when_it_is_short(source):
    cut = calibration("embedded", sequences=5, length=16).tokens(open_checkpoint(source))
    assert [len(ids) for ids in cut] == [16] * 5
    with pytest.raises(ValueError, match="fewer than one sequence of 10000000"):
        calibration("embedded", length=10_000_000).tokens(open_checkpoint(source))
    with pytest.raises(ValueError, match="vocabulary has 128"):
        calibration([[5, 400]]).tokens(open_checkpoint(source))
    for bad in ([], [[]], [[0.5]], [[-1]]):
        with pytest.raises(ValueError, match="token ids"):
            calibration(bad)
    with pytest.raises(ValueError, match="sequences=0"):
        calibration("embedded", sequences=0)


# the decoder


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_block_by_block_is_the_model(tmp_path, kind):
    folder = checkpoint(tmp_path / "model", kind, torch.float32)
    decoder = Decoder(open_checkpoint(folder))
    ids = [row for row in sequences(3, 20)]
    model = load(folder)
    with torch.inference_mode():
        states = decoder.start(ids)
        for k in range(decoder.blocks):
            with decoder.block(k) as block:
                for i in range(3):
                    states.hidden[i] = decoder.run(block, k, states, i)
        for i in range(3):
            # the last hidden state of transformers is after the final norm
            want = model(ids[i][None], output_hidden_states=True).hidden_states[-1]
            torch.testing.assert_close(model.model.norm(states.hidden[i]), want, rtol=1e-4, atol=1e-4)
    assert all(p.is_meta for p in decoder._base.parameters())


# gptq


def test_gptq_loses_less_of_the_output_than_nearest(tmp_path, source):
    ids = sequences(32, 64)
    compress(source, gptq("int4:g16"), tmp_path / "gptq", calibration=calibration(ids))
    compress(source, quantize("int4:g16"), tmp_path / "near")
    held = sequences(4, 32, seed=1)
    with torch.inference_mode():
        want = load(source)(held).logits
        errors = [float((load(tmp_path / name)(held).logits - want).square().mean()) for name in ("gptq", "near")]
    assert errors[0] < 0.8 * errors[1]
    manifest = json.loads((tmp_path / "gptq" / "halfulp.json").read_text())
    entry = manifest["tensors"]["model.layers.0.self_attn.q_proj.weight"]
    assert entry["action"] == "int4:g16 by gptq"
    assert entry["facts"]["tokens"] == 32 * 64
    assert 0 < entry["facts"]["output_loss"] < 0.1
    assert manifest["calibration"]["text"].startswith("32 sequences")


@pytest.mark.parametrize(
    "fmt", ["int4:g16", "int4:g16:asym", "mxfp4", "nvfp4", "int8:channel", "nf4:g32", "e4m3fn:channel"]
)
@pytest.mark.parametrize("options", [{}, {"propagate": 0.5, "sweeps": 1, "order": "static"}])
def test_any_block_format_goes_through_and_loads(tmp_path, source, fmt, options):
    compress(source, gptq(fmt, **options), tmp_path / "out", calibration=calibration(sequences()))
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_what_runs_is_what_is_written(tmp_path, source, monkeypatch):
    """The later blocks were calibrated on the very numbers that a reader of the output finds."""
    ids = sequences()
    compress(source, gptq("int4:g16"), tmp_path / "out", calibration=calibration(ids))
    model = load(tmp_path / "out")
    given = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda m, args: given.append(args[0]))
    with torch.inference_mode():
        for row in ids:
            model(row[None])
    seen = Seen()
    for x in given:
        seen += Seen.of(x, {"second"})
    weight = calm()["model.layers.1.self_attn.q_proj.weight"]
    codes = core_gptq(weight.numpy(), seen.second.numpy(), grid_of("int4:g16").fmt).quantized()
    got = model.model.layers[1].self_attn.q_proj.weight
    assert (decode(codes) == got).float().mean() > 0.995  # the order of a sum may differ


def test_threads_and_runs_agree(tmp_path, source):
    for name in ("a", "b"):
        compress(source, gptq("nvfp4", sweeps=1), tmp_path / name, calibration=calibration(sequences()))
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("share", [0.3, 0.9, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.5, 0.7, 0.99))])
@pytest.mark.parametrize("propagate", [0.0, 1.0])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, kind, share, propagate, monkeypatch):
    folder = checkpoint(tmp_path / "model", kind, torch.float32)
    step = chain(gptq("nvfp4", targets="*_proj", propagate=propagate))
    stop = int(share * len(plan_of(open_checkpoint(folder), step).rows))
    resumed_equals_whole(tmp_path, folder, step, calibration(sequences()), monkeypatch, stop)


def test_another_calibration_is_another_run(tmp_path, source, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamWriter, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(source, gptq("int4:g16"), tmp_path / "out", calibration=calibration(sequences()))
    with pytest.raises(ValueError, match="belongs to another run"):
        compress(source, gptq("int4:g16"), tmp_path / "out", calibration=calibration(sequences(seed=1)))


def moe(folder, experts):
    """A tiny mixture of so many experts, two of which see each token."""
    tensors = {n: w for n, w in weights("qwen3_moe", torch.float32).items() if ".experts." not in n}
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        place = f"model.layers.{layer}.mlp"
        tensors[f"{place}.gate.weight"] = torch.randn(experts, 64, generator=generator)
        for e in range(experts):
            for name, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
                tensors[f"{place}.experts.{e}.{name}_proj.weight"] = torch.randn(shape, generator=generator) * 0.05
    checkpoint(folder, "qwen3_moe", torch.float32, tensors=tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts": experts}))
    return folder


@pytest.mark.parametrize("experts", [3, 64])
@pytest.mark.parametrize("propagate", [0.0, 0.5])
def test_an_expert_that_no_token_reaches_is_calibrated_on_the_others_and_said_so(
    tmp_path, monkeypatch, experts, propagate
):
    folder = moe(tmp_path / "model", experts)
    forward = _experts.Experts.forward

    def routed(self, hidden, chosen, share):
        return forward(self, hidden, torch.where(chosen == 2, 1, chosen), share)  # none to the third

    monkeypatch.setattr(_experts.Experts, "forward", routed)
    step = gptq("int4:g16", targets="*_proj", propagate=propagate)
    manifest = compress(folder, step, tmp_path / "out", calibration=calibration(sequences(8, 48)))
    for layer in range(2):
        for name in ("gate", "up", "down"):
            facts = manifest["tensors"][f"model.layers.{layer}.mlp.experts.2.{name}_proj.weight"]["facts"]
            assert "no token was routed to it" in facts["fallback"]
            assert facts["tokens"] == 8 * 48 * 2  # what the others saw, two for each token
    told = [note for note in manifest["notes"] if "no token was routed" in note]
    assert len(told) == 1
    assert "model.layers.0.mlp.experts.2" in told[0]
    assert "fallback" not in manifest["tensors"]["model.layers.1.mlp.experts.1.up_proj.weight"]["facts"]
    monkeypatch.undo()
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_a_method_without_its_calibration_is_refused_before_anything_is_written(tmp_path, source):
    with pytest.raises(ValueError, match=r"gptq needs a calibration"):
        compress(source, gptq("int4:g16"), tmp_path / "out")
    with pytest.raises(ValueError, match=r"wanda needs a calibration"):
        compress(source, prune("2:4", by="wanda"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_activations_that_overflow_are_named(tmp_path):
    tensors = weights(dtype=torch.float32)
    tensors["model.layers.1.input_layernorm.weight"] *= 1e38
    tensors["model.layers.1.input_layernorm.weight"] *= 1e38
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=tensors)
    with pytest.raises(ValueError, match="NaN or infinity"):
        compress(folder, gptq("int4:g16"), tmp_path / "out", calibration=calibration(sequences()))
    assert not (tmp_path / "out").exists()


def test_options_out_of_range_are_named():
    for options, message in [
        ({"damp": -1}, "damp"),
        ({"order": "best"}, "'none', 'group', 'static'"),
        ({"sweeps": -1}, "sweeps"),
        ({"propagate": 2}, "propagate"),
    ]:
        with pytest.raises(ValueError, match=message):
            gptq("int4:g16", **options)
    for fmt, message in [
        ("e4m3fn", "needs a format with scales"),
        ("int4:32x32", "blocks along the inputs"),
        ("int16:g32", "8 bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            gptq(fmt)


# pruning


@pytest.mark.parametrize("by", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", ["2:4", "0.5"])
def test_masks_are_exact_on_disk_after_quantization(tmp_path, source, by, pattern):
    steps = chain(prune(pattern, by=by), gptq("int4:g16"))
    compress(source, steps, tmp_path / "out", calibration=calibration(sequences()))
    for name, weight in load(tmp_path / "out").named_parameters():
        if name.endswith("_proj.weight"):
            zeros = (weight == 0).reshape(-1, 4).sum(-1)
            assert (zeros >= 2).all() if pattern == "2:4" else (weight == 0).float().mean() >= 0.45
    shutil.rmtree(tmp_path / "out")


def test_better_scores_lose_less(tmp_path, source):
    held = sequences(4, 32, seed=1)
    want = load(source)(held).logits
    errors = {}
    for by in ("magnitude", "wanda", "sparsegpt"):
        compress(source, prune("0.5", by=by), tmp_path / by, calibration=calibration(sequences(32, 64)))
        with torch.inference_mode():
            errors[by] = float((load(tmp_path / by)(held).logits - want).square().mean())
    assert errors["sparsegpt"] < errors["magnitude"]
    assert errors["wanda"] < errors["magnitude"]
    assert load_file(tmp_path / "wanda" / "model.safetensors").keys() == calm().keys()


# rewrites in a chain


def close(folder, source, tolerance):
    ids = sequences(2, 24, seed=3)
    with torch.inference_mode():
        want, got = load(source)(ids).logits, load(folder)(ids).logits
    return float((want - got).abs().max() / want.abs().max()) < tolerance


@pytest.mark.parametrize(
    "step",
    [
        rotate(),
        rotate("block:32"),
        rotate(None),
        smooth(0.5),
        smooth(1.0, pairs=["norm", "heads", "channels"]),
        awq("int3:g16"),
    ],
    ids=str,
)
def test_a_rewrite_alone_gives_a_model_of_the_same_function(tmp_path, source, step):
    manifest = compress(source, step, tmp_path / "out", calibration=calibration(sequences()))
    assert close(tmp_path / "out", source, 1e-4)
    assert manifest["notes"]
    changed = load_file(tmp_path / "out" / "model.safetensors")
    assert not torch.equal(
        changed["model.layers.0.self_attn.v_proj.weight"], calm()["model.layers.0.self_attn.v_proj.weight"]
    )


@pytest.mark.parametrize("first", [rotate(), smooth(0.5), awq("int4:g16")], ids=str)
def test_a_rewrite_goes_before_any_rounding_and_resumes(tmp_path, source, first, monkeypatch):
    steps = chain(first, prune("2:4", by="wanda"), gptq("int4:g16", activations="int8:token"))
    resumed_equals_whole(tmp_path, source, steps, calibration(sequences()), monkeypatch, 12)
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_awq_helps_where_some_channels_are_active(tmp_path):
    tensors = calm()
    for layer in range(2):
        tensors[f"model.layers.{layer}.input_layernorm.weight"][::8] *= 12
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"][::8] *= 12
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=tensors)
    given, held = calibration(sequences(16, 48)), sequences(4, 32, seed=1)
    errors = {}
    for name, steps in {"plain": quantize("int3:g16"), "awq": chain(awq("int3:g16"), quantize("int3:g16"))}.items():
        compress(folder, steps, tmp_path / name, calibration=given)
        with torch.inference_mode():
            errors[name] = float((load(tmp_path / name)(held).logits - load(folder)(held).logits).square().mean())
    assert errors["awq"] < 0.7 * errors["plain"]


def test_a_rewrite_after_rounding_is_refused_and_a_measured_one_wants_its_calibration(tmp_path, source):
    with pytest.raises(ValueError, match="put it before the steps that change it"):
        chain(quantize("int4:g16"), smooth(0.5))
    with pytest.raises(ValueError, match="smooth needs a calibration"):
        compress(source, chain(smooth(0.5), quantize("int4:g16")), tmp_path / "out")
    assert plan_of(open_checkpoint(source), chain(smooth(0.5), quantize("int4:g16"))).rows
    assert not list(tmp_path.iterdir())


# scales that runtimes share


@pytest.mark.parametrize(
    "step", [quantize("nvfp4"), gptq("nvfp4"), quantize("e4m3fn:tensor")], ids=["nearest", "gptq", "tensor"]
)
def test_layers_that_run_as_one_have_one_tensor_scale(tmp_path, step):
    tensors = calm()
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 9
    tensors["model.layers.1.mlp.up_proj.weight"] *= 9
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=tensors)
    compress(folder, step, tmp_path / "out", calibration=calibration(sequences()) if step.rounding else None)
    written = load_file(tmp_path / "out" / "model.safetensors")
    key = "weight_scale" if "tensor" in str(step.weights) else "weight_global_scale"
    for layer in range(2):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            scales = [written[f"model.layers.{layer}.{name}.{key}"] for name in group]
            assert all(torch.equal(scales[0], other) for other in scales)
    alone = written[f"model.layers.0.self_attn.o_proj.{key}"]
    assert not torch.equal(alone, written[f"model.layers.0.self_attn.q_proj.{key}"])
    # the weights mean what they meant
    for name, parameter in load(tmp_path / "out").named_parameters():
        if name.endswith("_proj.weight"):
            assert float((parameter.detach() - tensors[name]).norm() / tensors[name].norm()) < 0.25


def test_formats_that_differ_share_nothing():
    steps = chain(quantize("nvfp4", targets="*.q_proj"), quantize("int4:g16"))
    shapes = {f"model.layers.0.self_attn.{p}_proj.weight": (16, 16) for p in "qkv"}
    assert not any(row.shares for row in plan_of(shapes, steps).rows)
    assert len(plan_of(shapes, quantize("nvfp4")).rows[0].shares) == 3


def test_layers_are_calibrated_on_the_rounded_inputs_that_they_will_have(tmp_path, source):
    ids = sequences()
    step = gptq("int8:channel", activations="int4:token")
    compress(source, step, tmp_path / "out", calibration=calibration(ids))
    model, seen = load(tmp_path / "out"), Seen()
    given = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, args: given.append(args[0]))
    with torch.inference_mode():
        for row in ids:
            model(row[None])
    for x in given:
        seen += Seen.of(x, {"second"})
    weight = calm()["model.layers.1.mlp.down_proj.weight"]
    want = core_gptq(weight.numpy(), seen.second.numpy(), grid_of("int8:channel").fmt)
    got = model.model.layers[1].mlp.down_proj.weight
    assert (decode(want.quantized()) == got).float().mean() > 0.98


# static activations


@pytest.mark.parametrize("make", [quantize, gptq], ids=["nearest", "gptq"])
@pytest.mark.parametrize("fmt", ["int8:tensor:rule=absmax_half", "e4m3fn:tensor"])
def test_static_scales_are_the_largest_input_seen_and_are_used(tmp_path, source, make, fmt):
    ids = sequences()
    element = "int8:channel" if "int8" in fmt else "e4m3fn:channel"
    compress(source, make(element, activations=fmt, static=True), tmp_path / "out", calibration=calibration(ids))
    written = load_file(tmp_path / "out" / "model.safetensors")
    model, largest = load(tmp_path / "out"), {}
    for name in ("self_attn.k_proj", "mlp.down_proj"):
        module = model.model.layers[1].get_submodule(name)
        module.register_forward_pre_hook(
            lambda m, args, name=name: largest.setdefault(name, []).append(args[0].abs().max())
        )
    with torch.inference_mode():
        for row in ids:
            model(row[None])
    for name, seen in largest.items():
        scale = written[f"model.layers.1.{name}.input_scale"]
        # hooks see the rounded input, within half a step of what was measured
        assert float(max(seen) / scale) == pytest.approx(127 if "int8" in fmt else 448, rel=0.05)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    given = next(iter(config["config_groups"].values()))["input_activations"]
    assert (given["dynamic"], given["strategy"]) == (False, "tensor")
    assert (
        written["model.layers.0.self_attn.q_proj.input_scale"] == written["model.layers.0.self_attn.v_proj.input_scale"]
    )


def test_static_scales_resume_to_the_same_bytes(tmp_path, source, monkeypatch):
    step = gptq("int8:channel", activations="int8:tensor", static=True)
    resumed_equals_whole(tmp_path, source, step, calibration(sequences()), monkeypatch, 16)


def test_static_scales_that_cannot_be_are_refused(tmp_path, source):
    for fmt in ("int8:token", "mxfp8", "e4m3fn", "uint8:tensor:asym"):
        with pytest.raises(ValueError, match="static activations"):
            quantize("int8:channel", activations=fmt, static=True)
    with pytest.raises(ValueError, match="static activations"):
        quantize("int8:channel", static=True)
    step = quantize("int8:channel", activations="int8:tensor", static=True, targets=["*.q_proj", "lm_head"])
    with pytest.raises(ValueError, match=r"lm_head.*(measured for linear layers only|never reached)"):
        compress(source, step, tmp_path / "out", calibration=calibration(sequences()))


# gpt2 stores its weights as [inputs, outputs]


def test_conv1d_weights_are_rounded_along_their_inputs(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    ids = sequences(8, 32)
    rows = plan_of(open_checkpoint(folder), quantize("int4:g16")).rows
    assert {row.axis for row in rows if row.weights is not None} == {0}
    errors = {}
    held = sequences(2, 32, seed=5)
    for name, step in {
        "near": quantize("int4:g16"),
        "gptq": gptq("int4:g16"),
        "nvfp4": gptq("nvfp4", propagate=0.5),
    }.items():
        compress(folder, step, tmp_path / name, calibration=calibration(ids))
        with torch.inference_mode():
            errors[name] = float((load(tmp_path / name)(held).logits - load(folder)(held).logits).square().mean())
    assert errors["gptq"] < errors["near"]
    compress(folder, prune("2:4", by="sparsegpt"), tmp_path / "sparse", calibration=calibration(ids))
    weight = load(tmp_path / "sparse").transformer.h[1].mlp.c_fc.weight
    assert ((weight.T.reshape(-1, 4) == 0).sum(-1) >= 2).all()


# what a review found


@pytest.mark.parametrize(
    "options", [{"activations": "int4:token"}, {"activations": "int8:tensor", "static": True}], ids=str
)
def test_the_original_stream_is_not_rounded(tmp_path, source, options, monkeypatch):
    steps = gptq("int8:channel", propagate=1.0, **options)
    resumed_equals_whole(tmp_path, source, steps, calibration(sequences()), monkeypatch, 16)


def test_layers_that_read_one_tensor_and_ask_for_different_things_get_them(tmp_path, source):
    steps = chain(prune("2:4", by="wanda", targets="*.q_proj"), gptq("int4:g16", targets=["*.k_proj", "*.v_proj"]))
    manifest = compress(source, steps, tmp_path / "out", calibration=calibration(sequences()))
    assert not [t for t in manifest["tensors"].values() if "fallback" in t.get("facts", {})]


def hf_checkpoint(folder, kind, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | changes)))
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


GLM = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
GLM |= {"first_k_dense_replace": 0, "n_shared_experts": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "changes"), [("glm4_moe", GLM), ("phi3", {}), ("gemma2", {"head_dim": 8}), ("qwen3", {"head_dim": 8})]
)
def test_decoders_of_other_kinds_are_the_model_and_resume(tmp_path, kind, changes, monkeypatch):
    folder = hf_checkpoint(tmp_path / "model", kind, **changes)
    decoder, ids = Decoder(open_checkpoint(folder)), sequences(2, 12)
    with torch.inference_mode():
        states = decoder.start(list(ids))
        for k in range(decoder.blocks):
            with decoder.block(k) as block:
                for i in range(2):
                    states.hidden[i] = decoder.run(block, k, states, i)
        model = load(folder)
        want = model(ids[1][None], output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(model.model.norm(states.hidden[1]), want, rtol=1e-4, atol=1e-4)
    names = decoder.tensors_of(0)
    targets = [n.removesuffix(".weight") for n in names.values() if "_proj." in n]
    targets += [n.removesuffix(".weight") for n in decoder.tensors_of(1).values() if "_proj." in n]
    steps = gptq("int4:g8", propagate=1.0, targets=targets)
    resumed_equals_whole(tmp_path, folder, steps, calibration(ids), monkeypatch, len(decoder.checkpoint.tensors) - 3)


def test_fused_experts_stay_nearest_beside_calibrated_layers(tmp_path):
    folder = checkpoint(tmp_path / "model", "gpt_oss", torch.float32)
    manifest = compress(folder, gptq("int4:g16"), tmp_path / "out", calibration=calibration(sequences()))
    assert manifest["tensors"]["model.layers.0.self_attn.q_proj.weight"]["facts"]["tokens"]
    assert "rounded to nearest" in manifest["tensors"]["model.layers.0.mlp.experts.down_proj"]["why"]


def test_a_shared_scale_stays_shared_when_pruning_makes_weights_larger(tmp_path, source):
    steps = chain(prune("1:4", by="sparsegpt"), quantize("nvfp4"))
    compress(source, steps, tmp_path / "out", calibration=calibration(sequences()))
    written = load_file(tmp_path / "out" / "model.safetensors")
    scales = {float(written[f"model.layers.1.mlp.{name}_proj.weight_global_scale"]) for name in ("gate", "up")}
    assert len(scales) == 1


def test_a_compressed_embedding_is_what_the_first_block_reads(tmp_path, source):
    steps = chain(quantize("int2:channel", targets="embed_tokens"), gptq("int8:channel"))
    ids = sequences()
    compress(source, steps, tmp_path / "out", calibration=calibration(ids))
    model, seen = load(tmp_path / "out"), Seen()
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)).detach()
    for x in hidden:
        seen += Seen.of(x, {"second"})
    weight = calm()["model.layers.0.self_attn.q_proj.weight"]
    want = core_gptq(weight.numpy(), seen.second.numpy(), grid_of("int8:channel").fmt)
    assert (decode(want.quantized()) == model.model.layers[0].self_attn.q_proj.weight).float().mean() > 0.99


def test_what_is_wrong_with_a_calibration_shows_before_anything_is_written(tmp_path, source):
    for given, message in [
        (calibration("embedded", length=100_000), "fewer than|model takes 128"),
        (calibration([[5, 400]]), "vocabulary has 128"),
        (calibration([list(range(3, 100)) * 2]), "the model takes 128"),
    ]:
        with pytest.raises(ValueError, match=message):
            compress(source, gptq("int4:g16"), tmp_path / "out", calibration=given)
    assert not list(tmp_path.iterdir())
    for odd in (torch.tensor([5, 6, 7]), torch.zeros(2, 2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="shape"):
            calibration(odd)
    with pytest.raises(ValueError, match="mask"):
        calibration("embedded", mask=torch.ones(1))


def test_another_tokenizer_is_another_run(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path / "model", dtype=torch.float32, tensors=calm())
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 90}" for i in range(400)))
    given = calibration(str(text), sequences=4, length=24)

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    finish = StreamWriter.finish
    monkeypatch.setattr(StreamWriter, "finish", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(folder, gptq("int4:g16"), tmp_path / "out", calibration=given)
    monkeypatch.setattr(StreamWriter, "finish", finish)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["w1"], words["w2"] = words["w2"], words["w1"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="another run"):
        compress(folder, gptq("int4:g16"), tmp_path / "out", calibration=given)


def test_zero_points_of_a_whole_tensor_have_our_layout(tmp_path, source):
    compress(source, quantize("int8:tensor:asym", targets="*.o_proj"), tmp_path / "out")
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_tiles_under_a_tensor_scale_are_their_own(tmp_path, source):
    compress(source, quantize("e2m1:4x4:scale=e4m3fn:tensor_scale=fp32"), tmp_path / "out")
    assert torch.isfinite(load(tmp_path / "out")(sequences(1)).logits).all()


def test_a_plan_has_the_shapes_of_a_model_to_be_shrunk(source):
    steps = chain(shrink(channels=40, by="activations"), quantize("int4:g32"))
    plan = plan_of(open_checkpoint(source), steps)
    shapes = {row.name: row.spec.shape for row in plan.rows}
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (64, 40)
    assert any("follow from the calibration" in note for note in plan.notes)
