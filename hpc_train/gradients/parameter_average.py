"""Local SGD: replicas train by themselves, and their parameters are averaged every so many steps.

    step        1   2   3   4          5   6   7   8
    replica 0   o---o---o---o          o---o---o---o
    replica 1   o---o---o---o  > mean  o---o---o---o  > mean      no gradient is sent in between
    replica 2   o---o---o---o          o---o---o---o

arXiv 1805.09767.  A replica counts by the samples it has seen since the last mean, so that unequal shares
pull as they should.
"""

import time
from collections.abc import Iterable

import torch
from torch import Tensor

from hpc_train.comm.interface import Collective, Wire


class ParameterAverage:
    """The mean of these tensors over replicas.  Making one is collective, and so is `average`.

    Args:
        tensors: floating, of equal shapes on all replicas; averaged in fp32 whatever their dtype.
        collective: the replicas.
        piece_bytes: of tensors that travel together.

    `spent_s`: what averages took so far.
    """

    def __init__(self, tensors: Iterable[Tensor], collective: Collective, piece_bytes: int) -> None:
        self.spent_s = 0.0
        self._collective = collective
        self._samples = 0
        self._pieces: list[list[Tensor]] = []
        room = 0
        for tensor in tensors:
            if not self._pieces or tensor.numel() > room:
                self._pieces.append([])
                room = piece_bytes // 4
            self._pieces[-1].append(tensor.detach())
            room -= tensor.numel()
        longest = max((sum(t.numel() for t in piece) for piece in self._pieces), default=0)
        self._buffer = collective.allocate(max(1, longest))

    def saw(self, samples: int) -> None:
        """Count a step that this replica has made by itself, with so many samples or none."""
        self._samples += samples

    @torch.no_grad()
    def average(self) -> bool:
        """Give all replicas the same tensors, to the bit.  False where none has made a step since."""
        began = time.perf_counter()
        samples = torch.tensor([float(self._samples)], device=self._buffer.device)
        self._collective.sum_(samples, Wire.FP32)
        total = float(samples)
        if total == 0:
            return False
        for piece in self._pieces:
            views = []
            begin = 0
            for tensor in piece:
                views.append(self._buffer[begin : begin + tensor.numel()].view(tensor.shape))
                begin += tensor.numel()
            for view, tensor in zip(views, piece, strict=True):
                view.copy_(tensor).mul_(self._samples / total)
            self._collective.sum_(self._buffer[:begin], Wire.FP32)
            for view, tensor in zip(views, piece, strict=True):
                tensor.copy_(view)
        self._samples = 0
        self.spent_s += time.perf_counter() - began
        return True
