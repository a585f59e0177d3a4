"""The optimizer where all replicas of a stage make the same update of all its parameters.

ShardedOptimizer has the same methods.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from hpc_train.checkpoint import snapshot
from hpc_train.config import OptimizerSettings
from hpc_train.gradients.buckets import Bucket
from hpc_train.training.clip import squared_norm
from hpc_train.training.optimizer import make_optimizer, set_learning_rate


class WholeOptimizer:
    """Updates these parameters, by name.

    `speaks`: whether this replica is the one that gives the norm and the state of them all.
    `torch`: torch's own optimizer; None where there is nothing to train.
    """

    def __init__(
        self, settings: OptimizerSettings, parameters: Mapping[str, nn.Parameter], speaks: bool
    ) -> None:
        self._parameters = parameters
        self._speaks = speaks
        self.torch = make_optimizer(settings, parameters.values())

    def gradients(self) -> list[Tensor]:
        """What this rank updates with."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def complete_gradients(self) -> None:
        """Every `p.grad` is whole as it is."""

    def squared_norm(self) -> float:
        """The sum of squares of the gradients that this rank speaks for."""
        return squared_norm(self.gradients()) if self._speaks else 0.0

    def step(self, learning_rate: float) -> None:
        """Update with the gradients as they are now."""
        if self.torch is not None:
            set_learning_rate(self.torch, learning_rate)
            self.torch.step()

    def skip(self) -> None:
        """Nothing is left of a step without update."""

    def share(self) -> None:
        """All replicas have the parameters already."""

    def shapes(self) -> dict[str, snapshot.Shape]:
        """Names and shapes of the state to read."""
        return snapshot.optimizer_shapes(self._parameters, self.torch)

    def take(self) -> dict[str, Tensor]:
        """The state that this rank writes into a checkpoint, by name."""
        return snapshot.take_optimizer(self._parameters, self.torch) if self._speaks else {}

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """What `restore` wants of a tensor among `shapes`, in memory of its own."""
        return whole.clone()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from the state among `tensors`, which belong to the optimizer from now on."""
        snapshot.restore_optimizer(tensors, self._parameters, self.torch)

    def moved_to(self, buckets: Sequence[Bucket]) -> "WholeOptimizer":
        """The same optimizer, wherever gradients are summed."""
        return self
