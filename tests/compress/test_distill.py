"""Training a student: every promise of the loop against a run that breaks it."""

import math

import pytest
import torch
from torch.nn import functional

from halfulp.compress.distill import (
    Example,
    Features,
    Objective,
    Quantization,
    Settings,
    distill,
    lora,
    nats_per_token,
    token_loss,
)
from halfulp.compress.distill._data import collate, order

transformers = pytest.importorskip("transformers")
F = torch.float64


def tiny(seed=0, hidden=32, layers=2, vocab=64, **changes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).eval()


def windows(count=6, length=16, vocab=64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, vocab, (count, length), generator=generator))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_padding_and_prompts_do_not_count():
    """The same windows alone or padded, whatever the padding holds: one loss, one step, one result."""
    student, teacher = tiny(0), tiny(1)
    long, short = windows(2)
    short = short[:7]
    prompt = Example(long, torch.arange(16) >= 9)
    found = []
    for pad in (0, 63):
        batch = collate([prompt, Example(short)], pad=pad)
        assert batch.padded
        assert len(batch.rows) == 7 + 6
        logits = [
            m(input_ids=batch.ids, attention_mask=batch.mask.long()).logits.flatten(0, 1) for m in (student, teacher)
        ]
        found.append(
            float(token_loss(*logits, batch.rows, batch.targets, Objective("jsd", cross_entropy=0.5)).detach())
        )
    assert found[0] == found[1]
    results = []
    for settings in (Settings(1, batch=2), Settings(1, batch=1, accumulate=2)):
        student = tiny(0)
        features = Features({1: 2}, width=tuple(range(32)))
        distill(student, teacher, [prompt, short], settings, objective=Objective(cross_entropy=0.5, features=features))
        results.append(weights(student))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=2e-5)


def test_order_is_a_permutation_of_each_epoch():
    seen = [i for step in range(6) for i in order(step, 2, 4, seed=5)]
    assert [sorted(seen[i : i + 4]) for i in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert seen != [i for step in range(6) for i in order(step, 2, 4, seed=6)]
    assert seen[:4] != seen[4:8] or seen[4:8] != seen[8:]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "no data"),
        ([torch.zeros(3)], r"data\[0\]: an example of torch.float32 \[3\]: expected token ids, int64 \[tokens\]"),
        ([[1, 2]], r"data\[0\]: an example of list"),
        ([torch.tensor([5])], r"data\[0\]: an example of 1 tokens has none to predict"),
        ([torch.tensor([5, 64])], r"data\[0\] has the token 64, outside 0 to 63 of the vocabulary"),
        ([torch.tensor([5, -1])], r"data\[0\] has the token -1, outside 0"),
    ],
)
def test_data_that_cannot_be_used(data, says):
    with pytest.raises(ValueError, match=says):
        distill(tiny(), tiny(), data, Settings(1))


def test_a_student_learns():
    student, teacher = tiny(0, layers=1), tiny(1)
    data, calls = windows(8), []
    before = {k: v.clone() for k, v in teacher.state_dict().items()}
    state = torch.get_rng_state()
    result = distill(
        student, teacher, data, Settings(60, batch=4, learning_rate=5e-3, warmup=5, evaluate_every=30),
        held_out=data[:2], progress=calls.append,
    )  # fmt: skip
    assert result.history[-1]["loss"] < 0.6 * result.history[0]["loss"]
    assert [i for i, record in enumerate(result.history) if "held_out" in record] == [29, 59]
    assert result.history[-1]["held_out"] == pytest.approx(nats_per_token(student, data[:2]), rel=1e-6)
    assert calls[-1].step == calls[-1].steps == 60
    assert calls[-1].tokens == 60 * 4 * 15
    assert equal(dict(teacher.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not student.training
    assert all(p.grad is None and p.requires_grad for p in student.parameters())


def test_text_alone_needs_no_teacher():
    student = tiny(0)
    result = distill(
        student, None, windows(2), Settings(20, batch=2, learning_rate=1e-2), objective=Objective(cross_entropy=1.0)
    )
    assert result.history[-1]["loss"] < 0.5 * result.history[0]["loss"]
    with pytest.raises(ValueError, match=r"no teacher: give one, or Objective\(cross_entropy=1.0\)"):
        distill(student, None, windows(2), Settings(1))


def test_accumulation_is_a_larger_batch():
    """Windows of different lengths too: the mean is over tokens, not over micro-batches."""
    data = [w[: 16 - 3 * i] for i, w in enumerate(windows(4))]
    results = []
    for settings in (Settings(3, batch=4, learning_rate=1e-3), Settings(3, batch=1, accumulate=4, learning_rate=1e-3)):
        student = tiny(0)
        result = distill(student, tiny(1), data, settings, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
        results.append((weights(student), [record["loss"] for record in result.history]))
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-5, atol=1e-6)


def test_schedule():
    settings = Settings(100, learning_rate=1.0, warmup=10, final=0.1)
    rates = [settings.rate(i) for i in range(100)]
    assert rates[:2] == [0.1, 0.2]
    assert rates[9] == rates[10] == max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 < rates[-1] < 0.11
    assert Settings(1).rate(0) == Settings(1).learning_rate


def test_bfloat16():
    student = tiny(0)
    result = distill(student, tiny(1), windows(4), Settings(20, batch=4, learning_rate=5e-3, dtype="bfloat16"))
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert all(p.dtype == torch.float32 for p in student.parameters())


def test_weight_decay_is_for_matrices():
    student = tiny(0)
    before = weights(student)
    settings = Settings(1, learning_rate=1e-2, weight_decay=0.5)
    # a teacher that is the student: no gradient, only decay
    distill(student, tiny(0), windows(1), settings, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    after = weights(student)
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] * (1 - 0.5e-2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after["model.norm.weight"], before["model.norm.weight"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("width", ["linear", "list"])
def test_features(width):
    """A student of fewer features learns to have the teacher's."""
    student, teacher = tiny(0, hidden=16), tiny(1)
    chosen = "linear" if width == "linear" else tuple(range(0, 32, 2))
    how = Objective(cross_entropy=1.0, features=Features({1: 1, 2: 2}, weight=5.0, width=chosen))
    result = distill(student, teacher, windows(4), Settings(60, batch=4, learning_rate=5e-3), objective=how)
    assert result.history[-1]["loss"] < 0.8 * result.history[0]["loss"]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Settings(0), "steps=0: expected a whole number from 1"),
        (lambda: Settings(1, learning_rate=math.nan), "learning_rate=nan: expected a positive number"),
        (lambda: Settings(1, dtype="float16"), "dtype='float16': choose one of 'float32', 'bfloat16'"),
        (lambda: Settings(1, clip=0), "clip=0: expected a positive number, or None"),
        (lambda: Objective("kl"), "divergence='kl': choose one of 'forward_kl', 'reverse_kl', 'jsd'"),
        (lambda: Objective(temperature=0), "temperature=0: expected a number above 0"),
        (lambda: Objective(cross_entropy=2), "cross_entropy=2: expected a share from 0 to 1"),
        (lambda: Objective(beta=1.0), "beta=1.0: expected a number between 0 and 1"),
        (lambda: Features({}), "at least one pair"),
        (lambda: Features({1: 1}, width="same"), "width='same': give indices"),
        (lambda: Quantization(), "nothing to quantize: give weights or activations"),
        (lambda: Quantization("int5000"), "int5000"),
        (lambda: Quantization("mxfp4", learned=True), "step sizes are learned for blocks of signed integers"),
        (
            lambda: Example(torch.arange(3), torch.ones(2, dtype=torch.bool)),
            r"scored is torch.bool \[2\]: expected bool \[3\]",
        ),
    ],
)
def test_settings_that_make_no_sense(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("student", "options", "says"),
    [
        (
            {"vocab": 80},
            {},
            r"predicts 80 tokens and the teacher 64: .* pass Objective\(vocabulary=N\) with its size N <= 64",
        ),
        (
            {"vocab": 80},
            {"objective": Objective(vocabulary=70)},
            "vocabulary=70: the student predicts 80 tokens and the teacher 64",
        ),
        (
            {"hidden": 16},
            {"objective": Objective(features=Features({1: 1}))},
            "the student has 16 features and the teacher 32",
        ),
        ({}, {"objective": Objective(features=Features({3: 1}))}, "hidden states 0 to 2, the teacher 0 to 2"),
        (
            {"hidden": 16},
            {"objective": Objective(features=Features({1: 1}, width=(0, 1)))},
            "width has 2 features: expected 16",
        ),
        ({}, {"masks": {"x": torch.ones(1, dtype=torch.bool)}}, "mask 'x' is of no parameter"),
        ({}, {"masks": {"lm_head.weight": torch.ones(1, dtype=torch.bool)}}, r"expected bool \[64, 32\]"),
        ({}, {"quantization": Quantization("int8", targets=("*.q_porj",))}, "target pattern .* near names: q_proj"),
        ({}, {"quantization": Quantization("int8", ignore=("nothing",))}, "ignore pattern 'nothing' matches no weight"),
    ],
)
def test_what_does_not_fit_together(student, options, says):
    with pytest.raises(ValueError, match=says):
        distill(tiny(**student), tiny(1), windows(2), Settings(1), **options)


def test_vocabularies_that_differ_in_padding():
    result = distill(tiny(0, vocab=80), tiny(1), windows(2), Settings(2), objective=Objective(vocabulary=64))
    assert math.isfinite(result.history[-1]["loss"])


def test_what_excludes_each_other():
    student = tiny(0)
    with pytest.raises(ValueError, match="share parameters, so both would change"):
        distill(student, student, windows(1), Settings(1))
    for options in (
        {"masks": {"lm_head.weight": torch.ones(64, 32).bool()}},
        {"quantization": Quantization("int4:g8", learned=True)},
    ):
        with pytest.raises(ValueError, match="adapters are trained alone"):
            distill(student, tiny(1), windows(1), Settings(1), adapters=lora(student, rank=2), **options)


def test_a_loss_that_is_no_number_stops(tmp_path):
    student = tiny(0)
    with torch.no_grad():
        student.model.norm.weight[0] = math.nan
    with pytest.raises(ValueError, match="step 1 has the loss nan"):
        distill(student, tiny(1), windows(2), Settings(1))
    with pytest.raises(ValueError, match=r"is torch.bfloat16: updates would be rounded away"):
        distill(tiny(0).bfloat16(), tiny(1), windows(2), Settings(1))


def test_functional_cross_check():
    """nats_per_token is what torch says."""
    model, data = tiny(0), windows(2)
    expected = sum(float(functional.cross_entropy(model(w[None]).logits[0, :-1], w[1:]).detach()) for w in data) / 2
    assert nats_per_token(model, data) == pytest.approx(expected, rel=1e-6)
