"""torch.distributed.pipelining, PyTorch's own pipelines, over Gloo.

Its stages are what hpc_train calls chunks. Each schedule in two ways: the class that PyTorch has for it, and
PyTorch's general runtime, which walks the very order that hpc_train walks, from a file.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from hpc_train.pipeline.actions import Kind, Order, parse_action
from hpc_train.pipeline.schedule_file import write

OWN, RUNTIME = "torch", "torch runtime"
# Name here: the class, and whether it takes a list of stages.
_CLASSES: dict[str, tuple[Any, bool]] = {
    "gpipe": (pipelining.ScheduleGPipe, False),
    "1f1b": (pipelining.Schedule1F1B, False),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, True),
    "zb-h1": (pipelining.ScheduleInterleavedZeroBubble, True),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, True),
}


class TorchPipeline:
    """One stage's part.  start_default_group comes first (peers/gloo.py), and all ranks make the same calls.

    Args:
        way: OWN or RUNTIME.
        schedule: its name in hpc_train.
        order: what RUNTIME walks, and what OWN is compared with.
        chunks: the modules that this rank holds, by the number of the chunk.
        num_chunks: of the model.
        micro_batches: of every batch.
        loss: of (output, target) of a micro-batch, one number, of which the gradients are.
        example: a micro-batch between two chunks; all have the same shape, so that nothing is inferred.

    Raises:
        ValueError: PyTorch's schedule does not take so many micro-batches.
    """

    def __init__(
        self,
        way: str,
        schedule: str,
        order: Order,
        chunks: Mapping[int, nn.Module],
        num_chunks: int,
        micro_batches: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        example: Tensor,
    ) -> None:
        device = torch.device("cpu")
        shape = example.detach().clone()
        stages = [
            PipelineStage(
                module,
                chunk,
                num_chunks,
                device,
                input_args=shape.clone().requires_grad_(chunk > 0),
                output_args=shape.clone().requires_grad_(),
            )
            for chunk, module in sorted(chunks.items())
        ]
        self._is_first, self._is_last = 0 in chunks, num_chunks - 1 in chunks
        kind, takes_several = _CLASSES[schedule]
        options = {"loss_fn": loss, "scale_grads": False}
        if way == OWN:
            self._schedule = kind(stages if takes_several else stages[0], micro_batches, **options)
        else:
            self._schedule = _PipelineScheduleRuntime(stages, micro_batches, **options)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "order.csv"
                write(path, order)
                self._schedule._load_csv(str(path))
        self.walks_the_same = _plain(self._schedule.pipeline_order) == [_halved(row) for row in order]

    def run(self, batch: tuple[Tensor, Tensor]) -> float:
        """Forward and backward of a whole batch; the sum of the losses where the last chunk is, else 0."""
        losses: list[Tensor] = []
        self._schedule.step(
            *batch[: int(self._is_first)],
            target=batch[1] if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        return float(sum(part.detach() for part in losses))


def _plain(order: Mapping[int, list[Any]]) -> list[list[str]]:
    """PyTorch's order without what is idle or for sharded gradients, a backward as its two halves."""
    rows = []
    for rank in sorted(order):
        words = [str(action) for action in order[rank] if action is not None]
        rows.append(_halved([parse_action(word) for word in words if "REDUCE" not in word]))
    return rows


def _halved(row: list[Any]) -> list[str]:
    parts = {Kind.B: (Kind.I, Kind.W)}
    return [
        f"{action.chunk}{kind.name}{action.micro_batch}"
        for action in row
        for kind in parts.get(action.kind, (action.kind,))
    ]
