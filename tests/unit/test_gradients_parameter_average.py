"""The mean of parameters, weighted by the samples that replicas have seen."""

import pytest
import torch
from reducers import CPU

from hpc_train.comm.loopback import run_ranks
from hpc_train.gradients.parameter_average import ParameterAverage
from hpc_train.grid import Grid


def averaged(samples, make, piece_bytes=64, rounds=1, hosts=None):
    """Each rank's tensors after `rounds` averages; `make(rank)` gives them."""

    def body(world):
        tensors = make(world.rank)
        average = ParameterAverage(tensors, world.collective(Grid(world.size, 1), CPU), piece_bytes)
        for _ in range(rounds):
            average.saw(samples[world.rank])
            done = average.average()
        return tensors, done, average.spent_s

    return run_ranks(len(samples), body, timeout_s=30, hosts=hosts)


def tensors(rank):
    generator = torch.Generator().manual_seed(rank)
    channels_last = torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last)
    return [torch.randn(40, generator=generator), channels_last, torch.tensor(float(rank)), torch.ones(0)]


@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
@pytest.mark.parametrize("piece_bytes", [4, 2**20])
@pytest.mark.parametrize("samples", [(5, 5, 5), (1, 2, 7), (0, 3, 1)])
def test_replicas_count_by_their_samples(samples, piece_bytes, hosts):
    results = averaged(samples, tensors, piece_bytes, hosts=hosts)
    for i in range(3):
        expected = sum(n * tensors(rank)[i].double() for rank, n in enumerate(samples)) / sum(samples)
        for found, done, spent_s in results:
            assert done
            assert spent_s > 0
            assert found[i].equal(results[0][0][i])  # the same bits
            assert found[i].stride() == tensors(0)[i].stride()
            torch.testing.assert_close(found[i].double(), expected, rtol=1e-5, atol=1e-6)


def test_without_steps_nothing_is_averaged():
    for rank, (found, done, _) in enumerate(averaged((0, 0), tensors)):
        assert not done
        assert all(a.equal(b) for a, b in zip(found, tensors(rank), strict=True))


def test_one_replica_that_made_all_steps_gives_all():
    for found, _, _ in averaged((0, 4), tensors):
        assert all(a.equal(b) for a, b in zip(found, tensors(1), strict=True))


def test_samples_count_from_the_last_mean_on():
    def body(world):
        tensor = torch.zeros(1)
        average = ParameterAverage([tensor], world.collective(Grid(2, 1), CPU), 64)
        average.saw([1, 3][world.rank])
        average.saw(0)
        average.average()
        tensor += world.rank  # rank 1 goes on alone
        average.saw([1, 1][world.rank])
        average.average()
        return float(tensor)

    assert run_ranks(2, body, timeout_s=30) == [0.5, 0.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_keep_theirs(dtype):
    for found, _, _ in averaged((1, 1), lambda rank: [torch.full((3,), float(rank), dtype=dtype)]):
        assert found[0].dtype == dtype
        assert found[0].tolist() == [0.5] * 3


def test_nothing_to_average_is_fine():
    assert averaged((1, 1), lambda rank: [])[0][:2] == ([], True)
