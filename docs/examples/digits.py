"""Train a digits classifier in emulated fp8 and MXFP4, next to float32, and draw the curves.

    python docs/examples/digits.py            # three minutes on one core; writes docs/digits.svg

The data are scikit-learn's 1,797 handwritten digits (8 x 8 pixels), which come with it. The model is a
perceptron with two hidden layers of 64. Every matrix product, the two of the backward pass included, has its
operands in the given formats; sums, biases and the loss are float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional as F

import halfulp as hu
from halfulp.eval._plots import Scale, plain, ticks

# NVIDIA's rule for the scale lets no element saturate, so that stochastic rounding has the right mean
MXFP4 = "mxfp4:rule=rceil"
# one float32 scale for a tensor: e4m3 forward, e5m2 for gradients
FP8 = hu.Roles(weight="e4m3fn:tensor", activation="e4m3fn:tensor", gradient="e5m2:tensor")


def mxfp4(gradient: Any) -> Callable[[int], hu.Roles]:
    """MXFP4 everywhere, gradients with the rounding that ``gradient(seed)`` gives."""
    return lambda seed: hu.Roles(weight=MXFP4, activation=MXFP4, gradient=hu.Cast(MXFP4, gradient(seed)))


class Arm(NamedTuple):
    """One way to train: the roles of the linear layers for a seed, and whether weights and state are short too."""

    name: str
    roles: Callable[[int], hu.Roles | None]
    short_state: bool = False


ARMS = (
    Arm("float32", lambda seed: None),
    Arm("fp8", lambda seed: FP8),
    Arm("MXFP4, stochastic", mxfp4(lambda seed: hu.Stochastic(seed))),
    Arm("MXFP4, stochastic, no float32 kept", mxfp4(lambda seed: hu.Stochastic(seed)), short_state=True),
    Arm("MXFP4, nearest", mxfp4(lambda seed: "nearest_even")),
)


class Curve(NamedTuple):
    """Per epoch: mean loss over the training set while training, and accuracy on the test set, in percent."""

    loss: list[float]
    accuracy: list[float]


def train(arm: Arm, seed: int, epochs: int, data: list[torch.Tensor]) -> Curve:
    """One run. The same seed gives every arm the same first weights and the same batches."""
    inputs, test_inputs, labels, test_labels = data
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    if arm.short_state:  # w <- round(w + update) in bf16, and Adam's moments in blocks of fp8 and in bf16
        state = {"exp_avg": "e4m3fn:g32", "exp_avg_sq": "bf16"}
        hu.quantize_optimizer(optimizer, weights="bf16", state=state, rounding=hu.Stochastic(seed))
    roles, curve = arm.roles(seed), Curve([], [])
    with nullcontext() if roles is None else hu.emulate(model, linear=roles):
        for _ in range(epochs):
            total = 0.0
            for batch in torch.randperm(len(inputs)).split(64):
                loss = F.cross_entropy(model(inputs[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item() * len(batch)
            with torch.no_grad():
                right = (model(test_inputs).argmax(1) == test_labels).float().mean().item()
            curve.loss.append(total / len(inputs))
            curve.accuracy.append(100 * right)
    return curve


def main() -> None:
    """Train every arm with every seed, print the table, draw the picture."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=25)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "digits.svg")
    given = options.parse_args()
    torch.set_num_threads(1)
    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(pixels.astype("float32") / 16, digits, test_size=360, stratify=digits, random_state=0)
    data = [torch.from_numpy(part) for part in parts]
    curves: dict[str, list[Curve]] = {}
    print(f"{'':36}loss, last epoch    test accuracy, last epoch (mean and standard deviation of {given.seeds} seeds)")
    for arm in ARMS:
        start = time.perf_counter()
        runs = curves[arm.name] = [train(arm, seed, given.epochs, data) for seed in range(given.seeds)]
        losses, accuracies = ([run[i][-1] for run in runs] for i in (0, 1))
        seconds = time.perf_counter() - start
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in (losses, accuracies)]
        print(
            f"{arm.name:36}{mean(losses):.4f} +- {spread[0]:.4f}    {mean(accuracies):.2f} +- {spread[1]:.2f} %"
            f"    {seconds:.0f} s"
        )
    given.out.write_text(picture(curves))
    print(f"curves: {given.out}")


STYLE = """
.digits { font: 12px system-ui, sans-serif; background: #fff }
.digits text { fill: #3d3d3a } .digits .title { font-weight: 600; fill: #141413 }
.digits .grid { stroke: #e4e2da } .digits .axis { stroke: #87867f }
.digits .line { fill: none; stroke-width: 2; stroke-linejoin: round } .digits .band { stroke: none; opacity: .16 }
"""
COLOURS = ("#141413", "#2b6cb0", "#2f855a", "#b7791f", "#c53030")


def picture(curves: dict[str, list[Curve]]) -> str:
    """Two panels, training loss and test error by epoch: means as lines, one standard deviation as bands."""
    body = [f"<style>{STYLE}</style><rect width='860' height='412' fill='#fff'/>"]
    losses = [[run.loss for run in runs] for runs in curves.values()]
    errors = [[[100 - right for right in run.accuracy] for run in runs] for runs in curves.values()]
    body += panel("training loss", losses, 56) + panel("test error, %", errors, 492)
    for i, (name, colour) in enumerate(zip(curves, COLOURS)):
        x, y = 56 + 290 * (i // 2), 366 + 22 * (i % 2)
        body.append(f"<line class='line' stroke='{colour}' x1='{x}' y1='{y - 4}' x2='{x + 22}' y2='{y - 4}'/>")
        body.append(f"<text x='{x + 28}' y='{y}'>{name}</text>")
    seeds = len(losses[0])
    body.append(f"<text x='636' y='388'>mean and deviation of {seeds} seeds</text>")
    label = "aria-label='Curves of training in float32, fp8 and MXFP4'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' class='digits' viewBox='0 0 860 412' role='img' {label}>"
    return head + "\n".join(body) + "</svg>\n"


def panel(title: str, arms: list[list[list[float]]], left: float) -> list[str]:
    """One panel: for each arm its runs, a list of values by epoch for each."""
    summaries = [[(mean(at), stdev(at) if len(at) > 1 else 0.0) for at in zip(*runs)] for runs in arms]
    values = [m for points in summaries for m, _ in points]
    low, high, epochs = min(values) * 0.7, max(values) * 1.2, len(summaries[0])
    across, up = Scale(1, max(epochs, 2), left, left + 348), Scale(low, high, 310, 34, log=True)
    body = [f"<text class='title' x='{left - 30}' y='18'>{title}</text>"]
    for tick in ticks(low, high, log=True, most=6):
        y = up(tick)
        body.append(f"<line class='grid' x1='{left}' y1='{y:.1f}' x2='{left + 348}' y2='{y:.1f}'/>")
        body.append(f"<text x='{left - 6}' y='{y + 4:.1f}' text-anchor='end'>{plain(tick)}</text>")
    for tick in sorted({1, *range(5, epochs + 1, 5)}):
        body.append(f"<text x='{across(tick):.1f}' y='326' text-anchor='middle'>{tick}</text>")
    body.append(f"<line class='axis' x1='{left}' y1='310' x2='{left + 348}' y2='310'/>")
    body.append(f"<text x='{left + 348}' y='341' text-anchor='end'>epoch</text>")
    xs = [across(epoch + 1) for epoch in range(epochs)]
    for colour, points in zip(COLOURS, summaries):
        upper, lower = ([up(max(m + side * s, low)) for m, s in points] for side in (1, -1))
        edge = [*zip(xs, upper), *reversed([*zip(xs, lower)])]
        body.append(f"<path class='band' fill='{colour}' d='{path(edge)}Z'/>")
    for colour, points in zip(COLOURS, summaries):
        body.append(f"<path class='line' stroke='{colour}' d='{path([(x, up(m)) for x, (m, _) in zip(xs, points)])}'/>")
    return body


def path(points: list[tuple[float, float]]) -> str:
    """Points as the data of an SVG path."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


if __name__ == "__main__":
    main()
