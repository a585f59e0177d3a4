"""What a user brings: a model as a list of layers, a loss, and data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from hpc_train.pipeline.layers import LayerSpec, PlainModel, plain_model

Figures = Tensor | tuple[Tensor, Tensor]  # one number a sample, or sums and what they are divided by


@runtime_checkable
class SizedDataset(Protocol):
    """Any torch map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Task:
    """Subclass this; its constructor's keyword arguments are the settings' `task_options`.

    A sample of a dataset is a pair (input, target); samples are joined by torch's default collate.
    """

    def layers(self) -> Sequence[LayerSpec]:
        """The model, first layer to last."""
        raise TypeError(f"{type(self).__name__} must define layers()")

    def loss(self, output: Any, target: Any) -> Figures:
        """The loss of each sample, [micro-batch]: never a mean, so that any cut of a batch is exact.

        Where samples count differently, by their number of tokens for instance: a pair (sums, weights), both
        [micro-batch]. The loss is then all samples' sums divided by all samples' weights, over the whole
        batch and all replicas; a weight may be 0.
        """
        raise TypeError(f"{type(self).__name__} must define loss()")

    def dataset(self, split: str) -> SizedDataset:
        """The samples of `split`: "train" or "eval"."""
        raise TypeError(f"{type(self).__name__} must define dataset()")

    def metrics(self, output: Any, target: Any) -> Mapping[str, Figures]:
        """Further figures for evaluation, each like a loss; their means over the split are shown."""
        return {}

    def sample(self, forward: Callable[[Tensor], Tensor]) -> str | None:
        """Something a person can look at after training, made with the whole model, or None.

        `forward` maps a batch of inputs to outputs; every stage runs this method with the same
        values, so draw random numbers only from a generator seeded here.
        """
        return None

    def plain_model(self, seed: int = 0) -> PlainModel:
        """The whole model as plain PyTorch: load an export into it with `load_state_dict`."""
        return plain_model(self.layers(), seed)
