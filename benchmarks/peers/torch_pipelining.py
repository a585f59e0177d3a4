"""torch.distributed.pipelining, PyTorch's own pipelines, over Gloo.

Its stages are what hpc_train calls chunks. Each schedule in two ways: the class that PyTorch has for it, and
PyTorch's general runtime, which walks the very order that hpc_train walks, from a file.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from hpc_train.pipeline.actions import Action, Kind, Order
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
        order: what RUNTIME walks.
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
        self._stages = [
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
            self._schedule = kind(
                self._stages if takes_several else self._stages[0], micro_batches, **options
            )
        else:
            self._schedule = _PipelineScheduleRuntime(self._stages, micro_batches, **options)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "order.csv"
                write(path, order)
                self._schedule._load_csv(str(path))

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

    def row_walked(self, batch: tuple[Tensor, Tensor]) -> list[str]:
        """Run once, and tell in which order: the actions that were done here, as `in_halves` writes them.

        What was done, not `pipeline_order`: ScheduleGPipe and Schedule1F1B do not walk theirs.
        """
        words: list[str] = []
        for stage in self._stages:
            _watch(stage, "forward_one_chunk", "F", words)
            _watch(stage, "backward_one_chunk", "I", words)
            _watch(stage, "backward_weight_one_chunk", "W", words)
        self.run(batch)
        for stage in self._stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                delattr(stage, name)
        return words


def _watch(stage: PipelineStage, name: str, kind: str, words: list[str]) -> None:
    """Add an action to `words` at each call of a method, until the attribute is deleted."""
    method = getattr(stage, name)

    def told(number: int, *args: Any, **kwargs: Any) -> Any:
        words.append(f"{stage.stage_index}{kind}{number}")
        if kind == "I" and kwargs.get("full_backward", True):
            words.append(f"{stage.stage_index}W{number}")
        return method(number, *args, **kwargs)

    setattr(stage, name, told)


def in_halves(row: Sequence[Action]) -> list[str]:
    """The actions as texts, a backward at once as its two halves."""
    parts = {Kind.B: (Kind.I, Kind.W)}
    return [
        str(action._replace(kind=kind)) for action in row for kind in parts.get(action.kind, (action.kind,))
    ]
