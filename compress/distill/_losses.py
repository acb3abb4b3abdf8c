"""What a student is to learn from a teacher's logits: pure functions, worked on a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor
CHUNK = 1 << 22  # logits worked on at a time: a few float32 copies of 16 MB


def forward_kl(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """KL(teacher || student) in nats, [tokens, vocabulary] twice to [tokens].

    >>> forward_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, -float("inf")]]))
    tensor([0.6931])

    Source: Hinton et al., "Distilling the knowledge in a neural network" (arXiv 1503.02531).
    """
    return _divergence(teacher.log_softmax(-1), student.log_softmax(-1))


def reverse_kl(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """KL(student || teacher) in nats, [tokens, vocabulary] twice to [tokens].

    >>> bool(reverse_kl(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 2.0]])) == 0)
    True

    Source: Gu et al., "MiniLLM" (arXiv 2306.08543).
    """
    return _divergence(student.log_softmax(-1), teacher.log_softmax(-1))


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """The generalized Jensen-Shannon divergence in nats, [tokens, vocabulary] twice to [tokens].

    >>> bool(jsd(torch.tensor([[0.0, 99.0]]), torch.tensor([[99.0, 0.0]])) <= torch.log(torch.tensor(2.0)))
    True

    beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student.
    Source: Agarwal et al., "On-policy distillation of language models" (GKD, arXiv 2306.13649), section 2.
    """
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    m = torch.logaddexp(p + torch.tensor(beta).log(), q + torch.tensor(1 - beta).log())
    return beta * _divergence(p, m) + (1 - beta) * _divergence(q, m)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """The sum of exp(p) (p - q), where what has no probability adds nothing."""
    difference = (p - q).masked_fill(p == -float("inf"), 0)
    return (p.exp() * difference).sum(-1)


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
}


@dataclass(frozen=True)
class Features:
    """Hidden states that a student is to have as the teacher has them, by mean squared error.

    >>> Features({2: 4}, width=(0, 2, 3)).layers
    {2: 4}

    layers: from a number of the student's hidden states to one of the teacher's; 0 is the embedding, i what comes
    out of layer i - 1 (of the last one, after the final norm). weight: of this loss beside the others. width: the
    teacher's features that the student has (after width pruning), "linear" for a linear map that is learned
    along and thrown away after, or None where both have the same width.
    Source: Romero et al., "FitNets" (arXiv 1412.6550).
    """

    layers: Mapping[int, int]
    weight: float = 1.0
    width: tuple[int, ...] | str | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("Features need at least one pair of hidden states, such as {2: 4}")
        if isinstance(self.width, str) and self.width != "linear":
            raise ValueError(f"width={self.width!r}: give indices of the teacher's features, 'linear' or None")


@dataclass(frozen=True)
class Objective:
    """What is minimized, per token: (1 - cross_entropy) T^2 divergence at temperature T + cross_entropy of the text.

    >>> Objective("jsd", temperature=2.0, cross_entropy=0.1).divergence
    'jsd'

    divergence: "forward_kl", "reverse_kl" or "jsd" (with its ``beta``). cross_entropy: the share of the text's own
    next token, from 0 to 1; at 1 no teacher is needed. features: hidden states to match besides.
    vocabulary: compare the first so many tokens only, where two models pad one vocabulary differently.
    Raises ValueError for anything else. T^2 keeps gradients of one size (Hinton et al., section 2).
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    cross_entropy: float = 0.0
    beta: float = 0.5
    features: Features | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r}: choose one of {', '.join(map(repr, DIVERGENCES))}")
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a number above 0")
        if not 0 <= self.cross_entropy <= 1:
            raise ValueError(f"cross_entropy={self.cross_entropy!r}: expected a share from 0 to 1")
        if not 0 < self.beta < 1:
            raise ValueError(f"beta={self.beta!r}: expected a number between 0 and 1")

    @property
    def needs_teacher(self) -> bool:
        """Is there anything to learn from a teacher?"""
        return self.cross_entropy < 1 or self.features is not None

    def per_token(self, student: Tensor, teacher: Tensor | None, targets: Tensor) -> Tensor:
        """The loss of each token: logits [tokens, vocabulary] in float32, targets [tokens]."""
        total: Any = 0.0
        if self.cross_entropy > 0:
            total = self.cross_entropy * functional.cross_entropy(student, targets, reduction="none")
        if self.cross_entropy < 1:
            assert teacher is not None
            n, t = self.vocabulary, self.temperature
            soft = DIVERGENCES[self.divergence](student[:, :n] / t, teacher[:, :n] / t, self.beta)
            total = total + (1 - self.cross_entropy) * t**2 * soft
        return total


def check_vocabularies(student: int, teacher: int, objective: Objective) -> None:
    """Raise ValueError where two models' logits cannot be compared, with what would do."""
    n = objective.vocabulary
    if n is not None and not 0 < n <= min(student, teacher):
        raise ValueError(f"vocabulary={n}: the student predicts {student} tokens and the teacher {teacher}")
    if n is None and student != teacher:
        raise ValueError(
            f"the student predicts {student} tokens and the teacher {teacher}: probabilities are compared token by "
            f"token. Where both have one tokenizer and differ in padding alone, pass Objective(vocabulary=N) with its "
            f"size N <= {min(student, teacher)}; with two tokenizers, Objective(cross_entropy=1.0) learns from the text"
        )


def token_loss(
    student: Tensor, teacher: Tensor | None, rows: Tensor, targets: Tensor, objective: Objective, chunk: int = CHUNK
) -> Tensor:
    """The sum of an objective over tokens, in chunks.

    >>> logits = torch.zeros(3, 4, requires_grad=True)
    >>> loss = token_loss(logits, None, torch.tensor([0, 2]), torch.tensor([1, 3]), Objective(cross_entropy=1.0))
    >>> loss.backward()
    >>> round(loss.item(), 4), logits.grad[1].tolist()
    (2.7726, [0.0, 0.0, 0.0, 0.0])

    student, teacher: logits [n, vocabulary] of any float type, teacher None where the objective needs none. rows:
    which of the n count, [tokens]; targets: their next tokens, [tokens]. chunk: how many logits are worked on at a
    time: float32 copies are of a chunk alone. The gradient, in the logits' own type, is made on the way.
    """
    total: Tensor = _TokenLoss.apply(student, teacher, rows, targets, objective, chunk)
    return total


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        teacher: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        objective: Objective,
        chunk: int,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        needed = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(student) if needed else None
        step = max(1, chunk // student.shape[-1])
        for some, wanted in zip(rows.split(step), targets.split(step)):
            with torch.enable_grad():
                part = student.detach()[some].float().requires_grad_(needed)
                other = None if teacher is None else teacher.detach()[some].float()
                loss = objective.per_token(part, other, wanted).sum()
            if gradient is not None:
                gradient[some] = torch.autograd.grad(loss, part)[0].to(gradient.dtype)
            total = total + loss.detach()
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * g.to(gradient.dtype), None, None, None, None, None


def feature_loss(student: Tensor, teacher: Tensor, rows: Tensor) -> Tensor:
    """The sum over tokens of the mean squared difference of their features, [n, width] twice.

    >>> feature_loss(torch.zeros(2, 4), torch.ones(2, 4), torch.tensor([1]))
    tensor(1.)
    """
    return (student[rows].float() - teacher[rows].float()).square().mean(-1).sum()
