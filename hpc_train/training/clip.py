"""One gradient norm over all stages, and clipping by it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """The sum of squares of all elements; infinite or NaN when one of them is.

    Added in fp64: over hundreds of tensors fp32 would lose digits.
    """
    if not gradients:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    return float(norms.double().square().sum())


def clip_(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients so that their global `norm` is at most `limit`; 0 is no limit.

    As in arXiv 1211.5063 and torch.nn.utils.clip_grad_norm_, whose 1e-6 keeps a zero norm harmless.
    """
    if gradients and 0 < limit < norm and math.isfinite(norm):
        torch._foreach_mul_(list(gradients), limit / (norm + 1e-6))
