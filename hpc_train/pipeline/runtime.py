"""Walks a stage's actions: layers and loss here, activations and gradients to and from its neighbours.

    F      take the chunk's input, run its layers, give the output to the next chunk
    B      take the output's gradients, run backward, give the input's gradients to the chunk before
    I, W   the same in halves: W is what no other chunk waits for

The first chunk takes its input from the batch instead, the last one gradients from the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_train.comm.interface import PeerLink, Wire
from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Kind, Order
from hpc_train.pipeline.batch_statistics import BatchStatistics
from hpc_train.pipeline.boundary import Door, enter
from hpc_train.pipeline.check import validate
from hpc_train.pipeline.draws import Draws
from hpc_train.pipeline.forward_backward import ForwardBackward, Live
from hpc_train.pipeline.later import Later
from hpc_train.pipeline.messages import Outbox, receive_message, tag_of
from hpc_train.pipeline.samples import Sum, sum_over_samples
from hpc_train.pipeline.schedules import Schedule
from hpc_train.pipeline.stage import Stage
from hpc_train.pipeline.ties import Ties
from hpc_train.pipeline.traffic import Spot, Traffic
from hpc_train.pipeline.values import put_together, take_apart, tensors_of
from hpc_train.stopwatch import Stopwatch

Loss = Callable[[Any, Any], Any]
Metrics = Callable[[Any, Any], Mapping[str, Any]]
MicroBatches = Sequence[tuple[Any, Any] | None]


class Pipeline:
    """One stage of one replica at work.

    Args:
        stage: the layers held here.
        link: to the other stages of the replica; not used when there is one stage.
        stage_index: this stage's number.
        num_stages: of the replica.
        schedule: the order of actions, and which stage holds which chunk.
        loss: of (output, target), one number a sample, [micro-batch], or a pair of these and weights.
        stopwatch: is told the seconds of computing, and of waiting for other stages.
        wire: the number format in which fp32 activations and their gradients travel.
        recompute: keep only the inputs of layers, and compute the rest again in backward.
        ties: parameters that are one with other stages'.

    All stages of the replica make the same calls of `run`, `evaluate` and `forward`, with as many
    micro-batches. A micro-batch is a pair (input, target); only the first chunk looks at the input
    and only the last at the target, so that a stage between them may pass None for the pair, and
    the last stage None for the input. Tensors are on the stage's device.
    """

    def __init__(
        self,
        stage: Stage,
        link: PeerLink,
        stage_index: int,
        num_stages: int,
        schedule: Schedule,
        loss: Loss,
        stopwatch: Stopwatch,
        wire: Wire = Wire.FP32,
        recompute: bool = False,
        ties: Ties | None = None,
    ) -> None:
        stage_of = [schedule.stage_of(chunk, num_stages) for chunk in range(num_stages * schedule.chunks)]
        assert [c for c, at in enumerate(stage_of) if at == stage_index] == list(stage.chunks)
        self.stage = stage
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.statistics = BatchStatistics(stage)
        self._stage_of = stage_of
        self._link = link
        self._schedule = schedule
        self._loss = loss
        self._stopwatch = stopwatch
        self._ties = ties
        self._draws = Draws(stage.device)
        self._work = ForwardBackward(recompute, self.statistics, self._draws)
        self._traffic = Traffic(link, stage_index, stage_of, wire, stage.device, stopwatch)
        self._orders: dict[int, Order] = {}  # by number of micro-batches
        self._live: dict[Spot, Live] = {}
        self._sum: tuple[Tensor | float, Tensor | float] = (0.0, 0.0)

    @property
    def wire_losses(self) -> tuple[int, int]:
        """Overflows and underflows of activations and gradients that were sent, counted up."""
        return self._traffic.losses

    def run(
        self, micro_batches: MicroBatches, scale: float, seed: int | None = None, samples: Sequence[int] = ()
    ) -> Sum:
        """Forward and backward of this replica's share of a batch; gradients add up in `param.grad`.

        Args:
            micro_batches: may be none at all, and each may have other shapes.
            scale: backward is of `scale` times the sum of the samples' losses: 1 / samples of the
                whole batch makes the sum of all replicas' gradients the gradient of the mean.
            seed: of the random numbers that layers draw in this step; without it they draw on.
            samples: with a seed, the number in the batch of each micro-batch's first sample.

        Returns:
            the sum of this replica's losses, not scaled, and of their weights, on the stage with the last
            chunk; zeros on the others.

        Raises:
            UserError: the loss is not one number a sample, or a layer gives what cannot be sent.
            PeerLost: another stage is gone.
        """
        self._sum = (0.0, 0.0)
        self._live.clear()
        self._draws.step_seed = seed
        firsts = samples if seed is not None else [0] * len(micro_batches)
        row = self._order(len(micro_batches))[self.stage_index]
        halves = {(a.chunk, a.micro_batch) for a in row if a.kind is Kind.I}
        self._traffic.begin(row)
        if self._ties:
            self._ties.begin()
        for action in row:
            chunk, kind, micro_batch = action
            if kind is Kind.F:
                spot = chunk, micro_batch
                self._forward(spot, micro_batches[micro_batch], scale, firsts[micro_batch], spot in halves)
            elif kind is Kind.W:
                self._backward_weights(chunk, micro_batch)
            else:
                self._backward(chunk, micro_batch)
        self._traffic.finish()
        if self._ties and micro_batches:
            with self._stopwatch.timing("wait"):
                self._ties.add_gradients()
        return Sum(*map(float, self._sum))

    def evaluate(self, micro_batches: MicroBatches, metrics: Metrics) -> dict[str, Sum]:
        """Sums over the samples of `loss` and of all that `metrics` gives, without gradients.

        Returns:
            them by name on the stage with the last chunk (without micro-batches the loss alone), and nothing
            on the others.

        Raises:
            UserError, PeerLost: as for `run`.
        """
        sums: dict[str, Sum] = {"loss": Sum(0.0, 0.0)} if self.stage.is_last else {}

        def judge(output: Any, target: Any) -> None:
            figures = {"loss": self._loss(output, target), **metrics(output, target)}
            for name, values in figures.items():
                found = Sum(*map(float, sum_over_samples(values, name, target)))
                sums[name] = sums.get(name, Sum(0.0, 0.0)) + found

        self._forward_only(micro_batches, judge)
        return sums

    def forward(self, inputs: Any) -> Any:
        """The whole model's output for `inputs`, on every stage and on the device of `inputs`; no gradients.

        All stages pass the same inputs.
        """
        device = tensors_of(inputs)[0].device
        outputs: list[Any] = []
        self._forward_only([(_on(inputs, self.stage.device), None)], lambda output, _: outputs.append(output))
        last = self._stage_of[-1]
        if outputs:
            outbox = Outbox(self._link)
            for stage in range(self.num_stages):
                if stage != last:
                    outbox.send_message(outputs[0], stage, tag_of("answer"))
            outbox.wait_all()
        else:
            with self._stopwatch.timing("wait"):
                answer = receive_message(self._link, last, tag_of("answer"), Wire.FP32, self.stage.device)
            outputs.append(answer)
        return _on(outputs[0], device)

    def share_parameters(self) -> None:
        """After parameters have changed: give those that are one with other stages' to these."""
        if self._ties:
            with self._stopwatch.timing("wait"):
                self._ties.share_parameters()

    def _order(self, num_micro_batches: int) -> Order:
        """All stages' actions, checked before their first message."""
        if num_micro_batches not in self._orders:
            order = self._schedule.order(self.num_stages, num_micro_batches)
            validate(order)
            self._orders[num_micro_batches] = order
        return self._orders[num_micro_batches]

    def _forward_only(self, micro_batches: MicroBatches, judge: Callable[[Any, Any], None]) -> None:
        """Every micro-batch through the chunks; `judge` gets the whole model's output and the target."""
        row = self._schedule.forwards(self.num_stages, len(micro_batches))[self.stage_index]
        with self.stage.evaluating():
            self._traffic.begin(row)
            for chunk, _, micro_batch in row:
                pair = micro_batches[micro_batch]
                inputs, _ = self._input(chunk, micro_batch, pair)
                with self._stopwatch.timing("compute"):
                    output = self._work.forward(self.stage.chunks[chunk], inputs, sample=0)
                    if chunk == len(self._stage_of) - 1:
                        judge(output, _present(pair)[1])
                if chunk < len(self._stage_of) - 1:
                    self._traffic.give_last_output(chunk, micro_batch, output)
            self._traffic.finish()

    def _forward(
        self, spot: Spot, pair: tuple[Any, Any] | None, scale: float, sample: int, halves: bool
    ) -> None:
        chunk, micro_batch = spot
        inputs, entrances = self._input(chunk, micro_batch, pair)
        live = self._live[spot] = Live(entrances, later=Later() if halves else None)
        with self._stopwatch.timing("compute"):
            output = self._work.forward(self.stage.chunks[chunk], inputs, sample, live)
            if chunk == len(self._stage_of) - 1:
                self._add_loss(live, output, _present(pair)[1], scale)
        if chunk < len(self._stage_of) - 1:
            self._traffic.give_output(chunk, micro_batch, output)
            live.leave(output)

    def _add_loss(self, live: Live, output: Any, target: Any, scale: float) -> None:
        figures = self._loss(output, target)
        total, weight = sum_over_samples(figures, "loss", target)
        self._sum = self._sum[0] + total, self._sum[1] + weight
        losses = figures[0] if isinstance(figures, tuple) else figures
        if any(tensor.requires_grad for tensor in tensors_of(output)) and not losses.requires_grad:
            raise UserError(
                "the loss does not depend on the model's output, and nothing would be trained: "
                "do not detach it, and compute it from the output with torch"
            )
        if losses.requires_grad:
            live.roots.append(losses.sum() * scale)

    def _backward(self, chunk: int, micro_batch: int) -> None:
        live = self._live[chunk, micro_batch]
        gradients = self._traffic.take_gradients(chunk, micro_batch)
        with self._stopwatch.timing("compute"):
            mine = self._work.backward(self.stage.chunks[chunk], live, gradients)
        del gradients
        if live.later is None:
            del self._live[chunk, micro_batch]
        if mine:
            self._traffic.give_gradients(chunk, micro_batch, mine)

    def _backward_weights(self, chunk: int, micro_batch: int) -> None:
        live = self._live.pop((chunk, micro_batch))
        assert live.later is not None
        with self._stopwatch.timing("compute"):
            live.later.backward_weights()

    def _input(self, chunk: int, micro_batch: int, pair: tuple[Any, Any] | None) -> tuple[Any, list[Door]]:
        """What the chunk's first layer takes, and the doors of the tensors that need a gradient."""
        if chunk == 0:
            return _present(pair)[0], []
        structure, tensors, needs_gradient = self._traffic.take_input(chunk, micro_batch)
        entered, doors = enter(tensors, needs_gradient)
        return put_together(structure, entered), doors


def _present(pair: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """The pair where one is needed."""
    assert pair is not None, "the first and the last chunk need their micro-batches"
    return pair


def _on(value: Any, device: torch.device) -> Any:
    """A value with its tensors on `device`."""
    structure, tensors = take_apart(value)
    return put_together(structure, [tensor.to(device) for tensor in tensors])
