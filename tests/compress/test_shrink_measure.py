"""Importance: each score against the model's own weights, by hand."""

import pytest
import torch

from halfulp.compress._load import load
from halfulp.compress.shrink import measure

from . import common
from .test_shrink import made

transformers = pytest.importorskip("transformers")


def test_scores_are_their_formulas(tmp_path):
    """Each score from the model's own weights, by hand, on two sequences of different lengths."""
    model = load(made(tmp_path))
    sequences = [common.IDS[0], common.IDS[1][:5]]
    scores = measure(model, sequences)
    plain = measure(model, sequences, weighted=False, over="mean")
    inside, layer = [], model.model.layers[0]
    heads = []
    with torch.no_grad():
        for ids in sequences:
            states = model(ids[None], output_hidden_states=True).hidden_states
            x, y = states[0][0], states[1][0]
            mixed = []
            hook = layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a: mixed.append(a[0][0]))  # noqa: B023
            model(ids[None])
            hook.remove()
            middle = x + layer.self_attn.o_proj(mixed[0])
            z = layer.post_attention_layernorm(middle)
            inner = torch.nn.functional.silu(layer.mlp.gate_proj(z)) * layer.mlp.up_proj(z)
            torch.testing.assert_close(middle + layer.mlp.down_proj(inner), y, rtol=1e-4, atol=1e-4)
            cosine = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
            inside.append((inner.norm(dim=0) * layer.mlp.down_proj.weight.norm(dim=0), inner.abs().mean(0), cosine))
            weight = layer.self_attn.o_proj.weight.norm(dim=0)
            heads.append((mixed[0].norm(dim=0) * weight).unflatten(0, (4, 16)).norm(dim=1))
    mean = [torch.stack(list(each)).mean(0) for each in list(zip(*inside))[:2]]
    torch.testing.assert_close(scores.channels["channels"][0].float(), mean[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plain.channels["channels"][0].float(), mean[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.heads[0].float(), torch.stack(heads).mean(0), rtol=1e-4, atol=1e-5)
    influence = 1 - sum(float(each[2].mean()) for each in inside) / 2
    assert float(scores.layers[0]) == pytest.approx(influence, rel=1e-4)
    assert scores.tokens == 17
    assert scores.width.shape == (64,)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_scores_of_experts_are_their_formulas(tmp_path, kind):
    """Gate times output norm, its mean over the tokens that the router sent there."""
    model = load(made(tmp_path, kind)).requires_grad_(False)
    scores = measure(model, [common.IDS[0]])
    seen = []
    experts = model.model.layers[1].mlp.experts
    hook = experts.register_forward_pre_hook(lambda m, a: seen.append([x.detach() for x in a]))
    with torch.no_grad():
        model(common.IDS[:1])
    hook.remove()
    hidden, index, gates = seen[0]
    for e in range(4):
        found, inner = [], []
        for t, k in (index == e).nonzero().tolist():
            x = hidden.reshape(-1, 64)[t]
            if kind == "qwen3_moe":
                gate, up = (experts.gate_up_proj[e] @ x).chunk(2)
                a = torch.nn.functional.silu(gate) * up
                y = experts.down_proj[e] @ a
            else:
                both = x @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
                gate, up = both[::2].clamp(max=experts.limit), both[1::2].clamp(-experts.limit, experts.limit)
                a = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
                y = a @ experts.down_proj[e] + experts.down_proj_bias[e]
            found.append(float(gates[t, k] * y.norm()))
            inner.append(a.detach())
        assert scores.counts[1][e] == len(found)
        assert float(scores.experts[1][e]) == pytest.approx(sum(found) / max(1, len(found)), rel=1e-4)
        if found:
            down = experts.down_proj[e] if kind == "qwen3_moe" else experts.down_proj[e].T
            expected = torch.stack(inner).norm(dim=0) * down.detach().norm(dim=0)
            torch.testing.assert_close(scores.channels["expert_channels"][1][e].float(), expected, rtol=1e-4, atol=1e-5)


def test_measure_leaves_the_model_alone(tmp_path):
    model = load(made(tmp_path)).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    done = []
    measure(model, list(common.IDS), over="mean", weighted=False, progress=lambda i, n: done.append((i, n)))
    assert done == [(1, 2), (2, 2)]
    assert model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="over='max': choose one of 'l2', 'mean'"):
        measure(model, list(common.IDS), over="max")
    with pytest.raises(ValueError, match="sequence 1 has tokens outside 0 to 127"):
        measure(model, [common.IDS[0], torch.tensor([128])])
    with pytest.raises(ValueError, match="no sequences"):
        measure(model, [])
    with pytest.raises(ValueError, match=r"sequence 0 is torch.int64 \[2, 12\]"):
        measure(model, [common.IDS])
