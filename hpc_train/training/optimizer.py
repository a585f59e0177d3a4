"""The update rule of a stage's parameters, and the learning rate over the steps."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpc_train.config import OptimizerSettings


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Torch's own optimizer for these parameters, or None where there is nothing to train.

    Weight decay applies to matrices only: biases and norms have one dimension.
    """
    trained = [p for p in parameters if p.requires_grad]
    return optimizer_of(settings, [p for p in trained if decays(p)], [p for p in trained if not decays(p)])


def decays(parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on it."""
    return parameter.dim() > 1


def optimizer_of(
    settings: OptimizerSettings, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The same for parameters that were told apart already: `others` do not decay."""
    groups: list[dict[str, Any]] = [
        {"params": list(matrices), "weight_decay": settings.weight_decay},
        {"params": list(others), "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)


def learning_rate(settings: OptimizerSettings, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then half a cosine or constant.

    The cosine is that of SGDR without restarts (arXiv 1608.03983).
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    if settings.decay == "constant":
        return settings.learning_rate
    done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    span = settings.learning_rate - settings.final_learning_rate
    return settings.final_learning_rate + span * (1 + math.cos(math.pi * min(1.0, done))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
