"""Formats inside attention: what they compute, how static scales are found, stored and said."""

import json

import pytest
import torch
from safetensors.torch import load_file

from halfulp.compress import (
    Attention,
    attention,
    calibration,
    chain,
    compress,
    gptq,
    learn,
    load,
    open_checkpoint,
    plan_of,
    quantize,
)
from halfulp.compress._attend import attentions, emulate, measured
from halfulp.compress._attention import rounded, scale_for
from halfulp.compress.calibrate import Decoder
from halfulp.compress.modules import compress_module
from halfulp.numerics import cast, format

from .common import IDS, checkpoint, in_transformers, logits_of, weights
from .test_calibrated import resumed_equals_whole, sequences

F32 = torch.float32
FP8 = "e4m3fn:tensor"
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "llama": {},
    "gpt2": GPT2,
    "qwen3": {},
    "gemma2": {
        "sliding_window": 4,
        "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt_neox": {},
}


def tiny(kind, dtype=F32, **changes):
    """A random model of an architecture, computed by its own eager attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = MODELS[kind] if kind == "gpt2" else SIZES | MODELS.get(kind, {})
    config = AutoConfig.for_model(kind, **sizes | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter)
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    calm = {n: w * 0.3 if n.endswith("_proj.weight") else w for n, w in weights(dtype=F32).items()}
    return checkpoint(tmp_path_factory.mktemp("source") / "model", dtype=F32, tensors=calm)


def brief(weights):
    return learn(weights, steps=4)


def read(folder):
    return load_file(folder / "model.safetensors")


# what is computed


@pytest.mark.parametrize("kind", MODELS)
def test_formats_that_change_nothing_are_the_models_own_eager_attention(kind):
    model = tiny(kind)
    before = logits_of(model)
    emulate(model, attention(query="fp32", scores="fp32", probabilities="fp32", output="fp32"), {})
    assert model.config._attn_implementation != "eager"
    assert torch.equal(logits_of(model), before)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("part", ["query", "scores", "probabilities", "output"])
def test_each_format_changes_the_numbers(kind, part):
    model = tiny(kind)
    before = logits_of(model)
    emulate(model, attention(**{part: "e4m3fn:token"}), {})
    after = logits_of(model)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=1, atol=0.5 * float(before.std()))


def test_every_format_is_where_an_explicit_attention_has_it():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    formats = {"query": "e4m3fn:token", "scores": "bf16", "probabilities": "uint8:tensor", "output": "fp16"}

    def explicit(module, query, key, value, mask, scaling, **more):
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        scores = cast(cast(query, "e4m3fn:token") @ key.mT, "bf16") * scaling + mask
        shares = torch.softmax(scores, -1)
        return cast((shares * 255).round() / 255 @ value, "fp16").transpose(1, 2).contiguous(), shares

    ALL_ATTENTION_FUNCTIONS.register("explicit", explicit)
    ALL_MASK_ATTENTION_FUNCTIONS.register("explicit", eager_mask)
    model = tiny("llama")
    model.set_attn_implementation("explicit")
    right = logits_of(model)
    model = tiny("llama")
    emulate(model, attention(**formats), {})
    torch.testing.assert_close(logits_of(model), right, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits_of(tiny("llama")), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", ["int8:token", "e4m3fn:token", "int4:token", "mxfp8", "int4:g8:asym", "e5m2"])
def test_keys_and_values_are_rounded_as_they_enter_the_cache(fmt):
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(self, key, value, *args, **kwargs):
            return super().update(cast(key, fmt), cast(value, "bf16"), *args, **kwargs)

    model = tiny("llama")
    with torch.no_grad():
        right = model(IDS, cache=Rounded(config=model.config)).logits
    emulate(model, attention(keys=fmt, values="bf16"), {})
    assert torch.equal(logits_of(model), right)
    assert not torch.equal(logits_of(tiny("llama")), right)


def test_values_of_static_scales_saturate():
    x = torch.tensor([[[[100.0, 1.0, -0.3]], [[100.0, 1.0, -0.3]]]])
    scale = scale_for(torch.tensor([44.8, 448.0]), format(FP8)).reshape(2, 1, 1)
    got = rounded(x, format(FP8), scale)
    assert got[0, 0, 0, 0] == pytest.approx(44.8)
    assert got[0, 0, 0, 1] == pytest.approx(1.0)
    assert torch.equal(got[0, 1], cast(x[0, 1], "e4m3fn"))


def test_nvfp4_takes_its_scale_of_the_tensor_from_the_calibration():
    x = torch.randn(1, 2, 3, 32, generator=torch.Generator().manual_seed(0))
    scale = scale_for(x.abs().max().reshape(1), format("nvfp4"))
    torch.testing.assert_close(rounded(x, format("nvfp4"), scale), cast(x, "nvfp4"), rtol=1e-6, atol=1e-7)
    # half the tensor is rounded as it was within the whole
    assert torch.equal(rounded(x[:, :1], format("nvfp4"), scale), rounded(x, format("nvfp4"), scale)[:, :1])


EVERYWHERE = {"query": "e4m3fn:token", "scores": "bf16", "output": "bf16"}


@pytest.mark.parametrize(
    ("static", "shares"), [(None, "e4m3fn"), (None, "uint8:tensor"), ("tensor", "int8:token"), ("head", "e4m3fn")]
)
def test_token_by_token_gives_what_all_at_once_does(tmp_path, source, static, shares):
    # in float64, where the order of a sum moves nothing over a midpoint
    step = attention(FP8 if static else "int8:token", probabilities=shares, static=static, **EVERYWHERE)
    given = calibration(sequences()) if static else None
    compress(source, step, tmp_path / "out", calibration=given)
    model = load(tmp_path / "out", dtype=torch.float64)
    with torch.no_grad():
        whole = model(IDS)
        cache = model(IDS[:, :5]).cache
        parts = [model(IDS[:, i : i + 1], cache=cache).logits for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole.logits[:, 5:], rtol=1e-9, atol=1e-9)
    ids = model.generate(IDS[:, :5], max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        again = model(ids[:, :-1]).logits[:, 4:].argmax(-1)
    assert torch.equal(again, ids[:, 5:])


# static scales


@pytest.mark.parametrize("static", ["tensor", "head"])
@pytest.mark.parametrize("make", [quantize, gptq])
def test_scales_are_the_largest_magnitudes_of_the_compressed_model(tmp_path, source, static, make):
    given = sequences()
    step = make("int4:g16", activations="int8:token")
    compress(source, step, tmp_path / "weights", calibration=None if make is quantize else calibration(given))
    both = chain(step, attention(FP8, query="int8:tensor", static=static))
    manifest = compress(source, both, tmp_path / "out", calibration=calibration(given))
    model, tensors = load(tmp_path / "weights"), read(tmp_path / "out")
    with torch.no_grad():
        layers = [model(ids.reshape(1, -1)).cache.layers for ids in given]
    for k, home in manifest["attention"]["layers"].items():
        for name, part in (("k_scale", "keys"), ("v_scale", "values")):
            amax = torch.stack([getattr(run[int(k)], part)[0].abs().amax((1, 2)) for run in layers]).amax(0)
            right = amax.max().reshape(1) if static == "tensor" else amax.reshape(2, 1, 1)
            torch.testing.assert_close(tensors[f"{home}.{name}"], right / 448, rtol=1e-5, atol=0)
        assert tensors[f"{home}.q_scale"].shape == ((1,) if static == "tensor" else (4, 1, 1))
    # measuring changes no weight
    plain = read(tmp_path / "weights")
    assert all(torch.equal(plain[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in plain)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gpt_oss", "qwen3"])
def test_other_architectures_have_their_scales_found_and_read(tmp_path, kind):
    model = tiny(kind)
    model.save_pretrained(tmp_path / "model")
    step = attention("e4m3fn:tensor", static="head", probabilities="e4m3fn")
    manifest = compress(tmp_path / "model", step, tmp_path / "out", calibration=calibration(sequences()))
    heads = 4 if kind == "gpt2" else 2
    found = {name: t for name, t in read(tmp_path / "out").items() if name.endswith(("k_scale", "v_scale"))}
    assert len(found) == 4
    assert all(t.shape == (heads, 1, 1) and (t > 0).all() for t in found.values())
    got = load(tmp_path / "out")
    assert "attention emulated (keys e4m3fn:tensor" in got.halfulp_path
    assert len(attentions(got)) == len(manifest["attention"]["layers"]) == 2
    after, before = logits_of(got), logits_of(model)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, before, rtol=1, atol=0.5 * float(before.std()))


@pytest.mark.parametrize(
    ("make", "stop"),
    [(quantize, 3), (quantize, 21), (quantize, 22), (gptq, 14), (gptq, 15), (gptq, 22), (brief, 14)],
)
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, source, make, stop, monkeypatch):
    step = chain(make("int4:g16"), attention(FP8, static="tensor"))
    given = calibration(sequences(2, 16))
    resumed_equals_whole(tmp_path, source, step, given, monkeypatch, stop)


def test_only_the_last_pass_of_each_sequence_counts(source):
    written = {}

    class Writer:
        done = ()

        def write(self, key, tensors, note):
            written.update(tensors)

    decoder = Decoder(open_checkpoint(source))
    states = decoder.start(sequences(2))
    found = []
    with torch.no_grad():
        for factors in ([1], [100, 1], [1, 100]):  # as where rounding is learned, the block runs more than once
            with decoder.block(0) as block, measured(decoder, block, 0, attention(FP8, static="head"), 2, Writer()):
                weight = block.self_attn.v_proj.weight.clone()
                for factor in factors:
                    block.self_attn.v_proj.weight.copy_(weight * factor)
                    for i in range(2):
                        decoder.run(block, 0, states, i)
            found.append(written["model.layers.0.self_attn.v_scale"])
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], 100 * found[0], rtol=1e-5, atol=0)


def test_latent_attention_has_the_scales_of_what_it_caches(tmp_path):
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    more = {"topk_group": 1, "first_k_dense_replace": 2, "num_key_value_heads": 4, "head_dim": 8}
    model = tiny("deepseek_v3", **sizes, **experts, **more)
    model.save_pretrained(tmp_path / "model")
    given = sequences()
    step = attention(FP8, static="tensor", probabilities="e4m3fn")
    manifest = compress(tmp_path / "model", step, tmp_path / "out", calibration=calibration(given))
    tensors = read(tmp_path / "out")
    with torch.no_grad():
        layers = [model(ids.reshape(1, -1)).cache.layers for ids in given]
    for k, home in manifest["attention"]["layers"].items():
        for name, part in (("k_scale", "keys"), ("v_scale", "values")):
            amax = max(float(getattr(run[int(k)], part).abs().max()) for run in layers)
            assert float(tensors[f"{home}.{name}"]) == pytest.approx(amax / 448, rel=1e-4)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not torch.equal(logits_of(load(tmp_path / "out")), logits_of(model))
    step = attention(FP8, static="head")
    with pytest.raises(ValueError, match=r"heads in the cache are 1 and in config.json 4; give static='tensor'"):
        compress(tmp_path / "model", step, tmp_path / "heads", calibration=calibration(given))


def test_a_head_that_is_always_zero_has_the_scale_one(tmp_path):
    tensors = weights(dtype=F32)
    tensors["model.layers.1.self_attn.v_proj.weight"][:16] = 0
    folder = checkpoint(tmp_path / "model", dtype=F32, tensors=tensors)
    step = attention("int8:tensor", static="head")
    compress(folder, step, tmp_path / "out", calibration=calibration(sequences()))
    scale = read(tmp_path / "out")["model.layers.1.self_attn.v_scale"].flatten()
    assert scale[0] == 1
    assert scale[1] != 1
    assert logits_of(load(tmp_path / "out")).isfinite().all()


# what other readers are told


@pytest.mark.parametrize(("element", "kind"), [("e4m3fn", "float"), ("int8", "int")])
@pytest.mark.parametrize("static", ["tensor", "head"])
def test_the_scheme_of_the_cache_is_what_compressed_tensors_computes(tmp_path, source, element, kind, static):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    fmt = f"{element}:tensor"
    step = chain(quantize("int8:channel"), attention(fmt, static=static))
    manifest = compress(source, step, tmp_path / "out", calibration=calibration(sequences()))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert QuantizationConfig.model_validate(config).kv_cache_scheme is not None
    args = QuantizationArgs(**config["kv_cache_scheme"])
    assert (args.type, args.strategy, args.dynamic) == (kind, {"head": "attn_head"}.get(static, static), False)
    scale = read(tmp_path / "out")["model.layers.0.self_attn.k_scale"]
    keys = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0)) * 3
    theirs = fake_quantize(keys, scale, torch.zeros_like(scale), args)
    assert torch.equal(theirs, rounded(keys, format(fmt), scale))
    said = [note for note in manifest["notes"] if "kv_cache_scheme" in note]
    assert len(said) == 1
    assert ("as one of fp8" in said[0]) == (kind == "int")


def test_transformers_loads_what_has_a_scheme_of_the_cache(tmp_path, source):
    steps = {
        "with": chain(quantize("int8:channel"), attention(FP8, static="tensor")),
        "plain": quantize("int8:channel"),
    }
    steps["alone"] = attention(FP8, static="head")
    for name, step in steps.items():
        compress(source, step, tmp_path / name, calibration=calibration(sequences()))
    found = in_transformers([*(tmp_path / name for name in steps), source], tmp_path)
    assert not [one["error"] for one in found if "error" in one]
    assert all(not one["info"].get("missing_keys") for one in found)
    # transformers 5.24 calls the cache what compressed-tensors 0.20 does not look for, and leaves the scheme out
    assert torch.equal(found[0]["logits"], found[1]["logits"])
    assert torch.equal(found[2]["logits"], found[3]["logits"])


@pytest.mark.parametrize(
    "step",
    [
        attention("int8:token"),
        attention(keys=FP8, values="int8:tensor", static="tensor"),
        attention(keys=FP8, static="tensor"),
        attention("nvfp4", static="tensor"),
        attention("int4:tensor", static="tensor"),
        attention("e5m2:tensor", static="tensor"),
    ],
)
def test_no_scheme_is_written_for_what_it_cannot_say(tmp_path, source, step):
    given = calibration(sequences(2, 8)) if step.static else None
    manifest = compress(source, chain(quantize("int8:channel"), step), tmp_path / "out", calibration=given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"] is None
    assert any("emulated by halfulp.load, and not known" in note for note in manifest["notes"])
    load(tmp_path / "out")


def test_plan_and_manifest_show_the_formats(tmp_path, source):
    step = chain(quantize("int8:channel"), attention("int8:token", probabilities="e4m3fn"))
    words = "keys int8:channel, values int8:channel, probabilities e4m3fn"
    assert f"attention: {words}" in str(plan_of({"a.q_proj.weight": (8, 64)}, step)).splitlines()
    manifest = compress(source, step, tmp_path / "out")
    formats = {"keys": "int8:channel", "values": "int8:channel", "probabilities": "e4m3fn", "static": None}
    assert manifest["attention"] == formats
    assert load(tmp_path / "out").halfulp_path.endswith(f"attention emulated ({words})")
    assert compress(source, quantize("int8:channel"), tmp_path / "none")["attention"] is None


def test_kv_of_quantize_is_the_same_thing(tmp_path, source):
    a = plan_of({"a.q_proj.weight": (8, 64)}, quantize("int8:channel", kv="int8:token")).attention
    assert a == attention("int8:token") == Attention(keys=format("int8:token"), values=format("int8:token"))


def test_outputs_that_said_kv_still_load(tmp_path, source):
    compress(source, attention("int4:token"), tmp_path / "out")
    right = logits_of(load(tmp_path / "out"))
    path = tmp_path / "out" / "halfulp.json"
    manifest = json.loads(path.read_text())
    del manifest["attention"]
    path.write_text(json.dumps(manifest | {"kv": "int4:channel"}))
    assert torch.equal(logits_of(load(tmp_path / "out")), right)


# what is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "attention needs the format of something: kv, query, keys"),
        ({"kv": "kv8"}, "cannot read 'kv8'"),
        ({"kv": FP8}, "would change with every token; give static='tensor'"),
        ({"kv": "nvfp4"}, "would change with every token"),
        ({"query": "int8:tensor"}, "would change with every token"),
        ({"kv": "int8:token", "static": "tensor"}, "is for formats with a scale of the whole tensor"),
        ({"kv": FP8, "static": "channel"}, "static='channel': choose 'tensor', 'head' or None"),
        ({"kv": "int8:tensor:asym", "static": "tensor"}, "no zero point"),
        ({"kv": "int8:4x4"}, "do not lie along the last axis"),
        ({"kv": "int8:g4:axis=0"}, "do not lie along the last axis"),
        ({"scores": "e4m3fn:tensor"}, "tokens to come would change"),
        ({"output": "nvfp4"}, "tokens to come would change"),
        ({"probabilities": "uint8"}, "become 0 or 1 in uint8; give uint8:tensor"),
    ],
)
def test_what_cannot_be_computed_token_by_token_is_refused(given, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        attention(**given)


def test_kv_of_quantize_is_held_to_the_same():
    with pytest.raises(ValueError, match="would change with every token; give static='tensor' to attention"):
        quantize("int8:channel", kv="int8:tensor")


def test_twice_is_once_too_often():
    steps = chain(quantize("int8:channel", kv="int8:token"), attention(probabilities="e4m3fn"))
    with pytest.raises(ValueError, match=r"by an earlier step; give its formats \(kv too\) once"):
        plan_of({"a.q_proj.weight": (8, 64)}, steps)


def test_static_without_a_calibration_is_an_error(tmp_path, source):
    with pytest.raises(ValueError, match="static attention needs a calibration"):
        compress(source, attention(FP8, static="tensor"), tmp_path / "out")


def test_a_model_that_overflows_is_an_error(tmp_path):
    tensors = weights(dtype=F32)
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] = 3e38
    tensors["model.layers.0.input_layernorm.weight"][:] = 1e6
    folder = checkpoint(tmp_path / "model", dtype=F32, tensors=tensors)
    with pytest.raises(ValueError, match=r"k_scale: the calibration met NaN or infinity"):
        compress(folder, attention(FP8, static="tensor"), tmp_path / "out", calibration=calibration(sequences()))


def test_attention_outside_of_the_interface_is_refused(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=64, n_layer=1, n_head=4)).eval()
    with pytest.raises(ValueError, match="does not compute attention through transformers' interface"):
        emulate(model, attention(probabilities="e4m3fn"), {})
    before = logits_of(model)
    emulate(model, attention("int4:token"), {})  # its cache is within reach
    assert not torch.equal(logits_of(model), before)
    BloomForCausalLM(model.config).save_pretrained(tmp_path / "model")
    given = calibration(sequences())
    with pytest.raises(ValueError, match="nothing can be measured there; leave static out"):
        compress(tmp_path / "model", attention(FP8, static="tensor"), tmp_path / "out", calibration=given)


def test_modules_have_no_attention_that_is_known():
    with pytest.raises(ValueError, match="a module's attention is not known here"):
        compress_module(torch.nn.Sequential(torch.nn.Linear(8, 8)), quantize("int8:channel", kv="int8:token"))
