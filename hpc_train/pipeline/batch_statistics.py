"""BatchNorm's running statistics over a whole batch, however it was cut into micro-batches and replicas.

In training a BatchNorm layer normalises each micro-batch by that micro-batch's own mean and
variance, and its results depend on `batch.micro_batch`, as they do with gradient accumulation in
plain PyTorch. What evaluation uses, the running statistics, do not: they are updated once a batch,
from the mean and variance of all its samples (as torchgpipe's DeferredBatchNorm; over replicas too).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpc_train.comm.interface import Collective, Wire


@dataclass
class _Layer:
    """Running statistics before the batch, and sums over the micro-batches seen: fp64, [features]."""

    mean: Tensor
    var: Tensor
    batches: int
    momentum: float | None
    count: float
    sums: Tensor
    squares: Tensor

    def around(self, mean: Tensor) -> Tensor:
        """The sum of squared distances from `mean`."""
        return self.squares - 2 * mean * self.sums + self.count * mean.square()


class BatchStatistics:
    """Collects the statistics of all BatchNorm layers of a module while it runs.

    During a batch a layer's momentum is 1, so that torch leaves there what one micro-batch has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._seen: dict[_BatchNorm, _Layer] = {}
        self.paused = False  # while activations are computed a second time
        for layer in self._modules:
            layer.register_forward_pre_hook(self._before)
            layer.register_forward_hook(self._after)

    def _before(self, module: _BatchNorm, args: Any) -> None:
        if module.training and module not in self._seen:
            self._open(module)

    def _open(self, module: _BatchNorm) -> None:
        mean, var, batches = _statistics(module)
        zeros = torch.zeros_like(mean, dtype=torch.float64)
        self._seen[module] = _Layer(
            *(mean.clone(), var.clone(), int(batches), module.momentum, 0.0, zeros, zeros.clone())
        )
        module.momentum = 1.0

    def _after(self, module: _BatchNorm, args: Any, output: Tensor) -> None:
        if not module.training or self.paused:
            return
        mean, var, _ = _statistics(module)
        seen, count, mean = self._seen[module], output.numel() // output.shape[1], mean.double()
        seen.count += count
        seen.sums += count * mean
        seen.squares += count * mean.square() + (count - 1) * var.double()

    def finish(self, collective: Collective, keep: bool = True) -> None:
        """Update the running statistics from what all replicas have seen.  All replicas together.

        `keep`: False leaves them as they were before the batch.
        """
        for module in self._modules:
            if module not in self._seen:  # a replica without samples
                self._open(module)
        layers = [self._seen.pop(module) for module in self._modules]
        if not layers:
            return
        totals = _sum([torch.cat([x.sums, x.sums.new_tensor([x.count])]) for x in layers], collective)
        means = [total[:-1] / max(1.0, float(total[-1])) for total in totals]
        spreads = _sum([x.around(mean) for x, mean in zip(layers, means, strict=True)], collective)
        for module, before, total, mean, spread in zip(
            self._modules, layers, totals, means, spreads, strict=True
        ):
            count = float(total[-1])
            saw = keep and count > 0
            batches = before.batches + saw
            share = 0.0
            if saw:
                share = 1 / batches if before.momentum is None else before.momentum
            running_mean, running_var, num_batches = _statistics(module)
            running_mean.copy_(before.mean).lerp_(mean.to(running_mean.dtype), share)
            running_var.copy_(before.var).lerp_((spread / max(1.0, count - 1)).to(running_var.dtype), share)
            num_batches.fill_(batches)
            module.momentum = before.momentum


def _statistics(module: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    mean, var, batches = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None
    assert var is not None
    assert batches is not None
    return mean, var, batches


def _sum(parts: Sequence[Tensor], collective: Collective) -> list[Tensor]:
    """The parts' sums over the replicas; they travel together, as fp32."""
    if collective.size == 1:
        return list(parts)
    buffer = torch.cat(list(parts)).float()
    collective.sum_(buffer, Wire.FP32)
    return list(torch.split(buffer.double(), [len(part) for part in parts]))
