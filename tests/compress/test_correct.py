"""Low-rank correction of a compressed model, from two checkpoints to an adapter that PEFT reads."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from halfulp.compress import (
    calibration,
    chain,
    compress,
    correct,
    load,
    open_checkpoint,
    prune,
    quantize,
    rotate,
)
from halfulp.compress._adapter import read_adapter
from halfulp.compress.calibrate import Seen
from halfulp.compress.methods import low_rank

from .common import checkpoint, stopped_after, weights
from .test_calibrated import calm, files, sequences

NAME = "model.layers.{}.{}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model, and what several recipes made of it."""
    folder = tmp_path_factory.mktemp("correct")
    checkpoint(folder / "model", dtype=torch.float32, tensors=calm())
    compress(folder / "model", quantize("int3:g16"), folder / "int3")
    compress(folder / "model", quantize("int4:channel", activations="int4:token", kv="e4m3fn"), folder / "w4a4")
    return folder


def logits(model, ids=None):
    with torch.inference_mode():
        return model(sequences(3, 24, seed=9) if ids is None else ids).logits


def distance(home, compressed, adapter=None):
    return float((logits(load(home / compressed, adapter=adapter)) - logits(load(home / "model"))).square().mean())


def test_factors_are_those_of_the_method_and_the_manifest_says_what_they_do(tmp_path, home):
    told = correct(home / "int3", home / "model", out=tmp_path / "a", rank=4, fmt="fp32")
    assert told == json.loads((tmp_path / "a" / "halfulp_adapter.json").read_text())
    assert len(told["layers"]) == 14
    written = load_file(tmp_path / "a" / "adapter_model.safetensors")
    quantized = load(home / "int3").state_dict()
    for name, entry in told["layers"].items():
        w, q = calm()[name].double().numpy(), quantized[name].double().numpy()
        b, a = low_rank(w, q, 4)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        assert written[f"{key}A.weight"].shape == (4, w.shape[1])
        np.testing.assert_allclose(
            written[f"{key}B.weight"].double() @ written[f"{key}A.weight"].double(), b @ a, atol=1e-6
        )
        assert entry["before"] == pytest.approx(np.linalg.norm(w - q) / np.linalg.norm(w), rel=1e-5)
        assert entry["after"] == pytest.approx(np.linalg.norm(w - q - b @ a) / np.linalg.norm(w), rel=1e-5)
        assert entry["after"] < entry["before"]
        assert entry["bits_per_weight"] == 32 * 4 * sum(w.shape) / w.size
    numbers = sum(t.numel() for t in written.values())
    assert told["bytes"] == 4 * numbers
    of = sum(calm()[name].numel() for name in told["layers"])
    assert told["bits_per_weight"]["adapter"] == pytest.approx(32 * numbers / of)


def test_a_model_with_its_adapter_is_the_one_with_merged_weights_and_is_nearer(tmp_path, home):
    correct(home / "int3", home / "model", out=tmp_path / "a", rank=24)
    model = load(home / "int3")
    adapters = read_adapter(tmp_path / "a")
    with torch.no_grad():
        for name, a in adapters.a.items():
            model.get_submodule(name).weight += adapters.b[name].float() @ a.float()
    beside = load(home / "int3", adapter=tmp_path / "a")
    torch.testing.assert_close(logits(beside), logits(model), rtol=1e-4, atol=1e-4)
    assert "low-rank adapter of rank 24 beside 14 layers" in beside.halfulp_path
    # the adapter's folder is a model of its own
    assert torch.equal(logits(load(tmp_path / "a")), logits(beside))
    assert distance(home, "int3", tmp_path / "a") < 0.5 * distance(home, "int3")


def test_a_calibration_helps_and_its_inputs_are_those_of_the_corrected_model(tmp_path, home):
    ids = sequences(8, 32)
    plain = correct(home / "int3", home / "model", out=tmp_path / "plain", rank=8)
    given = {"calibration": calibration(ids), "rank": 8}
    told = correct(home / "int3", home / "model", out=tmp_path / "seen", **given)
    assert distance(home, "int3", tmp_path / "seen") < distance(home, "int3", tmp_path / "plain")
    assert all(layer["after"] < layer["before"] and layer["tokens"] == 256 for layer in told["layers"].values())
    assert plain["calibration"] is None
    assert "8 sequences" in told["calibration"]
    # what a layer of the last block sees in the model with its adapter
    model, seen = load(home / "int3", adapter=tmp_path / "seen"), []
    name = NAME.format(1, "mlp.down_proj")
    model.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    for row in ids:
        logits(model, row[None])
    second = sum((Seen.of(x, {"second"}) for x in seen), Seen()).second.numpy()
    w, q = calm()[f"{name}.weight"].double().numpy(), load(home / "int3").get_submodule(name).weight
    b, a = low_rank(w, q.detach().double().numpy(), 8, second, fmt="bf16")
    found = read_adapter(tmp_path / "seen")
    np.testing.assert_allclose(
        (found.b[name].double() @ found.a[name].double()).numpy(), b @ a, atol=0.02 * np.abs(b @ a).max()
    )
    e = w - q.detach().double().numpy()
    x = np.linalg.cholesky(second + 1e-9 * np.trace(second) * np.eye(len(second)))
    norm = np.linalg.norm(w @ x)
    assert told["layers"][f"{name}.weight"]["before"] == pytest.approx(np.linalg.norm(e @ x) / norm, rel=1e-3)
    assert told["layers"][f"{name}.weight"]["after"] == pytest.approx(np.linalg.norm((e - b @ a) @ x) / norm, rel=1e-2)


def test_adapters_read_inputs_as_they_come_where_layers_round_them(tmp_path, home):
    for given in (None, calibration(sequences(8, 32))):
        out = tmp_path / f"{given is None}"
        correct(home / "w4a4", home / "model", out=out, rank=16, calibration=given)
        model, found = load(home / "w4a4", adapter=out), read_adapter(out)
        name = NAME.format(0, "self_attn.o_proj")
        module, given_to, got = model.get_submodule(name), [], []
        bare = load(home / "w4a4").get_submodule(name)
        module.register_forward_pre_hook(lambda m, args, given_to=given_to: given_to.append(args[0]), prepend=True)
        module.register_forward_hook(lambda m, args, y, got=got: got.append(y))
        logits(model)
        with torch.inference_mode():
            want = bare(given_to[0]) + given_to[0] @ (found.b[name].float() @ found.a[name].float()).T
        torch.testing.assert_close(got[0], want, rtol=1e-4, atol=1e-4)


def test_static_activations_and_pruned_weights(tmp_path, home):
    ids = calibration(sequences(4, 24))
    steps = chain(prune("2:4"), quantize("int8:channel", activations="int8:tensor", static=True))
    compress(home / "model", steps, tmp_path / "out", calibration=ids)
    told = correct(tmp_path / "out", home / "model", out=tmp_path / "a", rank=8, calibration=ids)
    assert all(layer["after"] < layer["before"] for layer in told["layers"].values())
    assert torch.isfinite(logits(load(tmp_path / "a"))).all()
    compress(home / "model", prune("2:4", targets="*.down_proj"), tmp_path / "pruned")
    assert len(correct(tmp_path / "pruned", home / "model", out=tmp_path / "b")["layers"]) == 2


@pytest.mark.parametrize("given", [None, calibration(sequences(4, 24))], ids=["weights", "calibrated"])
@pytest.mark.parametrize("stop", [3, 9])
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, home, given, stop, monkeypatch):
    def run(folder):
        correct(home / "w4a4", home / "model", out=folder / "a", rank=4, calibration=given)

    (tmp_path / "whole").mkdir()
    run(tmp_path / "whole")
    with stopped_after(monkeypatch, stop):
        run(tmp_path)
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="another run"):
        correct(home / "w4a4", home / "model", out=tmp_path / "a", rank=5, calibration=given)
    run(tmp_path)
    assert files(tmp_path / "a") == files(tmp_path / "whole" / "a")
    assert set(files(tmp_path / "a")) == {"adapter_config.json", "adapter_model.safetensors", "halfulp_adapter.json"}


def test_a_run_stopped_before_its_last_renames_is_whole(tmp_path, home, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", stop)
        with pytest.raises(KeyboardInterrupt):
            correct(home / "int3", home / "model", out=tmp_path / "a", rank=4)
    with monkeypatch.context() as patch:
        patch.setattr("halfulp.compress._correct._Work", stop)  # nothing is left to do
        correct(home / "int3", home / "model", out=tmp_path / "a", rank=4)
    assert len(read_adapter(tmp_path / "a").a) == 14


def test_a_rewritten_model_is_corrected_against_the_rewritten_source(tmp_path, home):
    steps = chain(rotate(head="keep"), quantize("int3:g16"))
    compress(home / "model", steps, tmp_path / "out")
    with pytest.raises(ValueError, match="rewritten model, an output of these steps alone"):
        correct(tmp_path / "out", home / "model", out=tmp_path / "a")
    view = rotate(head="keep").rewrite(open_checkpoint(home / "model"))
    told = correct(tmp_path / "out", view, out=tmp_path / "a", rank=4)
    compress(home / "model", rotate(head="keep"), tmp_path / "rotated")
    assert correct(tmp_path / "out", tmp_path / "rotated", out=tmp_path / "b", rank=4) == told
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_tied_embeddings_and_experts(tmp_path):
    source = checkpoint(tmp_path / "tied", dtype=torch.bfloat16, tied=True)
    compress(source, quantize("int4:g16", targets=["linear", "embed_tokens"]), tmp_path / "out")
    with pytest.raises(ValueError, match="tied"):
        correct(tmp_path / "out", source, out=tmp_path / "a", targets=["lm_head"])
    with pytest.raises(ValueError, match=r"no linear layer for model\.embed_tokens"):
        correct(tmp_path / "out", source, out=tmp_path / "a", targets=["embed_tokens"])
    correct(tmp_path / "out", source, out=tmp_path / "a", rank=4, calibration=calibration(sequences(2)))
    assert torch.isfinite(logits(load(tmp_path / "a"))).all()
    for kind in ("qwen3_moe", "gpt_oss"):
        folder = checkpoint(tmp_path / kind, kind, torch.float32, tensors=weights(kind, torch.float32))
        compress(folder, quantize("int4:g16"), tmp_path / f"{kind}-out")
        for given in (None, calibration(sequences(2))):
            out = tmp_path / f"{kind}-{given is None}"
            told = correct(tmp_path / f"{kind}-out", folder, out=out, rank=4, calibration=given)
            assert len(told["layers"]) == 8
            assert "no linear layer for them: model.layers.0.mlp.experts" in told["notes"][0]
            assert torch.isfinite(logits(load(out))).all()


def test_an_untied_head_is_corrected_by_its_weights(tmp_path, home):
    steps = quantize("int4:g16", targets=["lm_head", "*.q_proj"])
    compress(home / "model", steps, tmp_path / "out")
    given = {"targets": ["lm_head", "*.q_proj"], "ignore": ["*.1.*"], "calibration": calibration(sequences(2))}
    told = correct(tmp_path / "out", home / "model", out=tmp_path / "a", **given)
    assert sorted(told["layers"]) == ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]
    assert "tokens" in told["layers"]["model.layers.0.self_attn.q_proj.weight"]
    assert "outside of the decoder blocks" in told["layers"]["lm_head.weight"]["fallback"]
    assert "(lm_head.weight)" in told["notes"][0]
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "model.layers.0.self_attn.q_proj"]


def test_conv1d_weights(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", quantize("int3:g16"), tmp_path / "out")
    for given in (None, calibration(sequences(2))):
        out = tmp_path / f"{given is None}"
        told = correct(tmp_path / "out", tmp_path / "model", out=out, rank=24, calibration=given)
        assert len(told["layers"]) == 8
        assert distance(tmp_path, "out", out) < 0.5 * distance(tmp_path, "out")
        assert json.loads((out / "adapter_config.json").read_text())["fan_in_fan_out"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("activations", [None, "int8:token"])
def test_peft_computes_the_same(tmp_path, home, activations):
    peft = pytest.importorskip("peft")
    compress(home / "model", quantize("int4:g32", activations=activations), tmp_path / "out")
    correct(tmp_path / "out", home / "model", out=tmp_path / "a", rank=8)
    model = peft.PeftModel.from_pretrained(load(tmp_path / "out"), tmp_path / "a").eval()
    ours = logits(load(tmp_path / "a"))
    assert not torch.allclose(ours, logits(load(tmp_path / "out")), atol=1e-3)
    torch.testing.assert_close(logits(model), ours, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_corrected_is_named(tmp_path, home):
    out = tmp_path / "a"
    other = {**calm(), "model.norm.weight": torch.ones(64)}
    checkpoint(tmp_path / "other", dtype=torch.float32, tensors=other)
    for given, options, message in [
        (("model", "int3"), {}, "no output of halfulp"),
        (("int3", "int3"), {}, "is quantized"),
        (("int3", tmp_path / "other"), {}, r"was not made from .*other as it is, but from model"),
        (("int3", "model"), {"rank": 32}, r"rank=32: model.layers.0.self_attn.k_proj \[32, 64\] takes 1 to 31"),
        (("int3", "model"), {"rank": True}, "rank=True"),
        (("int3", "model"), {"fmt": "e4m3fn"}, "readers of adapters know bf16, fp16, fp32"),
        (("int3", "model"), {"targets": "*.x_proj"}, "matches no module"),
        (("int3", "model"), {"targets": "lm_head"}, "the targets were not compressed"),
        (("int3", "model"), {"calibration": calibration([[500]])}, "vocabulary"),
    ]:
        with pytest.raises(ValueError, match=message):
            correct(home / given[0], home / given[1], out=out, **options)
        assert not out.exists()
        assert not out.with_name("a.partial").exists()
    out.mkdir()
    (out / "file").touch()
    with pytest.raises(FileExistsError, match="exists"):
        correct(home / "int3", home / "model", out=out)


# reading adapters


@pytest.fixture
def adapter(tmp_path, home):
    correct(home / "int3", home / "model", out=tmp_path / "a", rank=4, fmt="fp32", targets="*.down_proj")
    return tmp_path / "a"


def edited(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_scalings_of_peft(adapter):
    edited(adapter, lora_alpha=2)
    assert read_adapter(adapter).scale == 0.5
    edited(adapter, use_rslora=True)
    assert read_adapter(adapter).scale == 1.0


def test_an_adapter_of_something_else_is_refused(tmp_path, home, adapter):
    kept = {path.name: path.read_bytes() for path in adapter.iterdir()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    for changes, given, message in [
        ({"use_dora": True}, {}, "use_dora=True, which is not understood"),
        ({"peft_type": "IA3"}, {}, "IA3"),
        ({"r": 8}, {}, "not of rank 8"),
        ({"r": None}, {}, "r=None"),
        ({}, {f"{key}magnitude": torch.ones(2)}, "magnitude: expected"),
        ({}, {f"{key}A.weight": None}, "one factor without the other"),
        ({}, {f"{key}B.weight": torch.ones(3, 4)}, r"for \[3, 96\], and the model has \[64, 96\]"),
        ({}, {k.replace("layers.0", "layers.7"): v + 0 for k, v in tensors.items()}, "which the model lacks"),
    ]:
        edited(adapter, **changes)
        made = {name: t for name, t in (tensors | given).items() if t is not None}
        save_file(made, adapter / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(home / "int3", adapter=adapter)
        for name, data in kept.items():
            (adapter / name).write_bytes(data)
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json"):
        load(home / "int3", adapter=home / "model")


def test_the_model_of_an_adapter_is_found_beside_it(tmp_path, home, adapter):
    edited(adapter, base_model_name_or_path="/nowhere/int3")
    with pytest.raises(FileNotFoundError, match=r"/nowhere/int3, which is not there"):
        load(adapter)
    (tmp_path / "int3").symlink_to(home / "int3")
    assert load(adapter).halfulp_path.endswith("beside 2 layers")
    edited(adapter, base_model_name_or_path=None)
    with pytest.raises(ValueError, match="has no base_model_name_or_path"):
        load(adapter)
