"""Error feedback: what a lossy sum leaves out of a bucket is kept, and added to the bucket's next sum.

    step    gradient + residual    travels rounded    the rest is the new residual
    1        0.30                   0.25               0.05
    2        0.30 + 0.05            0.25               0.10
    3        0.30 + 0.10            0.50              -0.10       on average all of it has travelled

So that rounding delays parts of gradients, and loses none (arXiv 1901.09847).
"""

import torch
from torch import Tensor

from hpc_train.comm.interface import Collective, Wire


class Residual:
    """The residual of one bucket on this replica.

    `values`: fp32, [elements], laid out as the bucket's buffer, in memory that costs nothing before it is
    written to.  Only their sum over the replicas has a meaning, and that is what a checkpoint keeps.
    """

    def __init__(self, buffer: Tensor, collective: Collective) -> None:
        self.values = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        self._collective = collective
        self._dealt = False

    def bring_in(self, buffer: Tensor) -> Tensor:
        """The values for `Collective.sum_`, which alone knows on which replica it wants each of them.

        What was dealt out evenly is therefore added to the gradient, this once.
        """
        if self._dealt:
            buffer += self.values
            self.values.zero_()
            self._dealt = False
        return self.values

    def drop_not_finite(self) -> None:
        """After a sum: what an infinite gradient has left here must not be in the sums of all later steps."""
        if not bool(self.values.sum().isfinite()):
            self.values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def settle(self) -> Tensor:
        """The sum over the replicas, [elements], of which each replica then holds an equal part.

        From there a run goes on with the same numbers as one that gets this sum from a checkpoint.
        All replicas together.
        """
        self._collective.sum_(self.values, Wire.FP32)
        total = self.values.clone()
        self.deal(total)
        return total

    def deal(self, total: Tensor) -> None:
        """Take this replica's equal part of `total`, [elements], the same on all replicas."""
        self.values.copy_(total).div_(self._collective.size)
        self._dealt = True
