"""The models whose steps are timed: one that computes much for its parameters, and one that does not."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.bytelm import NUM_BYTES, ByteLM
from hpc_train.tasks.task import SizedDataset, Task


def transformer() -> Task:
    """19 million parameters: six blocks of 512."""
    return ByteLM(context=128, hidden=512, blocks=6, heads=8)


@dataclass
class Pairs(Task):
    """Predict the next byte from the pairs of bytes before it: a vector for each of all 65,536 pairs.

    6 million parameters, of which a sample touches a thousandth; yet gradients are dense.
    """

    context: int = 64
    hidden: int = 96

    def layers(self) -> list[LayerSpec]:
        """The table of pairs, and a small network on the mean of a sample's vectors."""
        return [
            LayerSpec(partial(_MeanOfPairs, self.hidden), "pairs"),
            LayerSpec(partial(_network, self.hidden), "network"),
        ]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Nats of each sample's last byte, [micro-batch]."""
        return F.cross_entropy(output, target[:, -1], reduction="none")

    def dataset(self, split: str) -> SizedDataset:
        """Windows of the demo's text."""
        return ByteLM(context=self.context).dataset(split)


class _MeanOfPairs(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(NUM_BYTES**2, hidden)

    def forward(self, text: Tensor) -> Tensor:
        """Bytes [micro-batch, time] to vectors [micro-batch, hidden]."""
        mean: Tensor = self.vectors(text[:, :-1] * NUM_BYTES + text[:, 1:]).mean(dim=1)
        return mean


def _network(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, NUM_BYTES))


MODELS = {"transformer": transformer, "embedding": Pairs}


def batch(task: Task, number: int, rank: int, num_ranks: int, samples: int) -> tuple[Tensor, Tensor]:
    """Batch `number` of a rank: samples that no other rank has."""
    dataset = task.dataset("train")
    first = (number * num_ranks + rank) * samples
    chosen = [dataset[(first + i) % len(dataset)] for i in range(samples)]
    inputs, targets = zip(*chosen, strict=True)
    return torch.stack(inputs), torch.stack(targets)
