"""Parameters that are one though they stand on different stages.

    stage 0   owns it      trains it, keeps its state
    stage 3   borrows it   computes with a copy

    backward   the borrower's gradient goes to the owner, before the owner's is summed over replicas
    update     the owner's new values go to the borrower

So there is one gradient, one optimizer state and one norm, and copies cannot drift apart. Where the
layers of a tie stand on one stage they hold the same parameter, and nothing is sent.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from hpc_train.comm.interface import PeerLink
from hpc_train.pipeline.layers import Tie, parameter_of
from hpc_train.pipeline.messages import Outbox, tag_of


class _Loan(NamedTuple):
    """A parameter that this stage owns or borrows; `number` tells loans between the same stages apart."""

    parameter: nn.Parameter
    stage: int  # the other one
    number: int


class Ties:
    """What a stage has to do for all ties.

    Args:
        ties: of the whole model, from `layers.find_ties`.
        layers: held here, by number, after `layers.tie_within`.
        stage_of: the stage of each layer.
        stage: this one.
        link: to the other stages of the replica.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        layers: Mapping[int, nn.Module],
        stage_of: Sequence[int],
        stage: int,
        link: PeerLink,
    ) -> None:
        self._link = link
        self.lent: list[_Loan] = []
        self.borrowed: list[_Loan] = []
        for number, tie in enumerate(ties):
            owner = stage_of[tie[0].layer]
            others = sorted({stage_of[tied.layer] for tied in tie} - {owner})
            if stage == owner:
                parameter = parameter_of(layers, tie[0])
                self.lent += [_Loan(parameter, other, number) for other in others]
            elif stage in others:
                mine = next(tied for tied in tie if tied.layer in layers)
                self.borrowed.append(_Loan(parameter_of(layers, mine), owner, number))

    @property
    def borrowed_parameters(self) -> set[nn.Parameter]:
        """Those whose state is kept, and updated, on another stage."""
        return {loan.parameter for loan in self.borrowed}

    def contributions(self, parameter: nn.Parameter) -> int:
        """How many gradients of other stages are added to this parameter's in a step."""
        return sum(loan.parameter is parameter for loan in _trained(self.lent))

    def begin(self) -> None:
        """Forget the gradients of borrowed parameters."""
        for loan in self.borrowed:
            loan.parameter.grad = None

    def add_gradients(self) -> None:
        """After the last backward of a step: bring the borrowers' gradients to the owners'."""
        outbox = Outbox(self._link)
        for parameter, stage, number in _trained(self.borrowed):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            outbox.send([gradient], stage, tag_of("tied gradient", number))
        arriving = []
        for parameter, stage, number in _trained(self.lent):
            room = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            arriving.append((parameter, room, self._link.irecv(room, stage, tag_of("tied gradient", number))))
        for parameter, room, work in arriving:
            work.wait()
            torch.autograd.backward([parameter], [room])  # as one more pass, so that hooks see it
        outbox.wait_all()

    @torch.no_grad()
    def share_parameters(self) -> None:
        """After an update, and before the first step: give the owners' values to the borrowers."""
        outbox = Outbox(self._link)
        for parameter, stage, number in self.lent:
            outbox.send([parameter], stage, tag_of("tied parameter", number))
        for parameter, stage, number in self.borrowed:
            room = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            self._link.irecv(room, stage, tag_of("tied parameter", number)).wait()
            parameter.copy_(room)
        outbox.wait_all()


def _trained(loans: Sequence[_Loan]) -> list[_Loan]:
    """Those of parameters that are not frozen, which owner and borrowers are alike."""
    return [loan for loan in loans if loan.parameter.requires_grad]
