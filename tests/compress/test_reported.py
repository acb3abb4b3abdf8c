"""Public bug reports of other tools, each with its small input: they do not happen here."""

import numpy as np
import pytest
import torch

from halfulp.compress.calibrate import Seen
from halfulp.compress.distill import Objective, token_loss
from halfulp.compress.methods import gptq
from halfulp.compress.rotate import awq_scales, smooth_scales
from halfulp.numerics import decode, encode, format


@pytest.mark.parametrize("order", ["none", "group", "static"])
@pytest.mark.parametrize("fmt", ["int4:g4", "int4:channel", "mxfp4"])
def test_gptqs_blocks_are_a_schedule(fmt, order):
    # CMP-01: 2 x 8; the columns of a block and of the matrix are not the same numbers
    generator = np.random.default_rng(0)
    weight, x = generator.standard_normal((2, 8)), generator.standard_normal((8, 40))
    results = [gptq(weight, x @ x.T, format(fmt), order=order, block=block) for block in (1, 3, 4, 8, 128)]
    for other in results[1:]:
        np.testing.assert_array_equal(other.values(), results[0].values())


def test_awq_measures_magnitudes():
    # CMP-04: a channel that is always negative has a mean that no fractional power takes
    x = torch.tensor([[-0.5, 0.5, 2.0, 0.25]]).repeat(6, 1) * torch.tensor([1.0, 1.0, -1.0, 1.0])
    seen = Seen.of(x, frozenset({"total", "second"}))
    assert seen.total is not None
    found = awq_scales(
        seen.total / seen.tokens, [torch.randn(3, 4, generator=torch.Generator().manual_seed(0))], x.T @ x, "int3:g4"
    )
    assert torch.isfinite(found.scales).all()
    assert (found.scales > 0).all()
    assert found.scales[0] == found.scales[1]


def test_smoothing_a_dead_channel():
    # CMP-05
    x_max, weight = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([[0.0, 1.0, 0.0]])
    scales = smooth_scales(x_max, [weight], 0.5)
    assert scales.tolist() == [1.0, pytest.approx(2**0.5), 1.0]
    x = torch.tensor([[1.0, -2.0, 0.0]]).double()
    torch.testing.assert_close((x / scales) @ (scales * weight).T, x @ weight.double().T)


@pytest.mark.parametrize("fmt", ["nvfp4", "e4m3fn:tensor", "int8:tensor", "mxfp4", "int4:g16:asym"])
def test_a_range_of_zero_has_a_finite_scale(fmt):
    # CMP-07: an expert that never fired
    q = encode(torch.zeros(4, 32), fmt)
    assert torch.isfinite(decode(q)).all()
    assert not decode(q).any()
    if q.tensor_scale is not None:
        assert 0 < float(q.tensor_scale) < float("inf")


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_a_distillation_loss_is_one_tokens(name, temperature):
    # CMP-12: summed over the vocabulary, a mean over tokens, times T^2, however often the sequence comes
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 8, 5, generator=generator) for _ in range(2))
    objective = Objective(name, temperature)

    def mean(times):
        s, t = (x.repeat(1, times, 1).reshape(-1, 5) for x in (student, teacher))
        return token_loss(s, t, torch.arange(len(s)), torch.zeros(len(s), dtype=torch.long), objective) / len(s)

    torch.testing.assert_close(mean(2), mean(1))
    if name == "forward_kl":
        p, log_q = (teacher / temperature).softmax(-1), (student / temperature).log_softmax(-1)
        expected = temperature**2 * (p * (p.log() - log_q)).sum(-1).mean()
        torch.testing.assert_close(mean(1), expected)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_padding_has_no_gradient(name):
    # CMP-13: two sequences of lengths 3 and 1, the teacher's padding all minus infinity
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 3, 5, generator=generator) for _ in range(2))
    teacher[1, 1:] = -torch.inf
    student.requires_grad_()
    rows = torch.tensor([0, 1, 2, 3])
    token_loss(student.reshape(-1, 5), teacher.reshape(-1, 5), rows, torch.zeros(4).long(), Objective(name)).backward()
    assert torch.isfinite(student.grad).all()
    assert student.grad[0].any()
    assert not student.grad[1, 1:].any()
