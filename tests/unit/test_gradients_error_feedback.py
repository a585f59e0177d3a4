"""What a lossy wire leaves out of one sum is in the next ones."""

import copy
import math

import pytest
import torch
from reducers import CPU, assert_same, build, gradients, plain
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.gradients.bucket_sum import Whole
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid


class Summing:
    """One rank's model, whose gradients are drawn from the step and the rank and summed."""

    def __init__(self, world, method, make=plain, bucket_bytes=2**10):
        self.world = world
        self.model = copy.deepcopy(build(make))
        self.reducer = Reducer(
            list(self.model.named_parameters()),
            world.collective(Grid(world.size, 1), CPU),
            method,
            bucket_bytes,
        )

    def step(self, number, poison=0.0):
        self.reducer.begin(1)
        for index, (_, p) in enumerate(self.model.named_parameters()):
            p.grad = drawn(p, index, number, self.world.rank)
        if poison:
            self.model[0].weight.grad[0, 0] = poison
        self.reducer.finish()
        return gradients(self.model)

    def steps(self, numbers):
        return [self.step(number) for number in numbers]


def drawn(parameter, index, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    return torch.randn(parameter.shape, generator=generator) * 10.0 ** (index % 3)


def exact(model, steps, num_ranks):
    """The sum over steps and ranks, in fp64."""
    return {
        name: sum(drawn(p, i, s, r).double() for s in steps for r in range(num_ranks))
        for i, (name, p) in enumerate(model.named_parameters())
    }


def added(sums):
    return {name: sum(each[name].double() for each in sums) for name in sums[0]}


def on_ranks(num_ranks, body, *args, hosts=None, **options):
    def on_one(world):
        summing = Summing(world, *args, **options)
        result = body(summing)
        summing.reducer.close()
        return result

    return run_ranks(num_ranks, on_one, timeout_s=60, hosts=hosts)


def distance(found, expected):
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def flat(tensors):
    return torch.cat([value.double().flatten() for value in tensors.values()])


LOSSY = [Wire.INT8, Wire.FP16, Wire.BF16]


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("hosts", [None, [0, 0, 1]])
def test_all_that_was_left_out_is_in_the_residual(wire, hosts):
    """The sums of all steps and the residual's total make up the gradients, but for fp32's rounding."""
    steps = range(10)

    def body(summing):
        sums = summing.steps(steps)
        return added(sums), summing.reducer.settle()

    for sums, residual in on_ranks(3, body, Whole(wire, feedback=True), hosts=hosts):
        assert any(bool(value.any()) for value in residual.values())
        whole = {name: sums[name] + residual[name] for name in sums}
        assert distance(whole, exact(build(plain), steps, 3)) < 1e-5


def test_without_feedback_the_same_rounding_adds_up():
    """Equal gradients at every step are rounded equally: fifty times the loss of one."""

    def body(summing):
        return added([summing.step(0) for _ in range(50)])

    def off(feedback):
        found = on_ranks(2, body, Whole(Wire.INT8, feedback))[0]
        return distance(found, {k: 50 * v for k, v in exact(build(plain), [0], 2).items()})

    assert off(feedback=True) < off(feedback=False) / 10


def test_all_ranks_end_with_the_same_bits():
    first, *others = on_ranks(3, lambda summing: summing.steps(range(4))[-1], Whole(Wire.INT8, feedback=True))
    assert_same(others, first, rtol=0, atol=0)


@pytest.mark.parametrize("hosts", [None, [0, 1, 1]])
def test_a_resumed_run_goes_on_with_the_numbers_of_the_unbroken_one(hosts):
    method = Whole(Wire.INT8, feedback=True)

    def unbroken(summing):
        summing.steps(range(3))
        return summing.reducer.settle(), summing.steps(range(3, 6))

    def resumed(summing):
        summing.reducer.resume(totals, {}, steps=3)
        return summing.steps(range(3, 6))

    results = on_ranks(3, unbroken, method, hosts=hosts)
    totals = results[0][0]
    for (_, expected), found in zip(results, on_ranks(3, resumed, method, hosts=hosts), strict=True):
        assert_same([found[i] for i in range(3)][-1:], expected[-1], rtol=0, atol=0)
        assert_same(found[:1], expected[0], rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_another_number_of_replicas_takes_the_residual_over(num_ranks):
    """Nothing is lost, and nothing comes twice: sums and residual still make up the gradients."""
    method = Whole(Wire.INT8, feedback=True)

    def first(summing):
        return added(summing.steps(range(3))), summing.reducer.settle()

    def then(summing):
        summing.reducer.resume(totals, {}, steps=3)
        return added(summing.steps(range(3, 6))), summing.reducer.settle()

    before, totals = on_ranks(3, first, method, bucket_bytes=2**9)[0]
    after, left = on_ranks(num_ranks, then, method)[0]
    if num_ranks == 1:  # a sum of one leaves nothing out: all was paid with the first gradient
        assert not left
        left = {name: 0.0 for name in before}
    expected = exact(build(plain), range(3), 3)
    more = exact(build(plain), range(3, 6), num_ranks)
    whole = {name: before[name] + after[name] + left[name] for name in before}
    assert distance(whole, {name: expected[name] + more[name] for name in expected}) < 1e-5


def test_settling_does_not_change_the_total():
    def body(summing):
        summing.steps(range(3))
        return summing.reducer.settle(), summing.reducer.settle()

    first, second = on_ranks(3, body, Whole(Wire.INT8, feedback=True))[0]
    assert_same([second], first, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_gone_with_the_step(wire, poison):
    def body(summing):
        summing.step(0)
        bad = summing.step(1, poison if summing.world.rank == 1 else 0.0)
        summing.steps(range(2, 5))
        return bad, summing.step(5), summing.reducer.settle()

    for bad, good, residual in on_ranks(2, body, Whole(wire, feedback=True)):
        assert not bad["0.weight"].isfinite().all()
        assert all(value.isfinite().all() for value in (*good.values(), *residual.values()))
        # all together: what is small beside the largest of its block is rounded to nothing, step by step
        expected = exact(build(plain), [5], 2)
        assert distance({"all": flat(good)}, {"all": flat(expected)}) < 0.05


def test_there_is_no_residual_where_nothing_is_lost():
    for method in (Whole(Wire.FP32, feedback=True), Whole(Wire.INT8)):
        assert not method.error_feedback
        assert on_ranks(2, lambda s: (s.step(0), s.reducer.settle())[1], method) == [{}, {}]


def test_shards_have_residuals_too():
    """Only a replica's own shard is a sum, and it with its residual makes up the gradients."""

    def make():
        return nn.Sequential(nn.Linear(64, 64))

    def body(summing):
        sums = summing.steps(range(5))
        (bucket,) = summing.reducer.buckets
        shard = summing.reducer._sums[0]._sum.__self__.shard(bucket.buffer.numel())
        sent_and_owed = torch.zeros(bucket.buffer.numel(), dtype=torch.float64)
        totals = summing.reducer.settle()
        for slot in bucket.slots:
            slot.flat(sent_and_owed).copy_((added(sums)[slot.name] + totals[slot.name]).flatten())
        return shard, sent_and_owed

    results = on_ranks(2, body, Whole(Wire.INT8, feedback=True, sharded=True), make=make, bucket_bytes=2**20)
    expected = exact(build(make), range(5), 2)
    whole = torch.cat([expected["0.bias"].flatten(), expected["0.weight"].flatten()])
    for shard, found in results:
        torch.testing.assert_close(found[shard], whole[shard], rtol=1e-5, atol=1e-4)


def test_replicas_that_disagree_about_feedback_are_refused():
    def body(world):
        with pytest.raises(UserError, match="int8 wire"):
            Summing(world, Whole(Wire.INT8, feedback=world.rank == 0))

    run_ranks(2, body, timeout_s=30)
