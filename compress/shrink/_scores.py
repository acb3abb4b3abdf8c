"""Importance of what may go: short pure functions of activations or weights, and the choice of the best."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def sequence_l2(activations: Tensor) -> Tensor:
    """The root of the sum of squares over the tokens of one sequence: [tokens, units] to [units].

    >>> sequence_l2(torch.tensor([[3.0, 1.0], [4.0, 0.0]])).tolist()
    [5.0, 1.0]

    Source: Muralidharan et al., "Compact language models via pruning and knowledge distillation" (Minitron,
    arXiv 2407.14679), section 2.2, with the mean over sequences after it.
    """
    return activations.double().square().sum(0).sqrt()


def sequence_mean(activations: Tensor) -> Tensor:
    """The mean magnitude over the tokens of one sequence: [tokens, units] to [units] (Minitron, as above).

    >>> sequence_mean(torch.tensor([[3.0, 1.0], [-5.0, 0.0]])).tolist()
    [4.0, 0.5]
    """
    return activations.double().abs().mean(0)


def contribution(activation: Tensor, weight: Tensor) -> Tensor:
    """How much of a layer's output each input makes: its activation times the norm of the column that reads it.

    >>> contribution(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 0.0], [4.0, 1.0]])).tolist()
    [5.0, 2.0]

    activation: [inputs], weight: [outputs, inputs]. Source: Wanda's |W| |X| (Sun et al., arXiv 2306.11695,
    equation 1), summed in squares over a column.
    """
    return activation.double() * weight.detach().double().square().sum(0).sqrt()


def block_influence(before: Tensor, after: Tensor) -> Tensor:
    """1 - the mean cosine between what goes into a layer and what comes out, both [tokens, width].

    >>> round(float(block_influence(torch.eye(2), torch.eye(2))), 6)
    0.0

    Source: Men et al., "ShortGPT" (arXiv 2403.03853), equation 1.
    """
    cosine = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
    return 1 - cosine.mean()


def routed_output(gates: Tensor, outputs: Tensor) -> Tensor:
    """The mean of gate times output norm over the tokens that went to an expert: [tokens] and [tokens, width].

    >>> float(routed_output(torch.tensor([0.5, 1.0]), torch.tensor([[3.0, 4.0], [0.0, 1.0]])))
    1.75

    0 for an expert without tokens. Source: Lasby et al., "REAP" (arXiv 2510.13999).
    """
    if not len(gates):
        return torch.zeros((), dtype=torch.float64)
    return (gates.double() * outputs.double().norm(dim=-1)).mean()


def highest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` highest scores along the last axis, ascending; of equals the first.

    >>> highest(torch.tensor([0.1, 3.0, 2.0, 3.0]), 2).tolist()
    [1, 3]

    Raises ValueError for NaN among the scores.
    """
    if torch.isnan(scores).any():
        raise ValueError("importance scores hold NaN, of which none is the highest: check the model and the data")
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values


def highest_within(scores: Tensor, groups: int, count: int) -> Tensor:
    """The indices of the `count` highest scores within each of the equal groups that [n] falls into.

    >>> highest_within(torch.tensor([1.0, 2.0, 9.0, 8.0]), groups=2, count=1).tolist()
    [1, 2]
    """
    size = scores.shape[-1] // groups
    inner = highest(scores.reshape(groups, size), count)
    return (inner + size * torch.arange(groups)[:, None]).reshape(-1)
