"""One micro-batch through one chunk: forward, and backward at once or in two halves.

The chunk's autograd graph begins with `enter` and ends with `leave` (boundary.py) or the loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpc_train.pipeline.batch_statistics import BatchStatistics
from hpc_train.pipeline.boundary import Door, leave
from hpc_train.pipeline.draws import Draws
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.layers import apply_layer
from hpc_train.pipeline.stage import Chunk
from hpc_train.pipeline.values import tensors_of


@dataclass
class Live:
    """A micro-batch between its forward and the end of its backward; autograd keeps what that needs."""

    entrances: list[Door]  # of the input's tensors that need a gradient
    roots: list[Tensor] = field(default_factory=list)  # where backward begins
    exits: list[Door] = field(default_factory=list)  # of the output's tensors that need a gradient
    later: Later | None = None  # where backward is in two halves

    def leave(self, output: Any) -> None:
        """End the graph at the chunk's output."""
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                root, door = leave(tensor)
                self.roots.append(root)
                self.exits.append(door)


class ForwardBackward:
    """Runs chunks.

    Args:
        recompute: keep only the inputs of layers, and compute the rest again in backward.
        statistics: of the stage's BatchNorm layers.
        draws: what dropout draws from.
    """

    def __init__(self, recompute: bool, statistics: BatchStatistics, draws: Draws) -> None:
        self._recompute = recompute
        self._statistics = statistics
        self._draws = draws
        self._repeatable: dict[int, bool] = {}  # by layer; each is run once to see

    def forward(self, chunk: Chunk, inputs: Any, sample: int, live: Live | None = None) -> Any:
        """The chunk's output; `sample`: the number of the micro-batch's first one in the batch.

        `live`: the graph that was begun; without one nothing is recorded.
        """
        with live.later if live and live.later else nullcontext():
            for number, layer in chunk.layers:
                if live and self._recompute and self._repeatable.get(number):
                    inputs = self._checkpointed(number, layer, inputs, sample, live.later)
                else:
                    inputs = self._apply(number, layer, inputs, sample)
        return inputs

    def _apply(self, number: int, layer: nn.Module, inputs: Any, sample: int) -> Any:
        """Run a layer, and find out whether that can be repeated: not if it changes its input in place."""
        self._draws.start(sample, number)
        if number in self._repeatable or not self._recompute:
            return apply_layer(layer, inputs)
        versions = [(tensor, tensor._version) for tensor in tensors_of(inputs)]
        output = apply_layer(layer, inputs)
        self._repeatable[number] = all(tensor._version == version for tensor, version in versions)
        return output

    def _checkpointed(
        self, number: int, layer: nn.Module, inputs: Any, sample: int, later: Later | None
    ) -> Any:
        def run(inputs: Any) -> Any:
            self._draws.start(sample, number)
            return apply_layer(layer, inputs)

        return checkpoint(
            run,
            inputs,
            use_reentrant=False,
            preserve_rng_state=self._draws.step_seed is None,
            context_fn=lambda: (nullcontext(), self._again(later)),
        )

    @contextmanager
    def _again(self, later: Later | None) -> Iterator[None]:
        """Around a layer whose activations are computed a second time."""
        self._statistics.paused = True
        try:
            with later or nullcontext():
                yield
        finally:
            self._statistics.paused = False

    def backward(self, chunk: Chunk, live: Live, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Backward at once or its first half; returns the gradients of the chunk's input.

        `gradients`: of the output's tensors that need one, where the chunk does not end with the loss.
        """
        for door, gradient in zip(live.exits, gradients, strict=True):
            door.gradient = gradient
        if live.roots and live.later is None:
            torch.autograd.backward(live.roots)
        elif live.roots and live.later is not None:
            gates = [door.gate for door in live.entrances if door.gate is not None]
            live.later.backward_inputs(live.roots, gates, chunk.parameters)
        live.roots.clear()
        return [door.take_gradient() for door in live.entrances]
