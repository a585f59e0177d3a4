"""BatchNorm's running statistics are the whole batch's, however it is cut into micro-batches and replicas."""

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.grid import Grid
from hpc_train.pipeline.batch_statistics import BatchStatistics


def batch():
    return torch.randn(24, 3, 4, 4, generator=torch.Generator().manual_seed(2)) * 3 + 5


def running(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def after(cut, momentum=0.1, replicas=1, steps=2):
    """The running statistics after steps over the same batch, cut into micro-batches of these sizes."""

    def body(world):
        norm = nn.BatchNorm2d(3, momentum=momentum)
        statistics = BatchStatistics(norm)
        collective = world.collective(Grid(replicas, 1), torch.device("cpu"))
        for _ in range(steps):
            for part in batch().split(cut)[world.rank :: replicas]:
                norm(part)
            statistics.finish(collective)
        assert norm.momentum == momentum
        return running(norm)

    first, *others = run_ranks(replicas, body)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize(("cut", "replicas"), [([24], 1), ([5, 5, 5, 5, 4], 1), ([2] * 12, 3), ([24], 2)])
def test_statistics_of_the_whole_batch(cut, replicas, momentum):
    plain = nn.BatchNorm2d(3, momentum=momentum)
    for _ in range(2):
        plain(batch())
    torch.testing.assert_close(after(cut, momentum, replicas), running(plain), rtol=2e-6, atol=1e-6)


def test_a_step_that_is_skipped_leaves_no_trace():
    def body(world):
        norm = nn.BatchNorm2d(3)
        statistics, before = BatchStatistics(norm), running(norm)
        norm(batch())
        statistics.finish(world.collective(Grid(1, 1), torch.device("cpu")), keep=False)
        torch.testing.assert_close(running(norm), before, rtol=0, atol=0)

    run_ranks(1, body)


def test_evaluation_and_recomputation_count_for_nothing():
    def body(world):
        norm = nn.BatchNorm2d(3)
        statistics = BatchStatistics(norm)
        norm(batch())
        statistics.paused = True
        norm(torch.zeros(2, 3, 1, 1))
        statistics.paused = False
        statistics.finish(world.collective(Grid(1, 1), torch.device("cpu")))
        norm.eval()
        norm(batch())
        statistics.finish(world.collective(Grid(1, 1), torch.device("cpu")))
        return running(norm)

    (found,) = run_ranks(1, body)
    torch.testing.assert_close(found, after([24], steps=1))
