"""The smallest example: an MLP learns a function that a seed made."""

from dataclasses import dataclass
from functools import partial

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.task import SizedDataset, Task


@dataclass
class Regression(Task):
    """Learn y = sin(2 x · w) for a fixed random w, from `samples` points x with `inputs` coordinates."""

    samples: PositiveInt = 2048
    inputs: PositiveInt = 8
    hidden: PositiveInt = 64
    depth: PositiveInt = 4

    def layers(self) -> list[LayerSpec]:
        """`depth` hidden layers and the output."""
        widths = [self.inputs, *[self.hidden] * self.depth]
        hidden = [
            LayerSpec(partial(_hidden, width, self.hidden), f"hidden {number}")
            for number, width in enumerate(widths[:-1], start=1)
        ]
        return [*hidden, LayerSpec(partial(nn.Linear, self.hidden, 1), "output")]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Squared error of each sample, [micro-batch]."""
        return (output - target).square().mean(dim=1)

    def dataset(self, split: str) -> SizedDataset:
        """Points [inputs] and values [1]: `samples` to train on, a quarter as many to evaluate on."""
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(self.inputs, 1, generator=generator) / self.inputs**0.5
        x = torch.randn(self.samples + max(1, self.samples // 4), self.inputs, generator=generator)
        x = x[: self.samples] if split == "train" else x[self.samples :]
        return TensorDataset(x, torch.sin(2 * (x @ w)))


def _hidden(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU())
