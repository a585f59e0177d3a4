"""Who takes part in a contest of pipelined steps: forward and backward of a batch, and its loss as a number.

All share one copy of the layers, so that none finds its weights in the cache where another does not. Each
cuts the batch into micro-batches, and adds gradients to `grad`, which is zero.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.peers.torch_pipelining import TorchPipeline, in_halves
from benchmarks.pipeline.models import Model, loss
from benchmarks.records import OURS
from hpc_train.bench.turns import Contestant
from hpc_train.comm.interface import PeerLink, World
from hpc_train.grid import Grid
from hpc_train.pipeline.actions import Order
from hpc_train.pipeline.layers import layer_name
from hpc_train.pipeline.runtime import Pipeline
from hpc_train.pipeline.schedules import Schedule
from hpc_train.pipeline.stage import Stage
from hpc_train.stopwatch import Stopwatch

ONE_RANK = "PyTorch, one rank"
_TOLERANCE = 1e-5  # of gradients and losses, relative, in fp32: sums may be in another order

Step = Callable[[tuple[Tensor, Tensor]], float]


class Contest:
    """A model, a number of micro-batches, and all who step it.

    Making one computes the gradients in plain PyTorch, with which every contestant's are compared.
    """

    def __init__(self, world: World, link: PeerLink, model: Model, micro_batches: int) -> None:
        self._world, self._link = world, link
        self._model = model
        self.micro_batches = micro_batches
        self._batch = model.batch(micro_batches)
        self._scale = 1 / len(self._batch[0])
        self._zero()
        self._expected_loss = self._plain_step(self._batch)
        self._expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def one_rank(self, lead_in: int = 0) -> Contestant:
        """Plain PyTorch on rank 0, while the others wait."""
        step = self._plain_step if self._world.rank == 0 else lambda batch: 0.0
        held = range(len(self._model.layers) if self._world.rank == 0 else 0)
        return self._contestant(ONE_RANK, step, held, self._world.rank == 0, lead_in)

    def ours(self, schedule: Schedule, lead_in: int = 0) -> Contestant:
        """hpc_train."""
        held, num_chunks = self._held(schedule)
        stage = Stage(
            {c: [(layer_name(i), self._model.layers[i]) for i in layers] for c, layers in held.items()},
            num_chunks,
        )
        pipeline = Pipeline(
            stage, self._link, self._world.rank, self._world.size, schedule, loss, Stopwatch()
        )
        return self._contestant(
            OURS,
            lambda batch: pipeline.run(self._model.cut(batch), self._scale).total * self._scale,
            [i for layers in held.values() for i in layers],
            stage.is_last,
            lead_in,
        )

    def peer(self, way: str, schedule: Schedule, lead_in: int = 0) -> tuple[Contestant, bool]:
        """PyTorch's pipelining, and whether it walks the same order.  Raises ValueError where it does."""
        held, num_chunks = self._held(schedule)
        torch_pipeline = TorchPipeline(
            way,
            schedule.name,
            self.order(schedule),
            {c: nn.Sequential(*(self._model.layers[i] for i in layers)) for c, layers in held.items()},
            num_chunks,
            self.micro_batches,
            lambda output, target: loss(output, target).sum() * self._scale,
            self._model.cut(self._batch)[0][0],
        )
        contestant = self._contestant(
            way,
            torch_pipeline.run,
            [i for layers in held.values() for i in layers],
            num_chunks - 1 in held,
            lead_in,
        )
        row = in_halves(self.order(schedule)[self._world.rank])
        same = torch_pipeline.row_walked(self._batch) == row
        return contestant, self._world.control.agree(same)

    def order(self, schedule: Schedule) -> Order:
        """All ranks' actions."""
        return schedule.order(self._world.size, self.micro_batches)

    def _held(self, schedule: Schedule) -> tuple[dict[int, range], int]:
        """The layers held here, by chunk, and the number of all chunks."""
        num_chunks = self._world.size * schedule.chunks
        mine = [c for c in range(num_chunks) if schedule.stage_of(c, self._world.size) == self._world.rank]
        return {c: self._model.chunk(c, num_chunks) for c in mine}, num_chunks

    def _plain_step(self, batch: tuple[Tensor, Tensor]) -> float:
        total: Tensor | float = 0.0
        for x, target in self._model.cut(batch):
            for layer in self._model.layers:
                x = layer(x)
            value = loss(x, target).sum() * self._scale
            value.backward()
            total = total + value.detach()
        return float(total)

    def _zero(self) -> None:
        for p in self._model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad.zero_()

    def _contestant(
        self, impl: str, step: Step, held: "list[int] | range", has_loss: bool, lead_in: int
    ) -> Contestant:
        latest = [0.0]

        def call() -> None:
            latest[0] = step(self._batch)

        def check() -> None:
            self._check_loss(impl, latest[0], self._expected_loss if has_loss else 0.0)
            self._check_gradients(impl, held)

        return Contestant(impl, "fp32", call, self._zero, check, lead_in=lead_in)

    def _check_loss(self, impl: str, found: float, expected: float) -> None:
        if not abs(found - expected) <= _TOLERANCE * abs(expected):
            raise RuntimeError(f"{impl}'s loss is {found:.9g}, not {expected:.9g}")

    def _check_gradients(self, impl: str, held: "list[int] | range") -> None:
        expected = iter(self._expected)
        for number, layer in enumerate(self._model.layers):
            for name, p in layer.named_parameters():
                wanted = next(expected)
                if number not in held:
                    continue
                assert p.grad is not None
                off = float((p.grad - wanted).norm() / wanted.norm())
                if not off <= _TOLERANCE:
                    raise RuntimeError(f"{impl}'s gradient of layer {number}'s {name} is off by {off:.2g}")


def link_of(world: World) -> PeerLink:
    """Among all ranks, as stages of one replica.  Collective."""
    return world.peer_link(Grid(1, world.size))
