"""A small CNN on scikit-learn's 1,797 real images of handwritten digits, 8×8 pixels each.

GroupNorm and not BatchNorm: a sample's output must not depend on which samples flow with it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.task import SizedDataset, Task

_SIDE = 8  # pixels
_NUM_EVAL = 360  # of the 1,797 images


@dataclass
class Digits(Task):
    """Tell the ten digits apart.

    Args:
        channels: of each convolution; a multiple of 8.
        convolutions: 3×3, all but the first one added to their input; the image is halved after
            every second.
        norm: "group" normalises each image by itself, "batch" over all images of a micro-batch.
    """

    channels: PositiveInt = 32
    convolutions: PositiveInt = 4
    norm: Literal["group", "batch"] = "group"

    def __post_init__(self) -> None:
        if self.channels % 8:
            above = self.channels // 8 * 8 + 8
            raise UserError(f"task_options.channels={self.channels} is not a multiple of 8: set {above}")

    def layers(self) -> list[LayerSpec]:
        """Convolutions and head; a cost is the multiplications of one sample's forward."""
        specs, side, inputs = [], _SIDE, 1
        for number in range(1, self.convolutions + 1):
            halve = number % 2 == 0 and side > 1
            build = partial(_Convolution, inputs, self.channels, halve, self.norm)
            specs.append(LayerSpec(build, f"conv {number}", 9 * inputs * self.channels * side**2))
            side, inputs = side // 2 if halve else side, self.channels
        features = self.channels * side**2
        head = partial(_head, features)
        return [*specs, LayerSpec(head, "head", 10 * features)]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of each image, [micro-batch]."""
        return F.cross_entropy(output, target, reduction="none")

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The share of images told right."""
        return {"accuracy": (output.argmax(dim=1) == target).float()}

    def dataset(self, split: str) -> SizedDataset:
        """Images [1, 8, 8] from 0 to 1 and their digits; shuffled once, the last 360 for evaluation."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError("the digits task needs scikit-learn: pip install 'hpc_train[examples]'") from None
        images, digits = load_digits(return_X_y=True)
        shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
        mine = shuffled[:-_NUM_EVAL] if split == "train" else shuffled[-_NUM_EVAL:]
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, _SIDE, _SIDE) / 16
        return TensorDataset(pixels[mine], torch.tensor(digits)[mine])


class _Convolution(nn.Module):
    """[micro-batch, inputs, side, side] to [micro-batch, outputs, side or side / 2, ...]."""

    def __init__(self, inputs: int, outputs: int, halve: bool, norm: str) -> None:
        super().__init__()
        self.residual = inputs == outputs
        self.convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(8, outputs) if norm == "group" else nn.BatchNorm2d(outputs)
        self.halve = halve

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, normalise, and add the input where its shape is the same."""
        y = F.relu(self.norm(self.convolution(x)))
        y = x + y if self.residual else y
        return F.max_pool2d(y, 2) if self.halve else y


def _head(features: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 10))
