"""Error feedback: what a lossy sum leaves out of a bucket is kept, and added to the bucket's next sum.

    step    gradient + residual    travels rounded    the rest is the new residual
    1        0.30                   0.25               0.05
    2        0.30 + 0.05            0.25               0.10
    3        0.30 + 0.10            0.50              -0.10       on average all of it has travelled

So that rounding delays parts of gradients, and loses none (arXiv 1901.09847).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

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

    def drop(self) -> None:
        """Owe nothing any more."""
        self.values.zero_()
        self._dealt = False

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


class Owed:
    """What earlier sums have left out, where today's keep no residual: added to one gradient, whole.

    `values`: by parameter, the total over the replicas, the same on all of them.
    """

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self._paid: dict[str, Tensor] = {}

    def take(self, totals: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Owe the totals of those among the parameters."""
        self.values = {
            name: total.to(parameters[name].device, torch.float32, copy=True)
            for name, total in totals.items()
            if name in parameters
        }

    @torch.no_grad()
    def pay(self, parameters: Mapping[str, nn.Parameter], divisor: int) -> None:
        """Add it to the gradients, which are sums over the replicas that were divided by `divisor`."""
        for name, total in self.values.items():
            gradient = parameters[name].grad
            assert gradient is not None
            gradient.add_(total, alpha=1 / divisor)
        self.values, self._paid = {}, self.values

    def take_back(self) -> None:
        """Owe again what was last paid: nothing was done with it."""
        self.values, self._paid = self._paid, {}
