"""Emulated torch models: what is reported, patterns, streams of random bits, other features of torch."""

import re
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from halfulp import numerics as hn
from halfulp.numerics import Cast, Roles, Stochastic, emulate

RANDOM = Cast("mxfp4", Stochastic(9))


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
    )


def gradients(model, x, **roles):
    with emulate(model, **roles) as emulation:
        loss = model(x).square().sum()
        found = torch.autograd.grad(loss, list(model.parameters()))
    return found, emulation


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def test_the_first_override_that_matches_wins():
    model = mlp()
    overrides = {"3": None, "re:[23]": "e4m3fn", "0": {"linear": "int4"}, "*": "e2m1"}
    _, emulation = gradients(model, X, linear="bf16", overrides=overrides)
    casts = {row.module: row.roles and str(row.roles.weight) for row in emulation.report()}
    assert casts == {"0": "int4", "2": "e4m3fn", "3": None}


def test_errors_name_what_was_given():
    model = mlp()
    with pytest.raises(ValueError, match="override 'lm_head' matches no module of the model; near names: 0, 1, 2, 3"):
        emulate(model, linear="e2m1", overrides={"lm_head": None})
    with pytest.raises(ValueError, match="nothing to emulate: give roles for at least one of linear, convolution"):
        emulate(model)
    with pytest.raises(ValueError, match="nothing to emulate"):
        emulate(model, overrides={"0": None})
    with pytest.raises(ValueError, match="override '0': unknown kind 'dense'; choose from linear, convolution"):
        emulate(model, linear="e2m1", overrides={"0": {"dense": "e2m1"}})
    with pytest.raises(ValueError, match=r"linear=\.\.\.: cannot read 'e99x'"):
        emulate(model, linear="e99x")
    with pytest.raises(ValueError, match=r"pattern 're:\(' is no regular expression"):
        emulate(model, linear="e2m1", overrides={"re:(": None})
    with emulate(model, linear="e2m1") as emulation:
        model(X)
        with pytest.raises(RuntimeError, match="this emulation is already running"):
            emulation.__enter__()
    with pytest.raises(ValueError, match="an accumulator is for matrix products"):
        gradients(torch.nn.Conv1d(16, 2, 3), X, convolution=Roles("e2m1", accumulator="exact"))


def test_a_context_in_which_nothing_was_emulated_warns():
    with pytest.warns(UserWarning, match="nothing was emulated"), emulate(mlp(), attention="e2m1") as emulation:
        emulation.model(X)
    with pytest.warns(UserWarning, match="nothing was emulated"), emulate(mlp(), linear="e2m1"):
        pass


class Odd(torch.nn.Module):
    """Products that emulation cannot or should not change."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8)
        self.linear = torch.nn.Linear(8, 8)
        self.bilinear = torch.nn.Bilinear(8, 8, 4)

    def forward(self, x):
        x, _ = self.lstm(self.linear(x))
        outer = x[..., None] @ x[..., None, :]
        counts = torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64)
        whole = torch.matmul(x, x.mT, out=torch.empty(x.shape[0], x.shape[1], x.shape[1]))
        bare = torch.ops.aten.mm(x[0], x[0].T)
        three = torch.einsum("ij,jk,kl->il", x[0], x[0].T, x[0])
        diagonal = torch.einsum("ii,ij->ij", x[0, :, :2], x[0])
        return (
            self.bilinear(x, x).sum()
            + outer.sum()
            + counts.sum()
            + sum(v.sum() for v in (whole, bare, three, diagonal))
        )


def test_what_stays_is_reported_with_the_reason():
    model = Odd()
    with torch.no_grad(), emulate(model, linear="e4m3fn", attention="e4m3fn") as emulation:
        model(torch.randn(3, 2, 8))
    reasons = {(row.operation, row.reason) for row in emulation.report().stayed}
    unseen = "emulation does not see into it"
    assert reasons == {
        ("lstm", unseen),
        ("bilinear", unseen),
        ("matmul", "an outer product, which sums over nothing"),
        ("matmul", "a product of torch.int64"),
        ("matmul", "called with out="),
        ("aten.mm", "a bare operator, which emulation does not see into"),
        ("einsum", "an einsum of other than two operands"),
        ("einsum", "an einsum with a repeated index"),
    }
    assert [row.module for row in emulation.report().emulated] == ["linear"]
    assert re.search(r"lstm +lstm +1 +stays: emulation does not see into it", str(emulation.report()))


def test_einsums_are_products():
    generator = torch.Generator().manual_seed(3)
    cases = {
        "bij,bjk->bik": 0,
        "bhqd,bhkd->bhqk": 0,
        "ij,jk": 0,
        "...id,...jd->...ij": 0,
        "abc,cda->bd": 0,
        "ij,jk->ki": 0,
    }
    for equation in cases:
        sizes = dict(zip("abcdijkqh.", range(2, 12)))
        left, right = equation.replace("...", "").split("->")[0].split(",")
        extra = (3, 2) if "..." in equation else ()
        a = torch.randn(*extra, *(sizes[c] for c in left), generator=generator)
        b = torch.randn(*extra[1:], *(sizes[c] for c in right), generator=generator)

        class Sum(torch.nn.Module):
            def forward(self, a, b):
                return torch.einsum(equation, a, b)  # noqa: B023

        with emulate(Sum(), attention="fp32") as emulation:
            found = emulation.model(a, b)
        torch.testing.assert_close(found, torch.einsum(equation, a, b))
        assert not emulation.report().stayed


def test_random_bits_are_the_seeds_and_the_steps():
    model, roles = mlp(), Roles("mxfp4", "mxfp4", RANDOM)
    first, emulation = gradients(model, X, linear=roles)
    assert emulation.step == 1
    assert equal(first, gradients(model, X, linear=roles)[0])
    assert not equal(first, gradients(model, X, linear=roles, step=1)[0])
    other = Roles("mxfp4", "mxfp4", Cast("mxfp4", Stochastic(10)))
    assert not equal(first, gradients(model, X, linear=other)[0])
    # a run that goes on at step 2 is the run that never stopped
    with emulate(model, linear=roles) as emulation:
        losses = [model(X).square().sum() for _ in range(3)]
    assert equal(torch.autograd.grad(losses[2], model.parameters()), gradients(model, X, linear=roles, step=2)[0])


def test_layers_and_tensors_draw_from_streams_of_their_own():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    twins = torch.nn.ModuleList([layer, torch.nn.Linear(64, 64, bias=False)])
    twins[1].weight.data.copy_(layer.weight.data)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.twins = twins

        def forward(self, x):
            return [self.twins[i](x) for i in (0, 0, 1)]

    with emulate(Both(), linear=Roles(weight=Cast("e2m1", Stochastic(1)))) as emulation:
        a, again, b = emulation.model(torch.eye(64))
    assert not torch.equal(a, again)
    assert not torch.equal(a, b)
    # both are the weight, rounded up or down
    assert torch.equal(hn.cast(a, "e2m1"), a)
    assert (hn.cast(layer.weight.data.T, "e2m1", rounding="toward_zero").abs() <= a.abs()).all()


def test_checkpointed_activations_draw_the_same_bits():
    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x, on=True):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False) if on else self.body(x)

    model, roles = Checkpointed(), Roles(RANDOM, RANDOM, RANDOM)
    found = []
    for on in (False, True):
        with emulate(model, linear=roles):
            found.append(torch.autograd.grad(model(X, on).square().sum(), model.parameters()))
    assert equal(*found)


def test_second_derivatives_of_products_are_refused():
    model = mlp()
    with emulate(model, linear="e4m3fn"):
        (first,) = torch.autograd.grad(model(X).square().sum(), model[0].weight, create_graph=True)
        with pytest.raises(RuntimeError, match="emulated products have first derivatives only"):
            first.sum().backward()


def test_functional_transforms():
    model, roles = mlp(), Roles("mxfp4", "mxfp4", "mxfp4")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    with emulate(model, linear=roles):
        one = torch.func.grad(loss)(parameters, X)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X[:3, None])
        single = [torch.func.grad(loss)(parameters, x[None]) for x in X[:3]]
    assert equal(one.values(), gradients(model, X, linear=roles)[0])
    for name, stacked in each.items():
        assert torch.equal(stacked, torch.stack([g[name] for g in single]))


def test_autocast_and_bfloat16():
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = gradients(model, X, linear="e4m3fn")
    assert {g.dtype for g in found} == {torch.float32}
    short, _ = gradients(mlp().bfloat16(), X.bfloat16(), linear="e4m3fn")
    assert {g.dtype for g in short} == {torch.bfloat16}
    plain, _ = gradients(model, X, linear="e4m3fn")
    for a, b in zip(found, plain):
        assert 0 < (a - b).norm() < 0.2 * b.norm()


def test_compiled_modules_run_eagerly_inside():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    plain = compiled(X)
    with emulate(model, linear=Roles("mxfp4", "mxfp4", RANDOM)) as emulation:
        inside = compiled(X)
    with emulate(compiled, linear=Roles("mxfp4", "mxfp4", RANDOM), overrides={"3": "e4m3fn"}) as whole:
        compiled(X)
    assert torch.equal(compiled(X), plain)
    assert not torch.equal(inside, plain)
    assert [row.module for row in emulation.report().emulated] == ["0", "2", "3"]
    assert [str(row.roles.weight) for row in whole.report()] == ["mxfp4", "mxfp4", "e4m3fn"]


def test_multi_head_attention_of_torch():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 32)
    expected = layer(x)
    for training in (True, False):  # the second would go a fused way
        layer.train(training)
        with (
            torch.set_grad_enabled(training),
            emulate(layer, linear="fp32", attention="fp32", softmax="fp32") as emulation,
        ):
            torch.testing.assert_close(layer(x), expected)
        calls = {row.operation: row.calls for row in emulation.report().emulated}
        assert calls["scaled_dot_product_attention"] == 1
        assert sum(row.calls for row in emulation.report() if row.operation == "linear") == 4
        assert not [row for row in emulation.report().stayed if row.kind != "norm"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_of_transformers(attention):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 64, (2, 9))
    roles = Roles("mxfp8", "mxfp8", Cast("mxfp8-e5m2", Stochastic(0)))
    overrides = {"lm_head": None, "*.1.mlp.*": "e4m3fn:tensor"}
    kinds = {"linear": roles, "attention": roles, "norm": "bf16", "softmax": "bf16"}
    plain = model(tokens, labels=tokens).loss
    with emulate(model, **kinds, overrides=overrides) as emulation:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    assert 0 < abs(loss.item() - plain.item()) < 0.05
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    report = emulation.report()
    emulated = {(row.module, row.operation) for row in report.emulated}
    layers = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert {(f"model.layers.{i}.self_attn.{name}", "linear") for i in (0, 1) for name in layers} <= emulated
    assert {str(r.roles.weight) for r in report if r.module == "model.layers.1.mlp.up_proj"} == {"e4m3fn:tensor"}
    assert ("model.norm", "LlamaRMSNorm") in emulated
    product = "scaled_dot_product_attention" if attention == "sdpa" else "matmul"
    assert {("model.layers.0.self_attn", product), ("model.layers.0.self_attn", "softmax")} <= emulated
    # rotary positions are an outer product of a frequency and a position
    stayed = {(row.module, row.reason) for row in report.stayed}
    assert stayed <= {("lm_head", "no roles given"), ("model.rotary_emb", "an outer product, which sums over nothing")}
    assert ("lm_head", "no roles given") in stayed
    expected = r"model\.layers\.\*\.self_attn\.q_proj +linear +2 +weight mxfp8, activation mxfp8"
    assert re.search(expected, str(report))


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = FailingNorm()
        self.linear = torch.nn.Linear(64, 8)

    def forward(self, x, fail=False):
        return self.linear(self.norm(x=x, fail=fail))


class FailingNorm(torch.nn.Module):
    def forward(self, x, fail):
        if fail:
            raise FloatingPointError("on purpose")
        return x / x.norm()


def test_a_forward_pass_that_fails_leaves_nothing_open():
    model = Failing()
    with emulate(model, linear="e2m1", norm="e4m3fn") as emulation:
        with pytest.raises(FloatingPointError):
            model(X, fail=True)
        assert emulation.place is None
        assert not emulation.in_norm
        assert not torch.overrides._get_current_function_mode_stack()
        y = model(X)
    cast = hn.cast(X, "e4m3fn")
    cast = hn.cast(cast / cast.norm(), "e4m3fn")
    expected = hn.cast(cast, "e2m1") @ hn.cast(model.linear.weight.data, "e2m1").T + model.linear.bias.data
    assert torch.equal(y, expected)
    assert not model.linear._forward_hooks


def test_one_emulation_over_many_steps_counts_them():
    model = mlp()
    with warnings.catch_warnings(), emulate(model, linear="e4m3fn") as emulation:
        for _ in range(3):
            F.mse_loss(model(X), torch.zeros(16, 8)).backward()
    assert emulation.step == 3
    assert [row.calls for row in emulation.report()] == [3, 3, 3]
    assert np.isfinite(model[0].weight.grad.numpy()).all()
