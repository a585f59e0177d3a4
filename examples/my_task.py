"""A task of your own: one class that brings model, loss and data.  Here: which of two spirals?

hpc-train launch -n 4 train examples/my_task.toml
"""

import math

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train import LayerSpec, Task


def hidden(inputs: int, outputs: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU())


class Spirals(Task):
    """The arguments of its constructor are what [task_options] may set."""

    def __init__(self, width: int = 64, turns: float = 1.5) -> None:
        self.width, self.turns = width, turns

    def layers(self):
        """The model; each layer is built only on the stage that holds it."""
        return [
            LayerSpec(lambda: hidden(2, self.width), title="hidden 1"),
            LayerSpec(lambda: hidden(self.width, self.width), title="hidden 2"),
            LayerSpec(lambda: hidden(self.width, self.width), title="hidden 3"),
            LayerSpec(lambda: nn.Linear(self.width, 1), title="output"),
        ]

    def loss(self, output, target):
        """One figure a sample, [micro-batch], never their mean."""
        return nn.functional.binary_cross_entropy_with_logits(output[:, 0], target, reduction="none")

    def metrics(self, output, target):
        """What evaluation shows beside the loss; one figure a sample, too."""
        return {"accuracy": ((output[:, 0] > 0) == (target > 0.5)).float()}

    def dataset(self, split):
        """Any torch dataset of pairs (input, target)."""
        random = torch.Generator().manual_seed(0 if split == "train" else 1)
        radius = torch.rand(2048 if split == "train" else 512, generator=random).sqrt()
        arm = torch.randint(0, 2, radius.shape, generator=random).float()
        angle = 2 * math.pi * self.turns * radius + math.pi * arm
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) * 2
        return TensorDataset(points + 0.05 * torch.randn(points.shape, generator=random), arm)
