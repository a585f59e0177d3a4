"""What one rank holds of the model, and the update that all ranks make together.

replica 0   stage 0 --activations--> stage 1      rows pass activations (PeerLink),
               |                        |         columns sum gradients (Collective),
replica 1   stage 0 --activations--> stage 1      all agree on norm and finiteness (ControlPlane)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint.names import split_optimizer_name
from hpc_train.comm.interface import Collective, PeerLink, Wire, World
from hpc_train.config import GradientSettings, Settings
from hpc_train.gradients.parameter_average import ParameterAverage
from hpc_train.gradients.powersgd import PowerSGD
from hpc_train.gradients.reducer import Count, Reducer
from hpc_train.launch.binding import choose_threads
from hpc_train.pipeline.layers import build_layer, layer_name, tie_within
from hpc_train.pipeline.runtime import Pipeline
from hpc_train.pipeline.samples import Sum
from hpc_train.pipeline.stage import Stage
from hpc_train.pipeline.ties import Ties
from hpc_train.stopwatch import Stopwatch
from hpc_train.tasks.task import Task
from hpc_train.training import compression
from hpc_train.training.clip import clip_, squared_norm
from hpc_train.training.layout import Layout
from hpc_train.training.sharded import ShardedOptimizer
from hpc_train.training.whole import WholeOptimizer


@dataclass(frozen=True)
class Outcome:
    """What all ranks know of a step.

    `loss`: the mean over the batch; with local steps each replica's samples had that replica's model.
    `grad_norm`: the global one; with local steps, that of this replica's own gradient over its stages.
    `finite`: whether both are, of all replicas.
    `overflows`, `underflows`: what wires lost, on all ranks; see comm.interface.Losses.
    """

    loss: float
    grad_norm: float
    finite: bool
    overflows: int = 0
    underflows: int = 0


def _times(summed_s: float, exposed_s: float, hidden_share: float | None) -> dict[str, float | None]:
    return {"gradient_sum_s": summed_s, "exposed_comm_s": exposed_s, "hidden_share": hidden_share}


def _floating(stage: Stage) -> list[Tensor]:
    """What a mean over replicas is made of: trained parameters and buffers, each once."""
    tensors = [*(p for p in stage.parameters() if p.requires_grad), *stage.buffers()]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _build(layout: Layout, seed: int, link: PeerLink) -> tuple[Stage, Ties]:
    """The layers of this rank, and their part in ties."""
    layers = {
        i: build_layer(layout.specs[i], i, seed).to(layout.device)
        for held in layout.chunks.values()
        for i in held
    }
    tie_within(layers, layout.ties)
    chunks = {chunk: [(layer_name(i), layers[i]) for i in held] for chunk, held in layout.chunks.items()}
    stage = Stage(chunks, layout.num_chunks, layout.device)
    return stage, Ties(layout.ties, layers, layout.stage_of, layout.place.stage, link)


class Worker:
    """A stage of the model with its gradients, its optimizer and its links to the other ranks.

    Making one is collective: all ranks do it together.
    """

    def __init__(self, settings: Settings, task: Task, world: World, layout: Layout) -> None:
        torch.set_num_threads(choose_threads(world, settings.train.threads))
        self.control = world.control
        self.place = layout.place
        self.device = layout.device
        self.stopwatch = Stopwatch()
        self._clip_norm = settings.optimizer.clip_norm
        link: PeerLink = world.peer_link(layout.grid)
        self.stage, self.ties = _build(layout, settings.seed, link)
        borrowed = self.ties.borrowed_parameters
        self.parameters = {n: p for n, p in self.stage.named_parameters() if p not in borrowed}
        self.pipeline = Pipeline(
            self.stage,
            link,
            self.place.stage,
            layout.grid.stages,
            layout.schedule,
            task.loss,
            self.stopwatch,
            Wire(settings.pipeline.wire),
            settings.pipeline.recompute == "all",
            self.ties,
        )
        self.collective: Collective = world.collective(layout.grid, self.device)
        self.replicas = layout.grid.replicas
        self._settings = settings
        self.method = compression.sum_method(settings)
        self.average: ParameterAverage | None = None
        if settings.gradients.local_steps > 1 and self.replicas > 1:
            self.average = ParameterAverage(
                _floating(self.stage), self.collective, settings.gradients.bucket_bytes
            )
        self.reducer = self._make_reducer()
        self._own_samples = 0
        self._lost_before = [0, 0]
        self._lost()
        self.optimizer: WholeOptimizer | ShardedOptimizer
        if settings.optimizer.sharded and self.collective.size > 1:
            self.optimizer = ShardedOptimizer(settings.optimizer, self.reducer.buckets, self.collective)
        else:
            self.optimizer = WholeOptimizer(
                settings.optimizer, self.parameters, speaks=self.place.replica == 0
            )
        self.pipeline.share_parameters()

    def _make_reducer(self) -> Reducer:
        return Reducer(
            list(self.parameters.items()),
            self.collective if self.average is None else None,
            self.method,
            self._settings.gradients.bucket_bytes,
            self._settings.gradients.overlap,
            {name: self._count(p) for name, p in self.parameters.items()},
        )

    def _count(self, parameter: nn.Parameter) -> Count:
        """How many gradients it gets: from each chunk that holds it, and from tied copies elsewhere."""
        chunks = self.stage.chunks.values()
        holders = sum(any(p is parameter for p in chunk.parameters) for chunk in chunks)
        return Count(max(1, holders), self.ties.contributions(parameter))

    def sum_by(self, gradients: GradientSettings) -> None:
        """From the next step on, sum gradients as these settings say.  All ranks together, between steps.

        What error feedback owes goes over to the new sums; those without it add it to one gradient.
        """
        owed, bases, steps = self.reducer.settle(), self.reducer.bases(), self.reducer.steps
        self.reducer.close()
        self._settings = self._settings.model_copy(update={"gradients": gradients})
        self.method = compression.sum_method(self._settings)
        self.reducer = self._make_reducer()
        self.reducer.resume(owed, bases, steps)
        self.optimizer = self.optimizer.moved_to(self.reducer.buckets)

    def backward(
        self,
        micro_batches: Sequence[tuple[Any, Any]],
        batch_size: int,
        own_samples: int = 0,
        seed: int | None = None,
        first_sample: int = 0,
    ) -> Outcome:
        """Leave in `gradients()` the mean gradient of a batch of `batch_size` samples over all replicas.

        With local steps it is the mean over this replica's `own_samples` alone.

        Args:
            micro_batches: this replica's share, as (input, target) pairs; it may be empty.
            batch_size: of all replicas.
            own_samples: of this replica.
            seed: of what layers draw; without it they draw on from where torch's generator is.
            first_sample: the number in the batch of the share's first sample.
        """
        local = self.average is not None
        if self.average is not None:
            self.average.spent_s = 0.0  # a mean for evaluation or a checkpoint belongs to no step
        self._own_samples = own_samples
        divisor = max(1, own_samples) if local else batch_size
        self.reducer.begin(passes=len(micro_batches))
        samples = range(first_sample, first_sample + batch_size, self._settings.batch.micro_batch)
        sums = self.pipeline.run(micro_batches, 1 / divisor, seed, samples)
        with self.stopwatch.timing("comm"):
            self.reducer.finish()
            outcome = self._agree(sums, divisor, local)
            self.pipeline.statistics.finish(self.collective, keep=outcome.finite)
        return outcome

    def _agree(self, sums: Sum, divisor: int, local: bool) -> Outcome:
        """One exchange among all ranks; each has its part of the summed loss and of the squared norms.

        Gradients were divided by the number of samples: where samples have weights, they are brought to the
        weights' sum, which nobody knew before.
        """
        lost = self._lost()
        slots = self.replicas if local else 1
        mine = self.place.replica if local else 0
        squares, weights = [0.0] * slots, [0.0] * slots
        squares[mine] = squared_norm(self.gradients()) if local else self.optimizer.squared_norm()
        weights[mine] = sums.weight
        loss, overflows, underflows, *both = self.control.total([sums.total, *lost, *squares, *weights])
        squares, weights = both[:slots], both[slots:]
        if weights[mine] != divisor and weights[mine] > 0:
            scale = divisor / weights[mine]
            for gradient in self.gradients():
                gradient.mul_(scale)
            squares[mine] *= scale**2
        whole = sum(weights)
        finite = all(map(math.isfinite, (loss, *squares))) and whole > 0
        norm = math.sqrt(squares[mine]) if finite else math.nan
        return Outcome(loss / whole if whole else math.nan, norm, finite, int(overflows), int(underflows))

    def _lost(self) -> list[float]:
        """Overflows and underflows of this rank's wires since the last call."""
        sums, activations = self.collective.losses, self.pipeline.wire_losses
        now = [sums.overflows + activations[0], sums.underflows + activations[1]]
        lost = [float(new - old) for new, old in zip(now, self._lost_before, strict=True)]
        self._lost_before = now
        return lost

    def update(self, outcome: Outcome, learning_rate: float) -> None:
        """Clip and step; all ranks skip a step whose gradients are not finite on any of them.

        With local steps a replica without samples makes none, and momentum and decay rest too.
        """
        if not outcome.finite:
            self.optimizer.skip()
            self.reducer.skip()
            return
        if self.average is not None:
            self.average.saw(self._own_samples)
            if self._own_samples == 0:
                return
        with self.stopwatch.timing("compute"):
            clip_(self.gradients(), outcome.grad_norm, self._clip_norm)
            self.optimizer.step(learning_rate)
        with self.stopwatch.timing("comm"):
            self.optimizer.share()
        self.pipeline.share_parameters()

    def about_sums(self) -> list[str]:
        """How gradients are summed, and what was measured to choose that, a line each."""
        if self.average is not None:
            return ["gradients are not summed: parameters are averaged (local SGD)"]
        if not self.reducer.buckets:
            return []
        numel = sum(bucket.buffer.numel() for bucket in self.reducer.buckets)
        count = len(self.reducer.buckets)
        size = f"{4 * numel / 2**20:.3g} MiB in {count} bucket{'s' * (count > 1)}"
        return [f"gradient sums: {self.method}, {size}", *self.reducer.measured]

    def sum_times(self) -> dict[str, float | None]:
        """Of the last step: what gradient sums took, how long they held it up, and the share that was hidden.

        With local steps, of the mean of the parameters, which nothing hides.
        """
        if self.average is not None:
            spent_s = self.average.spent_s
            return _times(spent_s, spent_s, 0.0 if spent_s else None)
        return _times(self.reducer.summed_s, self.reducer.exposed_s, self.reducer.hidden_share)

    def average_parameters(self) -> None:
        """With local steps: make the replicas' models one again.  All ranks together."""
        if self.average is not None:
            with self.stopwatch.timing("comm"):
                self.average.average()
            self.pipeline.share_parameters()

    def gradients(self) -> list[Tensor]:
        """What this rank updates with: the gradients of its stage, or its shards of them."""
        return self.optimizer.gradients()

    @property
    def powersgd_steps(self) -> int:
        """Steps since PowerSGD began; 0 where gradients do not go through it."""
        powersgd = isinstance(self.method, PowerSGD) and self.replicas > 1
        return self.reducer.steps if powersgd else 0

    def complete_gradients(self) -> None:
        """Make every `p.grad` whole where replicas have but shards of it.  All ranks together."""
        self.optimizer.complete_gradients()

    def state_shapes(self) -> dict[str, snapshot.Shape]:
        """Names and shapes of what `restore_state` wants of a checkpoint."""
        model = snapshot.shapes(self.parameters, self._buffers(), None)
        return model | self.optimizer.shapes() | compression.shapes(self.reducer)

    def take_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint, by name; no two have the same.  All ranks together.

        With local steps it is of the replicas' mean model, and of replica 0's own optimizer.
        """
        self.average_parameters()
        writer = self.place.replica == 0
        model: dict[str, Tensor] = {}
        if writer:
            model = snapshot.take(self.parameters, self._buffers(), None)
        return model | self.optimizer.take() | compression.take(self.reducer, writer)

    def cut_state(self, name: str, whole: Tensor) -> Tensor:
        """What `restore_state` wants of a tensor of a checkpoint, in memory of its own."""
        return self.optimizer.cut(name, whole) if split_optimizer_name(name) else whole.clone()

    def restore_state(self, tensors: Mapping[str, Tensor], powersgd_steps: int = 0) -> None:
        """Go on from what a checkpoint has, cut, and the `powersgd_steps` that it was saved with.

        `tensors` belong to the worker from now on.
        """
        self.restore_model(tensors)
        self.optimizer.restore(tensors)
        compression.restore(self.reducer, tensors, powersgd_steps)

    def restore_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers from a checkpoint or a plain model.  All ranks together."""
        snapshot.restore(tensors, self.parameters, self._buffers(), None)
        self.pipeline.share_parameters()

    def _buffers(self) -> dict[str, Tensor]:
        return snapshot.buffers_of(self.stage, self.parameters)

    def close(self) -> None:
        """End the summing thread; free what the backend holds.  All ranks together."""
        self.reducer.close()
        self.collective.close()
