"""Rotations as rewrites of a checkpoint: what is read, noted, kept and refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfulp.compress import compress, load, open_checkpoint, quantize
from halfulp.compress._graph import graph_of
from halfulp.compress.rotate import _view, choose_rotation, prove, rotate
from halfulp.compress.rotate._view import view

from .common import IDS
from .test_rotate_families import make


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make("llama-tied", tmp_path_factory.mktemp("llama"), torch.bfloat16)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return make("gpt2", tmp_path_factory.mktemp("gpt2"))


def all_of(checkpoint):
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_any_rows_give_the_same_bits(name, request):
    rotated = rotate().rewrite(request.getfixturevalue(name))
    for tensor, spec in rotated.tensors.items():
        whole = rotated.read(tensor)
        assert tuple(whole.shape) == spec.shape
        assert whole.is_contiguous()
        for rows in (slice(0, 7), slice(5, 29), slice(3, None), slice(0, 0), slice(2, 10_000)):
            if spec.shape:
                assert torch.equal(rotated.read(tensor, rows), whole[rows]), (tensor, rows)


def test_small_tiles_give_the_same_numbers(llama, monkeypatch):
    expected = all_of(rotate(dtype=torch.float64).rewrite(llama))
    monkeypatch.setattr(_view, "_TILE", 300)
    rotated = rotate(dtype=torch.float64).rewrite(llama)
    for name, tensor in expected.items():
        torch.testing.assert_close(rotated.read(name), tensor, rtol=0, atol=1e-13)
        assert torch.equal(rotated.read(name, slice(3, 11)), rotated.read(name)[3:11])


def test_a_result_may_be_changed_by_its_reader(llama):
    rotated = rotate().rewrite(llama)
    name = "model.layers.0.self_attn.o_proj.weight"
    first = rotated.read(name, slice(0, 4))
    kept = first.clone()
    first.zero_()
    assert torch.equal(rotated.read(name, slice(0, 4)), kept)


def test_rounded_once_to_its_own_dtype(llama):
    narrow, wide = rotate().rewrite(llama), rotate(dtype=torch.float64).rewrite(llama)
    assert {spec.dtype for spec in narrow.tensors.values()} == {"BF16"}
    assert {spec.dtype for spec in wide.tensors.values()} == {"F64"}
    assert wide.config["dtype"] == "float64"
    for name in narrow.tensors:
        assert torch.equal(narrow.read(name), wide.read(name).to(torch.bfloat16)), name


def test_seeds_reproduce_bit_for_bit(llama):
    first, again, other = (all_of(rotate(seed=seed).rewrite(llama)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(first[embedding], other[embedding])
    value = "model.layers.{}.self_attn.v_proj.weight"
    rotation = rotate(seed=1)
    graph = graph_of(llama)
    assert not torch.equal(rotation.values(graph, 0).matrix, rotation.values(graph, 1).matrix)
    assert not torch.equal(first[value.format(0)], other[value.format(0)])


def test_nothing_of_the_source_changes(llama):
    before = all_of(llama)
    rotated = rotate().rewrite(llama)
    all_of(rotated)
    assert all(torch.equal(before[name], llama.read(name)) for name in before)
    assert llama.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in llama.tensors


def test_a_tied_head_is_untied_and_said_to_be(llama):
    rotated = rotate("block:12").rewrite(llama)
    assert rotated.config["tie_word_embeddings"] is False
    assert rotated.tensors["lm_head.weight"].shape == llama.tensors["model.embed_tokens.weight"].shape
    assert rotate("block:12").notes(llama) == (
        "the norms' weights are folded into the layers that read them",
        "the residual stream is rotated by a random Hadamard matrix in blocks of 12 (seed 0)",
        "values are rotated by a random orthogonal matrix of 10 in each head (seed 0)",
        "the head is untied from model.embed_tokens.weight, since the final norm is folded into it: "
        "lm_head.weight costs 11,520 bytes more",
    )


def test_a_kept_head_stays_tied_and_said_to_be(llama):
    notes = rotate(head="keep").notes(llama)
    assert any("not rotated, since the head is to stay tied" in note for note in notes)
    assert "but for the final norm" in notes[0]
    rotated = rotate(head="keep").rewrite(llama)
    assert torch.equal(rotated.read("model.embed_tokens.weight"), llama.read("model.embed_tokens.weight"))
    assert torch.equal(rotated.read("model.norm.weight"), llama.read("model.norm.weight"))
    assert (rotated.read("model.layers.0.input_layernorm.weight") == 1).all()


def test_layer_norm_is_said_to_keep_the_mean(gpt2):
    notes = rotate("random").notes(gpt2)
    assert any("a random orthogonal matrix of 48, which keeps the mean for LayerNorm" in note for note in notes)


def test_a_head_that_repeats_the_embedding(llama, tmp_path):
    tensors = load_file(llama.path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((llama.path / "config.json").read_bytes())
    twice = open_checkpoint(tmp_path)
    rotated = rotate(dtype=torch.float64).rewrite(twice)
    assert prove(twice, rotated) < 1e-12
    assert prove(llama, rotated) < 1e-12


def test_a_layer_norm_without_a_place_for_its_bias(tmp_path):
    folder = tmp_path / "model"
    original = make("stablelm", folder)  # q, k and v have no biases here
    rotated = rotate(dtype=torch.float64).rewrite(original)
    assert rotated.read("model.layers.0.input_layernorm.bias").abs().max() > 0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][5] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"input_layernorm.bias cannot be folded: its norm has weights of 0"):
        rotate().rewrite(open_checkpoint(folder))
    tensors["model.layers.1.input_layernorm.bias"][5] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    original = open_checkpoint(folder)
    assert prove(original, rotate(dtype=torch.float64).rewrite(original)) < 1e-12


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_norms_after_the_addition_forbid_it(name, tmp_path):
    original = make(name, tmp_path)
    with pytest.raises(ValueError, match=r"gemma.*: the residual stream cannot be rotated, .*pass residual=None"):
        rotate().rewrite(original)
    with pytest.raises(ValueError, match="cannot be rotated"):
        rotate().notes(original)


def test_clamped_values_forbid_it(tmp_path):
    original = make("olmoe", tmp_path)
    clamped = replace(original, config={**original.config, "clip_qkv": 0.5})
    with pytest.raises(ValueError, match=r"clip_qkv\); pass heads=False"):
        rotate().rewrite(clamped)
    assert prove(clamped, rotate(heads=False, dtype=torch.float64).rewrite(clamped)) < 1e-12


def test_a_width_without_hadamard_matrix(llama):
    rotation = rotate("block:16")
    with pytest.raises(ValueError, match="blocks of 16 do not divide 60"):
        rotation.rewrite(llama)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"residual": "fourier"}, "choose 'hadamard', 'random' or 'block:N'"),
        ({"residual": "block:7"}, "no Hadamard matrix"),
        ({"residual": 3}, "residual=3"),
        ({"head": "drop"}, "choose 'untie' or 'keep'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        rotate(**arguments)


def test_a_proof_fails_for_another_function(llama):
    rotated = rotate(dtype=torch.float64).rewrite(llama)

    def read(name, rows):
        tensor = rotated.read(name, rows)
        return tensor * (1 + 1e-6) if name == "model.layers.1.mlp.down_proj.weight" else tensor

    wrong = replace(rotated, _read=read)
    with pytest.raises(ValueError, match="the model computes something else: logits differ by"):
        prove(llama, wrong)
    with pytest.raises(ValueError, match="block 1 computes something else"):
        prove(llama, wrong, blocks=[0, 1])
    assert prove(llama, wrong, blocks=[0]) < 1e-12
    with pytest.raises(ValueError, match="blocks 0 to 1"):
        prove(llama, rotated, blocks=[2])
    with pytest.raises(ValueError, match=r"make it with dtype=torch\.float64"):
        prove(llama, rotate().rewrite(llama))
    with pytest.raises(ValueError, match="logits differ by nan"):
        prove(llama, replace(rotated, _read=lambda name, rows: rotated.read(name, rows) * float("nan")))


def test_proofs_with_tokens_of_ones_own(llama):
    rotated = rotate(dtype=torch.float64).rewrite(llama)
    assert prove(llama, rotated, tokens=torch.tensor([[95, 3, 8]])) < 1e-12
    assert prove(llama, rotated, tolerance=1e-3) < 1e-12


def test_what_a_view_refuses(llama, tmp_path):
    with pytest.raises(ValueError, match=r"quantized already"):
        view(replace(llama, config={**llama.config, "quantization_config": {"quant_method": "awq"}}), {})
    with pytest.raises(ValueError, match=r"dtype=torch.int8: choose"):
        rotate(dtype=torch.int8).rewrite(llama)
    folder = tmp_path / "model"
    original = make("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rotated = rotate().rewrite(open_checkpoint(folder))
    with pytest.raises(ValueError, match=r"up_proj.weight is made from numbers that hold NaN or infinity"):
        rotated.read("model.layers.0.mlp.up_proj.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.gate_proj.weight"] * 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rotated = rotate(dtype=torch.float16).rewrite(open_checkpoint(folder))
    with pytest.raises(ValueError, match=r"leaves the range of F16: choose a wider dtype"):
        rotated.read("model.layers.0.mlp.up_proj.weight")
    assert original.source == str(folder)


def test_the_best_of_some_seeds(llama):
    def error(rotation):
        weight = rotation.rewrite(llama).read("model.layers.0.mlp.down_proj.weight").double()
        return float(weight.abs().max())

    chosen, errors = choose_rotation(error, [rotate(seed=seed, dtype=torch.float64) for seed in range(5)])
    assert error(chosen) == min(errors)
    assert len(set(errors)) == 5
    with pytest.raises(ValueError, match="0 candidates"):
        choose_rotation(error, [])
    with pytest.raises(ValueError, match="nan"):
        choose_rotation(lambda _: float("nan"), [rotate()])


def test_compressed_after_rotation(llama, tmp_path):
    rotated = rotate("block:12", seed=4).rewrite(llama)
    compress(rotated, quantize("int8:channel"), tmp_path / "out")
    model, reference = load(tmp_path / "out"), load(llama)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with torch.no_grad():
        a, b = model(IDS[:, :8] % 96).logits, reference(IDS[:, :8] % 96).logits
    assert (a - b).norm() / b.norm() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["hadamard", "block:32"])
def test_smollm2(residual):
    original = open_checkpoint("smollm2-135m")
    rotated = rotate(residual, dtype=torch.float64).rewrite(original)
    assert prove(original, rotated, blocks=[0, 17]) < 1e-10
    assert prove(original, rotated) < 1e-10
