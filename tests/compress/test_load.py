"""Compressed checkpoints as models: in transformers without halfulp, and in halfulp.load."""

import json
import shutil
import warnings

import pytest
import torch

from halfulp.compress import chain, compress, load, prune, quantize
from halfulp.compress._checkpoint import open_checkpoint
from halfulp.compress._load import manifest_of, tensors
from halfulp.numerics import cast, format
from halfulp.recipes import read_recipe

from .common import IDS, checkpoint, in_transformers, logits_of, shapes, weights

BF16, F32 = torch.bfloat16, torch.float32


def recipe(name):
    return read_recipe(name)[0].transform()


# name: what is compressed, how, and the dtype that transformers is asked for
SAME = {
    "w8a8-int8 f32": ({"dtype": F32}, "w8a8-int8", "auto"),
    "w8a8-int8 bf16 run in f32": ({}, "w8a8-int8", "float32"),
    "w8a8-int8 tied, sharded": ({"dtype": F32, "tied": True, "shard_bytes": 50_000}, "w8a8-int8", "auto"),
    "fp8 f32": ({"dtype": F32}, "fp8", "auto"),
    "fp8 bf16 run in f32": ({}, "fp8", "float32"),
    "w4a16-g128": ({"hidden": 128, "inner": 256}, "w4a16-g128", "auto"),
    "w4a16-g128 f32": ({"dtype": F32, "hidden": 128, "inner": 256}, "w4a16-g128", "auto"),
    "w4a16-g128 refit": ({}, "w4a16-g128", "auto"),
    "w4a16-g128 tied": ({"tied": True}, "w4a16-g128", "auto"),
    "mxfp4": ({}, "mxfp4", "auto"),
    "mxfp4 f32": ({"dtype": F32}, "mxfp4", "auto"),
    "mxfp8": ({}, "mxfp8", "auto"),
    "nvfp4": ({}, "nvfp4", "auto"),
    "sparse-2-4": ({}, "sparse-2-4", "auto"),
    "experts one by one": ({"kind": "qwen3_moe"}, "w4a16-g128", "auto"),
    "two formats": (
        {"dtype": F32},
        chain(
            prune("2:4", targets="*.down_proj"),
            quantize("int8:channel", targets="*.o_proj"),
            quantize("int4:g32"),
        ),
        "auto",
    ),
    "zero points": ({}, quantize("int4:g32:asym"), "auto"),
    "zero points of rows, f32": ({"dtype": F32}, quantize("int8:channel:asym"), "auto"),
}
LOUD = {
    "nf4": ({}, quantize("nf4:g64")),
    "e3m3": ({}, quantize("e3m3:g32")),
    "short last block": ({}, quantize("int4:g128")),
    "fused experts": ({"kind": "gpt_oss"}, quantize("int8:channel")),
    "embedding": ({}, quantize("int8:channel", targets="embed_tokens")),
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Every output, and what transformers made of it, by name."""
    tmp = tmp_path_factory.mktemp("load")
    outs, dtypes = {}, []
    for name, (changes, how, *dtype) in {**SAME, **LOUD}.items():
        out = tmp / name.replace(" ", "-")
        source = checkpoint(tmp / f"{out.name}-source", **changes)
        compress(source, recipe(how) if isinstance(how, str) else how, out)
        outs[name] = out
        dtypes += dtype or ["auto"]
    results = in_transformers(list(outs.values()), tmp, dtypes)
    return {name: (out, result) for (name, out), result in zip(outs.items(), results)}


@pytest.mark.parametrize("name", SAME)
def test_transformers_without_halfulp_computes_what_halfulp_computes(foreign, name):
    out, result = foreign[name]
    assert "error" not in result, result["error"]
    assert not result["info"]  # no tensor missing, none left over
    ours = logits_of(load(out, dtype=result["dtype"]))
    if name == "nvfp4":
        # the stored reciprocal of the tensor scale is rounded: weights may be an ulp of bfloat16 apart
        assert (ours - result["logits"]).abs().max() <= 2**-5 * ours.abs().max()
        return
    assert torch.equal(ours, result["logits"])


def test_the_logits_compared_are_those_of_compressed_weights(foreign):
    for name in ("w8a8-int8 f32", "mxfp4 f32"):
        out, result = foreign[name]
        source = logits_of(load(out.with_name(out.name + "-source"), dtype=result["dtype"]))
        assert not torch.equal(source, result["logits"])


@pytest.mark.parametrize("name", LOUD)
def test_transformers_refuses_what_it_cannot_read(foreign, name):
    # a quant_method that it does not know it skips with a warning, and runs the model on random weights
    assert "has no `quant_method` attribute" in foreign[name][1].get("error", "loaded!")
    assert json.loads((foreign[name][0] / "config.json").read_text())["quantization_config"] == {
        "format": "halfulp",
        "load_with": "halfulp.load(path)",
        "described_in": "halfulp.json",
    }


@pytest.mark.parametrize("name", LOUD)
def test_ours_load_as_the_source_with_every_weight_cast(foreign, name):
    out, _ = foreign[name]
    source = open_checkpoint(out.with_name(out.name + "-source"))
    manifest = manifest_of(open_checkpoint(out))
    model = load(out, dtype=F32)
    expected = load(source, dtype=F32)
    state = expected.state_dict()
    touched = {n: e["format"] for n, e in manifest["tensors"].items() if "format" in e}
    assert touched
    for tensor, fmt in touched.items():
        state[tensor].copy_(cast(source.read(tensor).float(), fmt))
    for tensor, value in model.state_dict().items():
        assert torch.equal(value, state[tensor]), tensor
    assert torch.equal(logits_of(model), logits_of(expected))


def test_activations_are_cast_at_the_inputs_of_the_layers(foreign):
    out, _ = foreign["w8a8-int8 f32"]
    model = load(out)
    assert "activations emulated (int8:channel:rule=absmax_half:division=rounded)" in model.halfulp_path
    plain = load(out)
    for module in plain.modules():
        module._forward_pre_hooks.clear()
    assert not torch.equal(logits_of(plain), logits_of(model))
    fmt = format("int8:token:rule=absmax_half:division=rounded")
    for name, module in plain.named_modules():
        if name.endswith("_proj"):
            module.forward = lambda x, forward=module.forward: forward(cast(x, fmt))
    assert torch.equal(logits_of(plain), logits_of(model))


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("experts")
    outs = {}
    for name in ("w8a8-int8", "fp8", "mxfp8"):
        outs[name] = tmp / name
        compress(checkpoint(tmp / f"{name}-source", "qwen3_moe", dtype=F32), recipe(name), outs[name])
    return outs


@pytest.mark.parametrize("name", ["w8a8-int8", "fp8", "mxfp8"])
def test_experts_that_transformers_fuses_round_the_inputs_of_both_their_matmuls(experts, name):
    from torch.nn.functional import linear, silu

    model, plain = load(experts[name]), load(experts[name])
    fmt = format(recipe(name).transforms[0].activations)

    def by_hand(module):
        def forward(x, index, share):
            out = torch.zeros_like(x)
            for token in range(len(x)):
                for k, e in enumerate(index[token].tolist()):
                    gate, up = linear(cast(x[token : token + 1], fmt), module.gate_up_proj[e]).chunk(2, dim=-1)
                    out[token] += linear(cast(silu(gate) * up, fmt), module.down_proj[e])[0] * share[token, k]
            return out

        return forward

    for path, module in plain.named_modules():
        if path.endswith(".experts"):
            module.forward = by_hand(module)
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-3, atol=1e-3)
    for path, module in plain.named_modules():
        if path.endswith(".experts"):
            del module.forward
    assert (logits_of(model) - logits_of(plain)).abs().max() > 1e-2


def test_experts_of_different_activations_cannot_be_emulated_in_one_module(tmp_path):
    source = checkpoint(tmp_path / "m", "qwen3_moe")
    compress(source, quantize("int8:channel", "int8:token", ignore="*.down_proj"), tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.experts is one module .*\(None, int8:channel\): emulation takes"
    ):
        load(tmp_path / "out")


def test_transformers_does_not_quietly_misread_experts(experts, tmp_path):
    # 5.24 fuses the experts while it loads, and decodes packed integers and e4m3fn there, nothing else
    results = in_transformers(list(experts.values()), tmp_path)
    for (name, out), result in zip(experts.items(), results):
        if "error" in result:
            assert "issues during automatic conversion" in result["error"]
            continue
        assert not result["info"], name
        model = load(out, dtype=result["dtype"])
        for path, module in model.named_modules():
            if path.endswith(".experts"):
                del module.forward  # it computes fused experts on unrounded activations
        torch.testing.assert_close(logits_of(model), result["logits"], rtol=1e-3, atol=1e-3)


def test_what_transformers_misreads_without_a_word_is_said_in_the_notes(tmp_path):
    # its decoder of fused experts (5.24) drops weight_global_scale; this test fails when that is mended
    source = checkpoint(tmp_path / "m", "qwen3_moe")
    notes = compress(source, recipe("nvfp4"), tmp_path / "out")["notes"]
    assert any("reads experts without their tensor scales" in note for note in notes)
    (result,) = in_transformers([tmp_path / "out"], tmp_path)
    assert (logits_of(load(tmp_path / "out", dtype=BF16)) - result["logits"]).abs().max() > 1


def test_in_bfloat16_transformers_rounds_scales_that_the_file_holds_in_float32(foreign):
    # compressed-tensors computes in the model's dtype: with its own rounding of weights and inputs put in our
    # model's place the logits are equal, so the file is right and only the arithmetic differs
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize
    from transformers import AutoModelForCausalLM

    for name in ("w8a8-int8 bf16 run in f32", "fp8 bf16 run in f32"):
        out, _ = foreign[name]
        theirs, ours = AutoModelForCausalLM.from_pretrained(out), load(out, dtype=BF16)
        right = logits_of(theirs)
        for path, module in theirs.named_modules():
            if hasattr(module, "quantization_scheme"):
                mine = ours.get_submodule(path)
                torch.testing.assert_close(mine.weight, module.weight, rtol=2**-7, atol=0)
                mine.weight.data = module.weight.data
                mine._forward_pre_hooks.clear()
                mine.register_forward_pre_hook(
                    lambda _, args, m=module: (
                        forward_quantize(m, args[0], "input", m.quantization_scheme.input_activations),
                    )
                )
        assert torch.equal(logits_of(ours), right)


# the KV cache


@pytest.fixture(scope="module")
def with_kv(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("kv")
    outs = {}
    for kind in ("llama", "qwen3_moe", "gpt_oss"):
        source = checkpoint(tmp / f"{kind}-source", kind, dtype=F32)
        for suffix, kv in (("", None), ("-kv", "int4:token")):
            outs[kind + suffix] = tmp / f"{kind}{suffix}"
            compress(source, quantize("int8:channel", kv=kv, targets="*.o_proj"), outs[kind + suffix])
    return outs


def rounded_cache(model, fmt):
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            return super().update(cast(key, fmt), cast(value, fmt), *args, **kwargs)

    return Rounded(config=model.config)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_keys_and_values_are_rounded_as_they_enter_the_cache(with_kv, kind):
    plain, model = load(with_kv[kind]), load(with_kv[f"{kind}-kv"])
    assert model.halfulp_path.endswith("attention emulated (keys int4:channel, values int4:channel)")
    got = logits_of(model)
    assert not torch.equal(got, logits_of(plain))
    fmt = format("int4:token")
    with torch.no_grad():
        assert torch.equal(got, plain(IDS, cache=rounded_cache(plain, fmt)).logits)
        cache = model(IDS).cache
        for layer in cache.layers:
            assert torch.equal(cast(layer.keys, fmt), layer.keys)
            assert torch.equal(cast(layer.values, fmt), layer.values)


def test_a_cache_of_the_caller_rounds_too_and_only_once(with_kv):
    from transformers import DynamicCache

    model = load(with_kv["llama-kv"])
    with torch.no_grad():
        whole = model(IDS).logits
        cache = DynamicCache(config=model.config)
        parts = [model(IDS[:, :7], cache=cache).logits, model(IDS[:, 7:], cache=cache).logits]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    fmt = format("int4:token")
    assert torch.equal(cast(cache.layers[1].keys, fmt), cache.layers[1].keys)


def test_generate_runs_in_the_emulation_without_a_warning(with_kv):
    model, plain = load(with_kv["llama-kv"]), load(with_kv["llama"])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        arguments = {
            "max_new_tokens": 6,
            "do_sample": False,
            "output_scores": True,
            "return_dict_in_generate": True,
        }
        scores = model.generate(IDS, **arguments).scores
        assert not torch.equal(scores[0], plain.generate(IDS, **arguments).scores[0])
    torch.testing.assert_close(scores[0], logits_of(model)[:, -1], rtol=1e-5, atol=1e-5)


def test_the_older_name_of_the_cache_works():
    from halfulp.compress import attention
    from halfulp.compress._attend import emulate

    class Old(torch.nn.Module):
        config = None

        def forward(self, ids, past_key_values=None):
            key = torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(0))
            return past_key_values.update(key, key, 0)[0], key

    module = Old()
    from transformers import LlamaConfig

    module.config = LlamaConfig(num_hidden_layers=1)
    emulate(module, attention("int4:token"), {})
    got, key = module(IDS)
    assert torch.equal(got, cast(key, "int4:token"))


# what load refuses


def test_a_plain_checkpoint_loads_as_it_is(tmp_path):
    model = load(checkpoint(tmp_path / "m", dtype=F32))
    assert model.halfulp_path == "float32, eager torch"


def test_compressed_by_others_is_refused(tmp_path, foreign):
    out = tmp_path / "theirs"
    shutil.copytree(foreign["mxfp4"][0], out)
    (out / "halfulp.json").unlink()
    with pytest.raises(
        ValueError, match=r"is quantized, and not by halfulp \(no halfulp\.json\): load it with transformers"
    ):
        load(out)


@pytest.mark.parametrize("text", ["{", "[]", '{"tensors": {}}', "\x00"])
def test_a_damaged_manifest_is_named(tmp_path, foreign, text):
    out = tmp_path / "o"
    shutil.copytree(foreign["nf4"][0], out)
    (out / "halfulp.json").write_text(text)
    with pytest.raises(ValueError, match=r"halfulp\.json is damaged .*: compress the model again"):
        load(out)


def test_a_tensor_that_is_missing_is_an_error_and_no_random_weight(tmp_path):
    held = weights(dtype=F32)
    del held["model.layers.1.mlp.up_proj.weight"]
    source = checkpoint(tmp_path / "m", dtype=F32, tensors=held)
    with pytest.raises(ValueError, match=r"lacks tensors that the model needs: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(source)


def test_a_config_without_a_model_type_is_refused(tmp_path):
    source = checkpoint(tmp_path / "m")
    (source / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ValueError, match=r"no config\.json with a model_type"):
        load(source)


def test_tensors_come_one_at_a_time_in_the_asked_dtype(foreign):
    out, _ = foreign["nf4"]
    found = dict(tensors(open_checkpoint(out), torch.float16))
    assert found.keys() == shapes("llama").keys()
    assert {t.dtype for t in found.values()} == {torch.float16}
    assert all(tuple(t.shape) == shapes("llama")[name] for name, t in found.items())


@pytest.mark.parametrize("dtype", ["float32", torch.int8, None])
def test_a_dtype_that_is_none_is_refused(foreign, dtype):
    with pytest.raises(ValueError, match=r"dtype=.*: give a floating-point torch dtype, such as torch\.bfloat16"):
        load(foreign["nf4"][0], dtype=dtype)
