"""The models that are planned for: three that compute, for as many ranks as cores, and three that wait.

                  parameters    activations between layers
transformer       many          many
perceptron        most          few
convolutions      few           most
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.pipeline.waits import Seconds, waiting_product
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.bytelm import ByteLM
from hpc_train.tasks.task import SizedDataset, Task

_NUM_SAMPLES = 256  # of random data


class _Random(Task):
    """Random inputs; a sample's target is one of two classes, and only the first two outputs count."""

    def _shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy, [micro-batch]."""
        return F.cross_entropy(output[:, :2], target, reduction="none")

    def dataset(self, split: str) -> SizedDataset:
        """The same for every split."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_NUM_SAMPLES, *self._shape(), generator=generator)
        return TensorDataset(x, torch.arange(_NUM_SAMPLES) % 2)


@dataclass
class Perceptron(_Random):
    """Linear layers of `width`: a sample's activations are a vector, a layer's parameters its square."""

    width: int = 768
    depth: int = 8

    def _shape(self) -> tuple[int, ...]:
        return (self.width,)

    def layers(self) -> list[LayerSpec]:
        """All alike."""
        return [LayerSpec(partial(_linear, self.width), f"linear {i + 1}") for i in range(self.depth)]


def _linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.GELU())


@dataclass
class Convolutions(_Random):
    """3×3 convolutions that keep the size of an image: activations are all, parameters a few thousand."""

    channels: int = 12
    side: int = 32
    depth: int = 8

    def _shape(self) -> tuple[int, ...]:
        return (self.channels, self.side, self.side)

    def layers(self) -> list[LayerSpec]:
        """Convolutions, all alike, and a head."""
        convolution = partial(_convolution, self.channels)
        specs = [LayerSpec(convolution, f"convolution {i + 1}") for i in range(self.depth)]
        return [*specs, LayerSpec(partial(_head, self.channels), "head")]


def _convolution(channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())


def _head(channels: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))


@dataclass
class Waits(_Random):
    """Layers whose computing is a wait, and all else is real: parameters, activations, gradients.

    Attributes:
        sample_ms: that each of forward, backward for the input and backward for the weights takes a sample.
        width: numbers of a sample's activations.
        parameters: of a layer.
        depth: layers.
    """

    sample_ms: float
    width: int
    parameters: int
    depth: int = 8

    def _shape(self) -> tuple[int, ...]:
        return (self.width,)

    def layers(self) -> list[LayerSpec]:
        """All alike."""
        build = partial(_Wait, self.sample_ms / 1e3, self.width, self.parameters)
        return [LayerSpec(build, f"wait {i + 1}") for i in range(self.depth)]


class _Wait(nn.Module):
    """[micro-batch, width] to the same: scaled by a weight, moved by the mean of all other parameters."""

    def __init__(self, sample_s: float, width: int, parameters: int) -> None:
        super().__init__()
        self.sample_s = sample_s
        self.weight = nn.Parameter(torch.linspace(0.9, 1.1, width))
        self.others = nn.Parameter(torch.zeros(max(1, parameters - width)))

    def forward(self, x: Tensor) -> Tensor:
        """As long as the samples take."""
        seconds = Seconds(*[self.sample_s * len(x)] * 3)
        return waiting_product(x, self.weight, seconds) + self.others.mean()


@dataclass(frozen=True)
class Model:
    """What is trained: `make` gives the task, `batch_size` is the samples of a step."""

    make: Callable[[], Task]
    batch_size: int


COMPUTING = {
    "transformer": Model(partial(ByteLM, context=64, hidden=192, blocks=6, heads=6), 32),
    "perceptron": Model(Perceptron, 256),
    "convolutions": Model(Convolutions, 64),
}
WAITING = {
    "transformer": Model(partial(Waits, sample_ms=1.0, width=12_000, parameters=190_000), 32),
    "perceptron": Model(partial(Waits, sample_ms=0.4, width=2_000, parameters=380_000), 32),
    "convolutions": Model(partial(Waits, sample_ms=0.8, width=24_000, parameters=24_000), 32),
}
