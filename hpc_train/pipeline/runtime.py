"""Walks a stage's actions: layers and loss here, activations and gradients to and from its neighbours.

    F   receive activations from the stage before, run the layers, send activations to the next
    B   receive gradients from the next stage, run backward, send gradients to the one before

The first stage takes activations from the batch instead, the last one gradients from the loss.
check.py says when a message is waited for, and why that cannot deadlock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpc_train.comm.interface import PeerLink, Work
from hpc_train.errors import UserError
from hpc_train.pipeline.actions import Action, Kind
from hpc_train.pipeline.boundary import Door, enter, leave
from hpc_train.pipeline.check import validate
from hpc_train.pipeline.messages import (
    Outbox,
    Value,
    receive,
    receive_message,
    tag_of,
    tensors_of,
)
from hpc_train.pipeline.samples import sum_over_samples
from hpc_train.pipeline.schedules import find, forward_only
from hpc_train.pipeline.stage import Stage
from hpc_train.stopwatch import Stopwatch

Loss = Callable[[Any, Any], Tensor]
Metrics = Callable[[Any, Any], Mapping[str, Tensor]]
MicroBatches = Sequence[tuple[Any, Any] | None]


@dataclass
class _Live:
    """A micro-batch between its forward and its backward; autograd keeps the activations it needs."""

    entrances: list[Door]  # of the inputs that need a gradient
    roots: list[Tensor] = field(default_factory=list)  # where backward begins
    arriving: list[Work] = field(default_factory=list)  # gradients of the outputs


class Pipeline:
    """One stage of one replica at work.

    Args:
        stage: the layers held here.
        link: to the other stages of the replica; not used when there is one stage.
        stage_index: this stage's number.
        num_stages: of the replica.
        schedule: "gpipe" or "1f1b".
        loss: of (output, target), one number a sample, [micro-batch].
        stopwatch: is told the seconds of computing, and of waiting for other stages.

    All stages of the replica make the same calls of `run`, `evaluate` and `forward`, with as many
    micro-batches. A micro-batch is a pair (input, target); only the first stage looks at the input
    and only the last at the target, so that a stage between them may pass None for the pair, and
    the last stage None for the input. Tensors are on the stage's device.
    """

    def __init__(
        self,
        stage: Stage,
        link: PeerLink,
        stage_index: int,
        num_stages: int,
        schedule: str,
        loss: Loss,
        stopwatch: Stopwatch,
    ) -> None:
        assert stage.is_first == (stage_index == 0)
        assert stage.is_last == (stage_index == num_stages - 1)
        self.stage = stage
        self.stage_index = stage_index
        self.num_stages = num_stages
        self._link = link
        self._schedule = schedule
        self._loss = loss
        self._stopwatch = stopwatch
        self._actions: dict[int, list[Action]] = {}  # by number of micro-batches
        self._live: dict[int, _Live] = {}
        self._activations = Outbox()
        self._gradients = Outbox()
        self._loss_sum: Tensor | float = 0.0

    def run(self, micro_batches: MicroBatches, scale: float) -> float:
        """Forward and backward of this replica's share of a batch; gradients add up in `param.grad`.

        Args:
            micro_batches: may be none at all, and each may have other shapes.
            scale: backward is of `scale` times the sum of the samples' losses: 1 / samples of the
                whole batch makes the sum of all replicas' gradients the gradient of the mean.

        Returns:
            the sum of this replica's losses, not scaled, on the last stage; 0.0 on the others.

        Raises:
            UserError: the loss is not one number a sample, or a layer gives what cannot be sent.
            PeerLost: another stage is gone.
        """
        self._loss_sum = 0.0
        self._live.clear()
        for action in self._order(len(micro_batches)):
            if action.kind is Kind.F:
                self._forward(action.micro_batch, micro_batches[action.micro_batch], scale)
            else:
                self._backward(action.micro_batch)
        self._wait(self._gradients.wait_all)
        return float(self._loss_sum)

    def evaluate(self, micro_batches: MicroBatches, metrics: Metrics) -> dict[str, float]:
        """Sums over the samples of `loss` and of all that `metrics` gives, without gradients.

        Returns:
            them by name on the last stage (without micro-batches the loss alone), and nothing on the others.

        Raises:
            UserError, PeerLost: as for `run`.
        """
        sums: dict[str, Tensor | float] = {"loss": 0.0} if self.stage.is_last else {}
        with self.stage.evaluating():
            order = find(self._schedule).order(self.num_stages, len(micro_batches))
            for _, _, micro_batch in forward_only(order)[self.stage_index]:
                pair = micro_batches[micro_batch]
                inputs, _ = self._inputs(micro_batch, pair)
                with self._stopwatch.timing("compute"):
                    output = self.stage(inputs)
                    if self.stage.is_last:
                        target = _present(pair)[1]
                        figures = {"loss": self._loss(output, target), **metrics(output, target)}
                        for name, values in figures.items():
                            sums[name] = sums.get(name, 0.0) + sum_over_samples(values, name, target)
                if not self.stage.is_last:
                    # One output under way, or all would stay in memory.
                    self._wait(self._activations.wait_all)
                    self._activations.send_message(
                        self._link, output, self.stage_index + 1, tag_of("activations", micro_batch)
                    )
        self._wait(self._activations.wait_all)
        return {name: float(value) for name, value in sums.items()}

    def forward(self, inputs: Any) -> Any:
        """The whole model's output for `inputs`, on every stage and on the device of `inputs`; no gradients.

        All stages pass the same inputs: a tensor or a tuple of tensors.
        """
        device = tensors_of(inputs)[0].device
        last = self.num_stages - 1
        with self.stage.evaluating():
            value, _ = self._inputs(0, (_on(inputs, self.stage.device), None))
            with self._stopwatch.timing("compute"):
                output = self.stage(value)
            if self.stage.is_last:
                for stage in range(last):
                    self._activations.send_message(self._link, output, stage, tag_of("answer"))
            else:
                self._activations.send_message(
                    self._link, output, self.stage_index + 1, tag_of("activations")
                )
                with self._stopwatch.timing("wait"):
                    output, _ = receive_message(self._link, last, tag_of("answer"), self.stage.device)
        self._wait(self._activations.wait_all)
        return _on(output, device)

    def _order(self, num_micro_batches: int) -> list[Action]:
        """The actions of this stage, from an order that was checked before its first message."""
        if num_micro_batches not in self._actions:
            order = find(self._schedule).order(self.num_stages, num_micro_batches)
            validate(order)
            self._actions[num_micro_batches] = order[self.stage_index]
        return self._actions[num_micro_batches]

    def _forward(self, micro_batch: int, pair: tuple[Any, Any] | None, scale: float) -> None:
        inputs, entrances = self._inputs(micro_batch, pair)
        live = self._live[micro_batch] = _Live(entrances)
        with self._stopwatch.timing("compute"):
            output = self.stage(inputs)
            if self.stage.is_last:
                target = _present(pair)[1]
                losses = self._loss(output, target)
                self._loss_sum = self._loss_sum + sum_over_samples(losses, "loss", target)
                if any(tensor.requires_grad for tensor in tensors_of(output)) and not losses.requires_grad:
                    raise UserError(
                        "the loss does not depend on the model's output, and nothing would be trained: "
                        "do not detach it, and compute it from the output with torch"
                    )
                if losses.requires_grad:
                    live.roots.append(losses.sum() * scale)
        if not self.stage.is_last:
            self._send_output(micro_batch, output, live)

    def _send_output(self, micro_batch: int, output: Value, live: _Live) -> None:
        """Send it, and post the receives of its gradients at once: nothing then holds up their sender."""
        next_stage = self.stage_index + 1
        self._activations.send_message(self._link, output, next_stage, tag_of("activations", micro_batch))
        gradients = []
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                root, door = leave(tensor)
                live.roots.append(root)
                gradients.append(door.make_room())
        live.arriving = receive(self._link, gradients, next_stage, tag_of("gradients", micro_batch))

    def _backward(self, micro_batch: int) -> None:
        live = self._live.pop(micro_batch)
        with self._stopwatch.timing("wait"):
            for work in live.arriving:
                work.wait()
            # the next stage is done with this output, so that its send is over as well
            self._activations.wait(tag_of("activations", micro_batch))
        with self._stopwatch.timing("compute"):
            if live.roots:
                torch.autograd.backward(live.roots)
                live.roots.clear()
        if live.entrances:
            self._wait(self._gradients.wait_all)  # not for outputs: their receivers may wait for us
            gradients = [door.take_gradient() for door in live.entrances]
            self._gradients.send(
                self._link, gradients, self.stage_index - 1, tag_of("gradients", micro_batch)
            )

    def _inputs(self, micro_batch: int, pair: tuple[Any, Any] | None) -> tuple[Any, list[Door]]:
        """What the first layer here takes, and the doors of the tensors that need a gradient."""
        if self.stage.is_first:
            return _present(pair)[0], []
        tag = tag_of("activations", micro_batch)
        with self._stopwatch.timing("wait"):
            value, needs_gradient = receive_message(self._link, self.stage_index - 1, tag, self.stage.device)
        entered, entrances = [], []
        for tensor, needs in zip(tensors_of(value), needs_gradient, strict=True):
            if needs:
                tensor, door = enter(tensor)
                entrances.append(door)
            entered.append(tensor)
        return tuple(entered) if isinstance(value, tuple) else entered[0], entrances

    def _wait(self, wait: Callable[[], None]) -> None:
        with self._stopwatch.timing("wait"):
            wait()


def _present(pair: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """The pair where one is needed."""
    assert pair is not None, "the first and the last stage need their micro-batches"
    return pair


def _on(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of tensors, on `device`."""
    if isinstance(value, tuple):
        return tuple(_on(part, device) for part in value)
    return value.to(device) if isinstance(value, Tensor) else value
