"""What a student learns from logits: every loss against its formula."""

import pytest
import torch

from halfulp.compress.distill import (
    Objective,
    forward_kl,
    jsd,
    reverse_kl,
    token_loss,
)

transformers = pytest.importorskip("transformers")
F = torch.float64


def test_divergences_are_their_formulas():
    torch.manual_seed(0)
    s, t = torch.randn(5, 7, dtype=F), torch.randn(5, 7, dtype=F)
    p, q = t.softmax(-1), s.softmax(-1)
    torch.testing.assert_close(forward_kl(s, t), (p * (p / q).log()).sum(-1))
    torch.testing.assert_close(reverse_kl(s, t), (q * (q / p).log()).sum(-1))
    for beta in (0.1, 0.5, 0.9):
        m = beta * p + (1 - beta) * q
        expected = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
        torch.testing.assert_close(jsd(s, t, beta), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd"])
def test_tokens_that_a_model_rules_out(name):
    """Logits of minus infinity are no NaN, in the value or in the gradient."""
    s = torch.randn(3, 5, requires_grad=True)
    t = torch.randn(3, 5)
    t[:, 2] = -torch.inf
    if name == "reverse_kl":
        with torch.no_grad():
            s[:, 2] = -torch.inf
    loss = token_loss(s, t, torch.arange(3), torch.zeros(3, dtype=torch.long), Objective(name))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(s.grad).all()


@pytest.mark.parametrize("objective", [
    Objective(), Objective("reverse_kl", 2.0), Objective("jsd", 0.5, 0.3, beta=0.2), Objective(cross_entropy=1.0),
    Objective("forward_kl", 3.0, 0.5, vocabulary=9),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 30, 1 << 20])
def test_chunks_change_nothing(objective, chunk):
    torch.manual_seed(0)
    s, t = torch.randn(8, 11, requires_grad=True), torch.randn(8, 11)
    rows, targets = torch.tensor([0, 1, 4, 6, 7]), torch.tensor([3, 10, 0, 5, 5])
    token_loss(s, t, rows, targets, objective, chunk).mul(0.5).backward()
    other = s.detach().clone().requires_grad_()
    (0.5 * objective.per_token(other[rows], t[rows], targets).sum()).backward()
    torch.testing.assert_close(s.grad, other.grad, rtol=1e-6, atol=1e-7)
    assert not s.grad[[2, 3, 5]].any()


def test_token_loss_has_its_numeric_gradient():
    s, t = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
    rows, targets = torch.arange(2), torch.tensor([1, 2])
    how = Objective("jsd", 2.0, 0.4)
    token_loss(s, t, rows, targets, how).backward()
    numeric = torch.zeros_like(s)
    for i in range(8):
        step = torch.zeros(8, dtype=F)
        step[i] = 1e-5
        up, down = (
            how.per_token(s.detach().double() + k * step.view(2, 4), t.double(), targets).sum() for k in (1, -1)
        )
        numeric.view(-1)[i] = (up - down) / 2e-5
    torch.testing.assert_close(s.grad, numeric, rtol=1e-4, atol=1e-5)


def test_no_float32_copy_of_all_logits():
    """Of bfloat16 logits no float32 tensor is made that is larger than a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                    self.seen = max(self.seen, x.numel())
            return out

    s = torch.randn(64, 100).bfloat16().requires_grad_()
    t = torch.randn(64, 100).bfloat16()
    with Largest() as mode:
        token_loss(
            s, t, torch.arange(63), torch.zeros(63, dtype=torch.long), Objective("jsd", 2.0, 0.5), 800
        ).backward()
    assert mode.seen == 800
    assert s.grad.dtype == torch.bfloat16
