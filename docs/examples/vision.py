"""A small vision transformer and a small convolutional network, compressed in many ways: accuracy on digits.

    python docs/examples/vision.py             # a minute or two on one core; writes docs/vision.svg

The data are scikit-learn's 1,797 handwritten digits (8 x 8 pixels), of which 597 are held out. The transformer is
built by the package `transformers` (patches of 2 x 2, four blocks of 64 channels), the network has three
convolutions with batch normalization, which is folded into them. All linear layers and convolutions are compressed,
the classifier too; but the first layer is not pruned: it has few weights, and half of them gone cost the network up
to 24 points. What is calibrated is calibrated on 256 images of the training set. Intervals are Wilson's, of 95 %, for
the share of all such digits that would be right. There is no third set: how the transformer is trained, and that the
first layer is left out of pruning, was chosen by accuracy on the held-out images, so the figures are a little too good.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import OrderedDict
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

import halfulp as hu
from halfulp.compress.modules import compress_module
from halfulp.eval._plots import Scale, plain, ticks

EVERY = ("linear", "classifier")


class Data(NamedTuple):
    """Images [n, 1, 8, 8] of about mean 0 and deviation 1 and their digits [n]."""

    images: torch.Tensor
    digits: torch.Tensor
    test_images: torch.Tensor
    test_digits: torch.Tensor


def data() -> Data:
    """The digits, split once and for all."""
    pixels, digits = load_digits(return_X_y=True)
    parts = train_test_split(
        ((pixels / 16 - 0.3) / 0.38).astype("float32"), digits, test_size=597, stratify=digits, random_state=0
    )
    x, test_x, y, test_y = map(torch.from_numpy, parts)
    return Data(x.reshape(-1, 1, 8, 8), y, test_x.reshape(-1, 1, 8, 8), test_y)


class Logits(nn.Module):
    """A transformers model that gives its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 1, 8, 8] to logits [n, 10]."""
        return self.model(images).logits


def transformer() -> nn.Module:
    """A vision transformer of 0.14 million parameters."""
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, num_labels=10, initializer_range=0.1,
    )  # fmt: skip
    return Logits(ViTForImageClassification(config))


def network() -> nn.Module:
    """A convolutional network of 0.07 million parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(OrderedDict(features=nn.Sequential(*features), classifier=nn.Linear(256, 10)))


def train(make: Callable[[], nn.Module], given: Data, epochs: int, rate: float) -> nn.Module:
    """A trained model. Images are shifted by up to a pixel each way while it learns."""
    torch.manual_seed(0)
    model = make()
    steps = epochs * -(-len(given.images) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(given.images)).split(64):
            down, right = torch.randint(0, 3, (2,)).tolist()
            images = F.pad(given.images[batch], (1, 1, 1, 1), value=-0.3 / 0.38)[
                :, :, down : down + 8, right : right + 8
            ]
            optimizer.zero_grad()
            F.cross_entropy(model(images), given.digits[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


class Arm(NamedTuple):
    """A way to compress a model: the transform, for the name of the model's first layer."""

    name: str
    transform: Callable[[str], Any] | None


def pruned(pattern: str | float, by: str) -> Callable[[str], Any]:
    """Pruned weights, but for the first layer's."""
    return lambda first: hu.prune(pattern, by=by, targets=EVERY, ignore=first)


def quantized(weights: str, inputs: str | None = None, **options: Any) -> Callable[[str], Any]:
    """Weights, and inputs of layers, rounded to nearest."""
    return lambda first: hu.quantize(weights, inputs, targets=EVERY, **options)


def gptq(weights: str) -> Callable[[str], Any]:
    """Weights rounded by GPTQ."""
    return lambda first: hu.gptq(weights, targets=EVERY)


def both(pattern: str | float) -> Callable[[str], Any]:
    """Pruned weights in int8, and int8 inputs."""
    eight = quantized("int8:channel", "int8:tensor", static=True)
    return lambda first: hu.chain(pruned(pattern, "sparsegpt")(first), eight(first))


ARMS = (
    Arm("float32", None),
    Arm("int8 weights and inputs, static", quantized("int8:channel", "int8:tensor", static=True)),
    Arm("fp8 (e4m3) weights and inputs", quantized("e4m3fn:channel", "e4m3fn:token")),
    Arm("MXFP4 weights", quantized("mxfp4")),
    Arm("MXFP4 weights and inputs", quantized("mxfp4", "mxfp4")),
    Arm("int4 weights, nearest", quantized("int4:channel")),
    Arm("int4 weights, GPTQ", gptq("int4:channel")),
    Arm("int3 weights, nearest", quantized("int3:channel")),
    Arm("int3 weights, GPTQ", gptq("int3:channel")),
    Arm("2:4 sparse, magnitude", pruned("2:4", "magnitude")),
    Arm("2:4 sparse, SparseGPT", pruned("2:4", "sparsegpt")),
    Arm("50 % sparse, magnitude", pruned(0.5, "magnitude")),
    Arm("50 % sparse, Wanda", pruned(0.5, "wanda")),
    Arm("50 % sparse, SparseGPT", pruned(0.5, "sparsegpt")),
    Arm("50 % sparse and int8, static", both(0.5)),
)


class Outcome(NamedTuple):
    """How many of the test images are right, Wilson's interval of that share, and kB of parameters."""

    right: int
    share: float
    low: float
    high: float
    kilobytes: float


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The interval of a share (Wilson, 1927): of 95 % by default."""
    share, middle = right / count, z * z / count
    spread = z * sqrt(share * (1 - share) / count + middle / (4 * count))
    return (share + middle / 2 - spread) / (1 + middle), (share + middle / 2 + spread) / (1 + middle)


def outcome(model: nn.Module, arm: Arm, given: Data) -> Outcome:
    """Compress a copy of a model, and count what it gets right."""
    model = copy.deepcopy(model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    if arm.transform is not None:
        first = next(name for name, module in model.named_modules() if isinstance(module, nn.Conv2d))
        batches = given.images[:256].split(64)
        size = compress_module(model, arm.transform(first), batches, clip="mse").nbytes[1]
    with torch.no_grad():
        right = int((model(given.test_images).argmax(1) == given.test_digits).sum())
    count = len(given.test_digits)
    return Outcome(right, right / count, *wilson(right, count), size / 1000)


def main() -> None:
    """Train both models, compress each in all ways, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "vision.svg")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = data()
    panels: dict[str, list[Outcome]] = {}
    for title, make, rate in (("vision transformer", transformer, 2e-3), ("convolutional network", network, 1e-2)):
        start = time.perf_counter()
        model = train(make, given, asked.epochs, rate)
        print(f"{title}, trained in {time.perf_counter() - start:.0f} s")
        print(f"{'':34}right of {len(given.test_digits)}  accuracy  interval of 95 %      kB")
        rows = panels[title] = []
        for arm in ARMS:
            found = outcome(model, arm, given)
            rows.append(found)
            interval = f"{found.low:.2%} to {found.high:.2%}"
            print(f"{arm.name:34}{found.right:12}  {found.share:8.2%}  {interval}  {found.kilobytes:6.0f}", flush=True)
    asked.out.write_text(picture(panels), encoding="utf-8")
    print(f"picture: {asked.out}")


STYLE = """
.vision { font: 12px system-ui, sans-serif; background: #fff } .vision text { fill: #3d3d3a }
.vision .title { font-weight: 600; fill: #141413 } .vision .grid { stroke: #e4e2da }
.vision .band { fill: #2b6cb0; opacity: .1 } .vision .line { stroke: #2b6cb0; stroke-width: 2 }
.vision circle { fill: #2b6cb0 }
"""


def picture(panels: dict[str, list[Outcome]]) -> str:
    """A panel for each model: accuracies as points with their intervals, float32's as a band."""
    lowest = 100 * min(row.low for rows in panels.values() for row in rows)
    low = min(max(lowest - 1, 0.0), 94.0)
    height = 22 * len(ARMS) + 66
    body = [f"<style>{STYLE}</style><rect width='900' height='{height}' fill='#fff'/>"]
    for i, arm in enumerate(ARMS):
        body.append(f"<text x='212' y='{54 + 22 * i}' text-anchor='end'>{arm.name}</text>")
    for left, (title, rows) in zip((226, 570), panels.items()):
        across = Scale(low, 100, left, left + 310)
        bottom = 44 + 22 * len(rows)
        body.append(f"<text class='title' x='{left}' y='20'>{title}: accuracy, %</text>")
        for tick in ticks(low, 100, most=6):
            body.append(f"<path class='grid' d='M{across(tick):.1f} 34V{bottom}'/>")
            body.append(f"<text x='{across(tick):.1f}' y='{bottom + 16}' text-anchor='middle'>{plain(tick)}</text>")
        first, last = across(100 * rows[0].low), across(100 * rows[0].high)
        body.append(f"<rect class='band' x='{first:.1f}' y='34' width='{last - first:.1f}' height='{bottom - 34}'/>")
        for i, row in enumerate(rows):
            y = 50 + 22 * i
            low_end, high_end = across(100 * row.low), across(100 * row.high)
            body.append(f"<path class='line' d='M{low_end:.1f} {y}H{high_end:.1f}'/>")
            body.append(f"<circle cx='{across(100 * row.share):.1f}' cy='{y}' r='4'/>")
    label = "aria-label='Accuracy of compressed models on digits'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' class='vision' viewBox='0 0 900 {height}' role='img' {label}>"
    return head + "\n".join(body) + "</svg>\n"


if __name__ == "__main__":
    main()
