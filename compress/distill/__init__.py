"""Training a student: distillation, training in formats, low-rank adapters, and the way back to a checkpoint."""

from ._data import Example
from ._evaluate import nats_per_token
from ._lora import Adapters, lora, merge
from ._losses import Features, Objective, feature_loss, forward_kl, jsd, reverse_kl, token_loss
from ._quantization import Quantization
from ._save import save_student
from ._train import Distilled, Settings, Training, distill

__all__ = [
    "Adapters",
    "Distilled",
    "Example",
    "Features",
    "Objective",
    "Quantization",
    "Settings",
    "Training",
    "distill",
    "feature_loss",
    "forward_kl",
    "jsd",
    "lora",
    "merge",
    "nats_per_token",
    "reverse_kl",
    "save_student",
    "token_loss",
]
