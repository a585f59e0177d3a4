"""What a rank keeps in memory.  PURE: neither torch nor MPI.

for each parameter     itself, its gradient, the optimizer's state, what a lossy wire rounded off
for each micro-batch   activations from its forward until its backward, with the input that came, and room for
                       the gradient of its output; with recompute the layers' inputs and that room alone, and
                       then the activations of the one layer that is computed again
for each chunk         two messages each way: one that is computed with, one under way; and the next input,
                       which comes before its forward
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.comm.interface import Wire
from hpc_train.planning.choice import Recompute
from hpc_train.planning.profile import Profile
from hpc_train.planning.units import WIRE_SHARE


class Tie(NamedTuple):
    """A parameter that layers have in common; the stage of the first one owns it."""

    layers: tuple[int, ...]
    num_bytes: float


def ties_of(profile: Profile) -> list[Tie]:
    """All ties of two or more layers."""
    names = sorted({name for layer in profile.layers for name in layer.tied})
    ties = []
    for name in names:
        layers = tuple(i for i, layer in enumerate(profile.layers) if name in layer.tied)
        if len(layers) > 1:
            ties.append(Tie(layers, max(profile.layers[i].tied[name] for i in layers)))
    return ties


class Memory:
    """Bytes of a model's layers, for micro-batches of one size.

    Args:
        profile: the layers.
        micro_batch: samples.
        recompute: what is kept of activations.
        optimizer_share: the share of the optimizer's state that a replica has: 1, or 1 / replicas if sharded.
        residual: whether what the wire rounds off is kept.
        wire: of activations between stages.
    """

    def __init__(
        self,
        profile: Profile,
        micro_batch: int,
        recompute: Recompute,
        optimizer_share: float = 1.0,
        residual: bool = False,
        wire: Wire = Wire.FP32,
    ) -> None:
        layers = profile.layers
        self._owned = (
            profile.optimizer_bytes_a_byte * optimizer_share + residual
        )  # for each byte that is trained
        fixed = [layer.parameter_bytes + layer.trained_bytes * (1 + self._owned) for layer in layers]
        activations = np.array([layer.activation_bytes * micro_batch for layer in layers])
        # entering[j]: what comes into layer j by message, if a chunk begins there; none at both ends
        entering = np.array([0.0, *(layer.output_bytes * micro_batch for layer in layers[:-1]), 0.0])
        kept = entering[:-1] if recompute == "all" else activations
        self._fixed = np.array([0.0, *np.cumsum(fixed)])
        self._kept = np.array([0.0, *np.cumsum(kept)])
        self._entering = entering
        # What comes is more memory only where autograd keeps it: elsewhere it is used up in the forward, and
        # with recompute it is the first layer's input, which is counted.
        anyway = np.array([0.0, *(layer.kept_output_bytes * micro_batch for layer in layers[:-1]), 0.0])
        anyway = np.zeros_like(entering) if recompute == "all" else np.minimum(anyway, entering)
        self._received = anyway
        self._room = entering * WIRE_SHARE[wire]
        self._again = _largest(activations) if recompute == "all" else None
        self._ties = ties_of(profile)

    def fixed_bytes(self, start: Any, end: Any) -> Any:
        """Of layers start to end - 1, however many micro-batches there are."""
        messages = 3 * self._entering[start] + 2 * self._entering[end]
        again = 0.0 if self._again is None else self._again[start, end]
        return self._fixed[end] - self._fixed[start] + messages + again

    def kept_bytes(self, start: Any, end: Any, receives: bool = True, sends: bool = True) -> Any:
        """Of layers start to end - 1, for each micro-batch that waits for its backward.

        `receives`, `sends`: whether the chunks before and after are on other stages.
        """
        kept = self._kept[end] - self._kept[start]
        return kept + receives * self._received[start] + sends * self._room[end]

    def least_bytes(self, stages: int) -> float:
        """What the fullest of so many ranks needs at least, even without activations."""
        lent = sum(tie.num_bytes * (len(tie.layers) - 1) * (2 + self._owned) for tie in self._ties)
        return float(self._fixed[-1] - lent) / stages

    def rank_bytes(
        self, split: Sequence[range], stage_of: Sequence[int], moments: Sequence[NDArray[np.int64]]
    ) -> list[float]:
        """Of each stage, where `moments` are what it holds at its fullest; see `timeline.live`."""
        kept = np.array(
            [
                self.kept_bytes(layers.start, layers.stop, *passes(chunk, stage_of))
                for chunk, layers in enumerate(split)
            ]
        )
        total = [float((counts @ kept).max(initial=0.0)) for counts in moments]
        for chunk, layers in enumerate(split):
            total[stage_of[chunk]] += float(self.fixed_bytes(layers.start, layers.stop))
        stage_of_layer = [stage_of[chunk] for chunk, layers in enumerate(split) for _ in layers]
        for tie in self._ties:
            owner, *others = [stage_of_layer[layer] for layer in tie.layers]
            seen = {owner}
            for stage in others:
                # one parameter on a stage, whose borrower neither updates nor sums it
                total[stage] -= tie.num_bytes * (2 + self._owned if stage in seen else self._owned)
                seen.add(stage)
        return total


def passes(chunk: int, stage_of: Sequence[int]) -> tuple[bool, bool]:
    """Whether a chunk receives its input from another stage, and sends its output to one."""
    here = stage_of[chunk]
    before, after = stage_of[max(chunk - 1, 0)], stage_of[min(chunk + 1, len(stage_of) - 1)]
    return before != here, after != here


def _largest(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[start, end]: the largest of values[start:end], 0 where there are none."""
    size = len(values) + 1
    largest = np.zeros((size, size))
    for start in range(size - 1):
        largest[start, start + 1 :] = np.maximum.accumulate(values[start:])
    return largest
