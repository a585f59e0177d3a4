"""What goes from chunk to chunk: messages between stages, handed over directly within one.

      chunk 0 (stage 0)                chunk 1 (stage 1)
      give_output   ---- activations ---->   take_input
      take_gradients <---- gradients ----    give_gradients

check.py says when a message is waited for, and why that cannot deadlock.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_train.comm.interface import PeerLink, Transfer, Wire
from hpc_train.pipeline.actions import Action, Kind
from hpc_train.pipeline.messages import Expected, Outbox, Room, describe, receive, tag_of
from hpc_train.stopwatch import Stopwatch

Spot = tuple[int, int]  # a chunk and a micro-batch


class Traffic:
    """A stage's side of all boundaries between chunks.

    Args:
        link: to the other stages of the replica.
        stage: this one's number.
        stage_of: of each chunk.
        wire: the number format in which fp32 activations and their gradients travel.
        device: where they are received.
        stopwatch: is told the seconds of waiting.
    """

    def __init__(
        self,
        link: PeerLink,
        stage: int,
        stage_of: Sequence[int],
        wire: Wire,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        self._link, self._stage, self._stage_of = link, stage, stage_of
        self._wire, self._device, self._stopwatch = wire, device, stopwatch
        self._activations = Outbox(link, wire)
        self._gradients = Outbox(link, wire)
        self._receives: list[Spot] = []  # inputs to come by message, the next one last
        self._expected: tuple[Spot, Expected] | None = None
        self._outputs: dict[Spot, tuple[Any, list[Tensor], list[bool]]] = {}  # for a chunk here, by its spot
        self._handed_back: dict[Spot, list[Tensor]] = {}  # gradients of a chunk here, by its spot
        self._arriving: dict[Spot, tuple[list[Room], list[Transfer]]] = {}

    @property
    def losses(self) -> tuple[int, int]:
        """Overflows and underflows of all that was sent; see comm.interface.Losses."""
        boxes = (self._activations.losses, self._gradients.losses)
        return sum(box.overflows for box in boxes), sum(box.underflows for box in boxes)

    def begin(self, row: Iterable[Action]) -> None:
        """Forget what an earlier run left, and expect the first message that a row of actions takes."""
        self._forget()
        wanted = [
            (a.chunk, a.micro_batch) for a in row if a.kind is Kind.F and self._before(a.chunk) is not None
        ]
        self._receives = wanted[::-1]
        self._expect_next()

    def take_input(self, chunk: int, micro_batch: int) -> tuple[Any, list[Tensor], list[bool]]:
        """A chunk's input: its structure, its tensors, and which of them need a gradient."""
        spot = chunk, micro_batch
        if spot in self._outputs:
            return self._outputs.pop(spot)
        assert self._expected is not None
        assert self._expected[0] == spot, f"{spot} is not next"
        with self._stopwatch.timing("wait"):
            structure, tensors, description = self._expected[1].take()
        self._expect_next()
        self._look_ahead()
        return structure, tensors, [form.needs_gradient for form in description.forms]

    def give_output(self, chunk: int, micro_batch: int, output: Any) -> None:
        """Start to bring a chunk's output to the next, and expect gradients of its tensors that need one."""
        receiver = self._stage_of[chunk + 1]
        if receiver == self._stage:
            description, tensors = describe(output)
            needs = [form.needs_gradient for form in description.forms]
            self._outputs[chunk + 1, micro_batch] = (
                description.structure,
                [tensor.detach() for tensor in tensors],
                needs,
            )
            return
        description = self._activations.send_message(
            output, receiver, self._tag("activations", chunk, micro_batch)
        )
        rooms = [Room(form, self._wire, self._device) for form in description.forms if form.needs_gradient]
        # Posted at once: nothing then holds up their sender.
        works = receive(self._link, rooms, receiver, self._tag("gradients", chunk, micro_batch))
        self._arriving[chunk, micro_batch] = rooms, works

    def give_last_output(self, chunk: int, micro_batch: int, output: Any) -> None:
        """As `give_output`, where no gradient will come back: one output under way to each stage, no more."""
        with self._stopwatch.timing("wait"):
            self._activations.wait_all(self._stage_of[chunk + 1])
        self.give_output(chunk, micro_batch, output)

    def take_gradients(self, chunk: int, micro_batch: int) -> list[Tensor]:
        """The gradients of a chunk's output, of those tensors that need one."""
        self._look_ahead()
        spot = chunk, micro_batch
        if spot in self._handed_back:
            return self._handed_back.pop(spot)
        if spot not in self._arriving:
            return []
        rooms, works = self._arriving.pop(spot)
        with self._stopwatch.timing("wait"):
            for work in works:
                work.wait()
            # the next chunk is done with this output, so that its send is over as well
            self._activations.wait(self._stage_of[chunk + 1], self._tag("activations", chunk, micro_batch))
        return [room.tensor() for room in rooms]

    def give_gradients(self, chunk: int, micro_batch: int, gradients: Sequence[Tensor]) -> None:
        """Start to bring the gradients of a chunk's input back to the chunk before."""
        giver = self._stage_of[chunk - 1]
        if giver == self._stage:
            self._handed_back[chunk - 1, micro_batch] = list(gradients)
            return
        with self._stopwatch.timing("wait"):
            self._gradients.wait_all()  # not for outputs: their receivers may wait for us
        self._gradients.send(gradients, giver, self._tag("gradients", chunk - 1, micro_batch))

    def finish(self) -> None:
        """Return when all that was sent has gone."""
        with self._stopwatch.timing("wait"):
            self._activations.wait_all()
            self._gradients.wait_all()
        self._forget()

    def _forget(self) -> None:
        self._outputs.clear()
        self._handed_back.clear()
        self._arriving.clear()
        self._expected = None

    def _before(self, chunk: int) -> int | None:
        """The stage that sends a chunk its input; None where it comes without a message."""
        if chunk == 0 or self._stage_of[chunk - 1] == self._stage:
            return None
        return self._stage_of[chunk - 1]

    def _expect_next(self) -> None:
        if not self._receives:
            self._expected = None
            return
        chunk, micro_batch = self._receives.pop()
        sender = self._before(chunk)
        assert sender is not None
        tag = self._tag("activations", chunk - 1, micro_batch)
        message = Expected(self._link, sender, tag, self._wire, self._device)
        self._expected = (chunk, micro_batch), message

    def _look_ahead(self) -> None:
        """Before something is computed: let the next input come meanwhile, if its sender has begun."""
        if self._expected is not None:
            self._expected[1].look()

    def _tag(self, message: str, chunk: int, micro_batch: int) -> int:
        """The tag of what crosses the boundary after `chunk`."""
        return tag_of(message, micro_batch * len(self._stage_of) + chunk)
