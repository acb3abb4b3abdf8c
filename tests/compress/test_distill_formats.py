"""Training in formats, under masks, and beside frozen weights."""

import math

import pytest
import torch

from halfulp.compress.distill import (
    Quantization,
    Settings,
    distill,
    forward_kl,
    lora,
    merge,
)
from halfulp.numerics import Codebook, cast, decode

from . import common
from .test_distill import equal, tiny, weights, windows

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("fmt", ["int4:g8", "int8:channel", "mxfp4", "nvfp4", "e4m3fn", "int4:g8:asym", "nf4:g16"])
def test_trained_weights_cast_give_the_trained_forward(fmt):
    student = tiny(0)
    how = Quantization(fmt, ignore=("*.o_proj",))
    result = distill(student, tiny(1), windows(4), Settings(5, batch=4, learning_rate=3e-3), quantization=how)
    assert set(result.weights) == {
        name for name, _ in student.named_parameters() if "_proj" in name and "o_proj" not in name
    }
    plain = tiny(0)
    plain.load_state_dict(student.state_dict())
    with torch.no_grad():
        trained = torch.func.functional_call(student, result.weights, (common.IDS,)).logits
        for name, p in plain.named_parameters():
            if name in result.weights:
                p.copy_(cast(p, fmt))
        assert torch.equal(plain(common.IDS).logits, trained)
        assert not torch.equal(student(common.IDS).logits, trained)


def test_training_in_a_format_beats_rounding_after():
    """Quantization-aware distillation from the very model, against its rounded weights."""
    teacher = tiny(1)
    data = windows(16)

    def divergence(model):
        with torch.no_grad():
            pairs = [(model(w[None]).logits[0], teacher(w[None]).logits[0]) for w in data]
        return sum(float(forward_kl(s, t).mean()) for s, t in pairs)

    rounded, student = tiny(1), tiny(1)
    how = Quantization("int3:g16")
    with torch.no_grad():
        for name, p in rounded.named_parameters():
            if "_proj" in name:
                p.copy_(cast(p, "int3:g16"))
    for learned in (False, True):
        student = tiny(1)
        settings = Settings(100, batch=8, learning_rate=3e-3)
        result = distill(student, teacher, data, settings, quantization=Quantization(how.weights, learned=learned))
        student.load_state_dict(result.weights, strict=False)
        assert divergence(student) < 0.7 * divergence(rounded)


def test_learned_steps_have_codes():
    student = tiny(0)
    how = Quantization("int4:g24", learned=True)  # does not divide 32: the last block is short
    result = distill(student, tiny(1), windows(4), Settings(5, batch=4, learning_rate=3e-3), quantization=how)
    assert result.quantized.keys() == result.weights.keys()
    for name, codes in result.quantized.items():
        assert torch.equal(decode(codes), result.weights[name])
        assert codes.scale.shape[-1] == -(-result.weights[name].shape[-1] // 24)


def test_lsq_gradients_are_those_of_the_paper():
    from halfulp.compress.distill._learned_step import fake_learned
    from halfulp.numerics import format

    fmt = format("int3:g4:scale=fp32")  # -4 ... 3
    w = torch.tensor([[0.3, -0.6, 9.0, -9.0]], requires_grad=True)
    s = torch.tensor([[0.5]], requires_grad=True)
    g = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    (fake_learned(w, s, fmt) * g).sum().backward()
    assert w.grad.tolist() == [[1, 2, 0, 0]]
    slopes = [round(0.6) - 0.6, -1 - -1.2, 3, -4]
    expected = sum(a * b for a, b in zip(slopes, g[0].tolist())) / math.sqrt(4 * 3)
    assert s.grad.item() == pytest.approx(expected, rel=1e-5)


class Restless(torch.optim.SGD):
    """Moves every weight, whatever its gradient."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(1e-3)


@pytest.mark.parametrize("optimizer", [None, Restless])
@pytest.mark.parametrize("quantization", [None, Quantization("int4:g8"), Quantization("int4:g8", learned=True)])
def test_masks_hold_at_every_step(optimizer, quantization):
    student = tiny(0)
    masks = {}
    for name, p in student.named_parameters():
        if "_proj" in name:
            groups = p.detach().abs().unflatten(-1, (-1, 4))
            masks[name] = (groups >= groups.sort(-1).values[..., 2:3]).flatten(-2)
    before = weights(student)

    def check(now):
        for name, p in student.named_parameters():
            if name in masks:
                assert not p.detach()[~masks[name]].any()

    result = distill(
        student, tiny(1), windows(4), Settings(6, batch=2, learning_rate=1e-2, weight_decay=0.1), masks=masks,
        optimizer=optimizer, quantization=quantization, progress=check,
    )  # fmt: skip
    for name, value in result.weights.items():
        assert not value[~masks[name]].any()
    assert not torch.equal(weights(student)["lm_head.weight"], before["lm_head.weight"])


def test_masks_need_a_zero():
    name = "model.layers.0.mlp.up_proj.weight"
    masks = {name: torch.ones(48, 32, dtype=torch.bool)}
    how = Quantization(Codebook((-1.0, 1.0)))
    with pytest.raises(ValueError, match="has no zero, so pruned weights would come back"):
        distill(tiny(0), tiny(1), windows(1), Settings(1), masks=masks, quantization=how)


def test_adapters_recover_a_frozen_quantized_base(tmp_path):
    base, teacher = tiny(1), tiny(1)
    with torch.no_grad():
        for name, p in base.named_parameters():
            if "_proj" in name:
                p.copy_(cast(p, "int3:g16"))
    before = weights(base)
    adapters = lora(base, ("*.mlp.*", "*.q_proj"), rank=4, alpha=8)
    assert equal(merge(base, adapters), {k: v for k, v in before.items() if "mlp" in k or "q_proj" in k})
    result = distill(
        base, teacher, windows(8), Settings(80, batch=8, learning_rate=5e-3), adapters=adapters, out=tmp_path / "r"
    )
    assert equal(weights(base), before)
    assert all(p.requires_grad and p.grad is None for p in base.parameters())
    assert result.history[-1]["loss"] < 0.7 * result.history[0]["loss"]
    with torch.no_grad(), adapters.attached(base):
        beside = base(common.IDS).logits
    base.load_state_dict(merge(base, adapters), strict=False)
    with torch.no_grad():
        torch.testing.assert_close(base(common.IDS).logits, beside, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"rank=32 for .* \[48, 32\]: give 1 to 31"):
        lora(base, ("*.up_proj",), rank=32)
    assert not [m for m in base.modules() if m._forward_hooks]


def test_adapters_resume(tmp_path):
    """A, B and the frozen base as if nothing had happened."""
    results = []
    for every, out in ((50, "whole"), (2, "cut")):
        base = tiny(0)
        adapters = lora(base, rank=2)

        def stop(now, out=out):
            if out == "cut" and now.step == 3:
                raise KeyboardInterrupt

        settings = Settings(6, batch=2, every=every, learning_rate=1e-2)
        if out == "cut":
            with pytest.raises(KeyboardInterrupt):
                distill(base, tiny(1), windows(4), settings, adapters=adapters, out=tmp_path / out, progress=stop)
            adapters = lora(base, rank=2)
        distill(base, tiny(1), windows(4), settings, adapters=adapters, out=tmp_path / out)
        results.append({k: p.detach().clone() for k, p in adapters.parameters().items()})
    assert equal(*results)
