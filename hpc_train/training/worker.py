"""What one rank holds of the model, and the update that all ranks make together.

replica 0   stage 0 --activations--> stage 1      rows pass activations (PeerLink),
               |                        |         columns sum gradients (Collective),
replica 1   stage 0 --activations--> stage 1      all agree on norm and finiteness (ControlPlane)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hpc_train.checkpoint import snapshot
from hpc_train.checkpoint.names import split_optimizer_name
from hpc_train.comm.interface import Collective, PeerLink, World
from hpc_train.config import GradientSettings, Settings
from hpc_train.errors import UserError
from hpc_train.gradients.parameter_average import ParameterAverage
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid, Place
from hpc_train.launch.binding import choose_device, choose_threads
from hpc_train.pipeline.layers import LayerSpec, build_layer, count_parameters, layer_name, shared_layers
from hpc_train.pipeline.partition import split_by_hand, split_evenly
from hpc_train.pipeline.runtime import Pipeline
from hpc_train.pipeline.stage import Stage
from hpc_train.stopwatch import Stopwatch
from hpc_train.tasks.task import Task
from hpc_train.training import compression
from hpc_train.training.clip import clip_, squared_norm
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


def layer_costs(specs: Sequence[LayerSpec]) -> list[float]:
    """The share of the work that each layer stands for; only their ratios matter.

    Costs are used where all layers have one: beside numbers of parameters they would mean nothing.
    """
    if all(spec.cost is not None for spec in specs):
        return [float(spec.cost or 0.0) for spec in specs]
    return [float(max(1, count_parameters(spec))) for spec in specs]


def split_layers(settings: Settings, specs: Sequence[LayerSpec]) -> list[range]:
    """Which layers each stage holds.  Raises UserError when the split does not fit."""
    stages = settings.grid.stages
    if not specs:
        raise UserError(f"task {settings.task} has 0 layers: return at least one from its layers()")
    if settings.pipeline.split == "auto":
        split = split_evenly(layer_costs(specs), stages)
    else:
        split = split_by_hand(settings.pipeline.split, len(specs), stages)
    stage_of = {layer: stage for stage, layers in enumerate(split) for layer in layers}
    for one, other in shared_layers(specs) if stages > 1 else ():
        if stage_of[one] != stage_of[other]:  # each stage would train a copy of its own
            raise UserError(
                f"layers {one} and {other} share parameters, but stand on stages {stage_of[one]} and "
                f"{stage_of[other]}: set pipeline.split so that one stage holds both"
            )
    return split


def make_grid(settings: Settings, num_ranks: int) -> Grid:
    """The grid of `num_ranks` ranks.

    Raises:
        UserError: the stages do not divide the ranks, or a batch has fewer samples than there are replicas.
    """
    grid = Grid.for_ranks(num_ranks, settings.grid.stages, settings.grid.fastest)
    if settings.batch.size < grid.replicas:
        raise UserError(
            f"batch.size={settings.batch.size} cannot be cut into {grid.replicas} replicas: "
            f"set batch.size to at least {grid.replicas}, or start fewer ranks"
        )
    return grid


def _times(summed_s: float, exposed_s: float, hidden_share: float | None) -> dict[str, float | None]:
    return {"gradient_sum_s": summed_s, "exposed_comm_s": exposed_s, "hidden_share": hidden_share}


def _floating(stage: Stage) -> list[Tensor]:
    """What a mean over replicas is made of: trained parameters and buffers, each once."""
    tensors = [*(p for p in stage.parameters() if p.requires_grad), *stage.buffers()]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


class Layout:
    """Where this rank stands and what it will hold: decided without a message.

    Raises:
        UserError: ranks, stages, layers and batch do not fit together.
    """

    def __init__(self, settings: Settings, task: Task, world: World) -> None:
        self.grid = make_grid(settings, world.size)
        self.place: Place = self.grid.place(world.rank)
        self.specs = task.layers()
        self.layers: range = split_layers(settings, self.specs)[self.place.stage]
        self.device = choose_device(settings.train.device, world.local_rank)

    @property
    def reads_data(self) -> bool:
        """The first stage reads inputs, the last one targets."""
        return self.place.stage in (0, self.grid.stages - 1)


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
        stages = layout.grid.stages
        modules = [
            (layer_name(i), build_layer(layout.specs[i], i, settings.seed).to(self.device))
            for i in layout.layers
        ]
        self.stage = Stage(modules, self.place.stage == 0, self.place.stage == stages - 1, self.device)
        self.parameters = dict(self.stage.named_parameters())
        link: PeerLink = world.peer_link(layout.grid)
        self.pipeline = Pipeline(
            self.stage, link, self.place.stage, stages, settings.pipeline.schedule, task.loss, self.stopwatch
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
        self._losses_before = replace(self.collective.losses)
        self.optimizer: WholeOptimizer | ShardedOptimizer
        if settings.optimizer.sharded and self.collective.size > 1:
            self.optimizer = ShardedOptimizer(settings.optimizer, self.reducer.buckets, self.collective)
        else:
            self.optimizer = WholeOptimizer(
                settings.optimizer, self.parameters, speaks=self.place.replica == 0
            )

    def _make_reducer(self) -> Reducer:
        return Reducer(
            list(self.parameters.items()),
            self.collective if self.average is None else None,
            self.method,
            self._settings.gradients.bucket_bytes,
            self._settings.gradients.overlap,
        )

    def sum_by(self, gradients: GradientSettings) -> None:
        """From the next step on, sum gradients as these settings say.  All ranks together, between steps.

        What error feedback owes goes over to the new sums, if they have error feedback too.
        """
        owed, bases, steps = self.reducer.settle(), self.reducer.bases(), self.reducer.steps
        self.reducer.close()
        self._settings = self._settings.model_copy(update={"gradients": gradients})
        self.method = compression.sum_method(self._settings)
        self.reducer = self._make_reducer()
        self.reducer.resume(owed, bases, steps)
        self.optimizer = self.optimizer.moved_to(self.reducer.buckets)

    def backward(
        self, micro_batches: Sequence[tuple[Any, Any]], batch_size: int, own_samples: int = 0
    ) -> Outcome:
        """Leave in `gradients()` the mean gradient of a batch of `batch_size` samples over all replicas.

        With local steps it is the mean over this replica's `own_samples` alone.

        `micro_batches` are this replica's share, as (input, target) pairs; it may be empty.
        """
        local = self.average is not None
        if self.average is not None:
            self.average.spent_s = 0.0  # a mean for evaluation or a checkpoint belongs to no step
        self._own_samples = own_samples
        self.reducer.begin(passes=len(micro_batches))
        loss = self.pipeline.run(micro_batches, scale=1 / (max(1, own_samples) if local else batch_size))
        with self.stopwatch.timing("comm"):
            self.reducer.finish()
            return self._agree(loss, batch_size, local)

    def _agree(self, loss: float, batch_size: int, local: bool) -> Outcome:
        """One exchange among all ranks; each has its part of the summed loss and of the squared norms."""
        now, before = self.collective.losses, self._losses_before
        lost = [now.overflows - before.overflows, now.underflows - before.underflows]
        self._losses_before = replace(now)
        squares = [0.0] * (self.replicas if local else 1)
        mine = self.place.replica if local else 0
        squares[mine] = squared_norm(self.gradients()) if local else self.optimizer.squared_norm()
        loss, overflows, underflows, *squares = self.control.total([loss, *lost, *squares])
        finite = all(map(math.isfinite, (loss, *squares)))
        norm = math.sqrt(squares[mine]) if finite else math.nan
        return Outcome(loss / batch_size, norm, finite, int(overflows), int(underflows))

    def update(self, outcome: Outcome, learning_rate: float) -> None:
        """Clip and step; all ranks skip a step whose gradients are not finite on any of them.

        With local steps a replica without samples makes none, and momentum and decay rest too.
        """
        if not outcome.finite:
            self.optimizer.skip()
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

    def gradients(self) -> list[Tensor]:
        """What this rank updates with: the gradients of its stage, or its shards of them."""
        return self.optimizer.gradients()

    def complete_gradients(self) -> None:
        """Make every `p.grad` whole where replicas have but shards of it.  All ranks together."""
        self.optimizer.complete_gradients()

    def state_shapes(self) -> dict[str, snapshot.Shape]:
        """Names and shapes of what `restore_state` wants of a checkpoint."""
        model = snapshot.shapes(self.parameters, snapshot.buffers_of(self.stage), None)
        return model | self.optimizer.shapes() | compression.shapes(self.reducer)

    def take_state(self) -> dict[str, Tensor]:
        """What this rank writes into a checkpoint, by name; no two have the same.  All ranks together.

        With local steps it is of the replicas' mean model, and of replica 0's own optimizer.
        """
        self.average_parameters()
        writer = self.place.replica == 0
        model: dict[str, Tensor] = {}
        if writer:
            model = snapshot.take(self.parameters, snapshot.buffers_of(self.stage), None)
        return model | self.optimizer.take() | compression.take(self.reducer, writer)

    def cut_state(self, name: str, whole: Tensor) -> Tensor:
        """What `restore_state` wants of a tensor of a checkpoint, in memory of its own."""
        return self.optimizer.cut(name, whole) if split_optimizer_name(name) else whole.clone()

    def restore_state(self, tensors: Mapping[str, Tensor], steps: int = 0) -> None:
        """Go on after `steps` steps from what a checkpoint has, cut.

        `tensors` belong to the worker from now on.
        """
        snapshot.restore(tensors, self.parameters, snapshot.buffers_of(self.stage), None)
        self.optimizer.restore(tensors)
        compression.restore(self.reducer, tensors, steps)

    def close(self) -> None:
        """End the summing thread; free what the backend holds.  All ranks together."""
        self.reducer.close()
        self.collective.close()
