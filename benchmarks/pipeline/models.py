"""The models whose steps are timed: equal layers that compute, or that wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.pipeline.waits import Seconds, Shifted, Waiting

MicroBatches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Model:
    """Layers from [micro-batch, width] to the same; every rank builds all of them, with the same weights.

    Attributes:
        name: for tables.
        layers: in order.
        samples: of a micro-batch: it stays as it is, so that the batch grows with the micro-batches.
        seconds: of a micro-batch through all layers, where that is known.
    """

    name: str
    layers: Sequence[nn.Module]
    width: int
    samples: int
    seconds: Seconds | None = None

    def batch(self, micro_batches: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, [samples of all micro-batches, width]."""
        generator = torch.Generator().manual_seed(micro_batches)
        x, y = (torch.randn(micro_batches * self.samples, self.width, generator=generator) for _ in "xy")
        return x, y

    def cut(self, whole: tuple[Tensor, Tensor]) -> MicroBatches:
        """A batch as micro-batches."""
        return list(zip(*(part.split(self.samples) for part in whole), strict=True))

    def chunk(self, index: int, num_chunks: int) -> range:
        """The layers of one of equal chunks."""
        size, left = divmod(len(self.layers), num_chunks)
        assert not left, f"{len(self.layers)} layers in {num_chunks} chunks"
        return range(index * size, (index + 1) * size)

    @property
    def num_bytes(self) -> int:
        """Of the gradients."""
        return sum(4 * p.numel() for p in self.parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Of all layers."""
        return [p for layer in self.layers for p in layer.parameters()]


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean square error of each sample, [micro-batch]."""
    return (output - target).square().mean(dim=1)


def computing(name: str, num_layers: int, width: int, samples: int) -> Model:
    """Linear layers with tanh."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)]
    return Model(name, layers, width, samples)


def waiting(name: str, num_layers: int, seconds: Seconds, width: int = 16, samples: int = 4) -> Model:
    """Layers that wait; `seconds` of a micro-batch through all of them."""
    own = seconds.over(num_layers)
    layers: list[nn.Module] = [Waiting(width, own) for _ in range(num_layers)]
    layers[0] = nn.Sequential(Shifted(width), layers[0])
    return Model(name, layers, width, samples, seconds)
