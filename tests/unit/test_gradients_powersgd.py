"""Gradients as products of thin matrices: exact where they are of that rank, and made up for elsewhere."""

import copy
import math

import pytest
import torch
from reducers import CPU, Recorded, assert_same, gradients
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.gradients.bucket_sum import WholeSum
from hpc_train.gradients.powersgd import PowerSGD, PowerSGDSum, first_basis, is_thinned
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid

RANKS = 2


def wide():
    """Two equal matrices and a third that are thinned at rank 2, a convolution's, and what travels whole."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 12, 3, bias=False).to(memory_format=torch.channels_last)
    return nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(10, 24), nn.Linear(3, 2), conv])


THINNED = {"0.weight", "1.weight", "2.weight", "4.weight"}


class Summing:
    """One rank's model, whose gradients are drawn from the step and the rank and summed."""

    def __init__(self, world, method, make=wide, bucket_bytes=2**20, **options):
        self.world = world
        self.model = copy.deepcopy(make())
        self.collective = Recorded(world.collective(Grid(world.size, 1), CPU))
        self.reducer = Reducer(
            list(self.model.named_parameters()), self.collective, method, bucket_bytes, **options
        )

    def step(self, number, rank=None, poison=None):
        """Gradients of that rank, or random ones."""
        self.reducer.begin(1)
        for index, (name, p) in enumerate(self.model.named_parameters()):
            p.grad = drawn(p, index, number, self.world.rank, rank)
            if name == poison and self.world.rank == 1:
                p.grad.view(-1)[3] = math.inf
        self.reducer.finish()
        return gradients(self.model)

    def steps(self, numbers, **options):
        return [self.step(number, **options) for number in numbers]


def drawn(parameter, index, step, rank, matrix_rank=None):
    generator = torch.Generator().manual_seed(1000 * step + 10 * index + rank)
    if matrix_rank is None or parameter.dim() < 2:
        return torch.randn(parameter.shape, generator=generator)
    # the replicas share the columns' space, so that their sum has that rank too
    columns = torch.randn(parameter.shape[0], matrix_rank, generator=torch.Generator().manual_seed(step))
    rows = torch.randn(matrix_rank, parameter[0].numel(), generator=generator)
    return (columns @ rows).view(parameter.shape)


def exact(steps, rank=None, num_ranks=RANKS):
    """The sum over steps and ranks, in fp64."""
    return {
        name: sum(drawn(p, i, s, r, rank).double() for s in steps for r in range(num_ranks))
        for i, (name, p) in enumerate(wide().named_parameters())
    }


def added(sums):
    return {name: sum(each[name].double() for each in sums) for name in sums[0]}


def on_ranks(body, *args, num_ranks=RANKS, hosts=None, **options):
    def on_one(world):
        summing = Summing(world, *args, **options)
        result = body(summing)
        summing.reducer.close()
        return result

    return run_ranks(num_ranks, on_one, timeout_s=60, hosts=hosts)


def distance(found, expected, names=None):
    names = names or expected
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in names)


@pytest.mark.parametrize(
    ("sides", "rank", "thinned"),
    [((16, 16), 2, True), ((8, 8), 4, False), ((1, 1000), 1, False), ((9, 9), 4, True), ((3, 2), 1, True)],
)
def test_what_gets_smaller_is_thinned(sides, rank, thinned):
    assert is_thinned(sides, rank) is thinned


@pytest.mark.parametrize("bucket_bytes", [2**8, 2**20])
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_of_that_rank_are_exact(overlap, bucket_bytes):
    method = PowerSGD(rank=2, warm_up_steps=0)
    results = on_ranks(lambda s: s.step(0, rank=2), method, overlap=overlap, bucket_bytes=bucket_bytes)
    for found in results:
        assert distance(found, exact([0], rank=2)) < 1e-5


def test_full_rank_gradients_are_approximated_and_vectors_are_not():
    found = on_ranks(lambda s: s.step(0), PowerSGD(rank=2, warm_up_steps=0))[0]
    for name, expected in exact([0]).items():
        assert (distance(found, {name: expected}) < 1e-6) is (name not in THINNED), name


def test_the_first_steps_are_whole():
    results = on_ranks(lambda s: s.steps(range(4)), PowerSGD(rank=2, warm_up_steps=3))
    for found in results:
        assert [distance(found[i], exact([i])) < 1e-6 for i in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("warm_up_steps", [0, 2])
@pytest.mark.parametrize("wire", list(Wire))
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_that_was_left_out_is_in_the_residual(wire, num_ranks, warm_up_steps):
    def body(summing):
        return added(summing.steps(range(8))), summing.reducer.settle()

    method = PowerSGD(rank=2, warm_up_steps=warm_up_steps, wire=wire)
    hosts = [0, 1, 1][:num_ranks]
    for sums, residual in on_ranks(body, method, num_ranks=num_ranks, hosts=hosts):
        whole = {name: sums[name] + residual[name] for name in sums}
        assert distance(whole, exact(range(8), num_ranks=num_ranks)) < 1e-5


def test_a_gradient_that_stays_is_known_better_at_every_step():
    """Power iteration goes on from the last step's Q, and the residual comes on top."""

    def body(summing):
        return [summing.step(0) for _ in range(60)]

    sums = on_ranks(body, PowerSGD(rank=2, warm_up_steps=0))[0]
    mean = {name: value / 60 for name, value in added(sums).items()}
    assert distance(mean, exact([0])) < 0.2 * distance(sums[0], exact([0]))


@pytest.mark.parametrize("wire", [Wire.FP32, Wire.INT8])
def test_all_ranks_end_with_the_same_bits(wire):
    results = on_ranks(
        lambda s: s.steps(range(4))[-1], PowerSGD(rank=2, warm_up_steps=1, wire=wire), num_ranks=3
    )
    assert_same(results[1:], results[0], rtol=0, atol=0)


def test_two_small_messages_travel_for_a_bucket():
    def body(summing):
        summing.step(0)
        summing.collective.sums.clear()
        summing.step(1)
        (bucket_sum,) = summing.reducer._sums
        threads = {thread for _, thread in summing.collective.sums}
        return len(summing.collective.sums), bucket_sum.lengths, threads

    def model():
        return nn.Linear(300, 200)

    results = on_ranks(body, PowerSGD(rank=2, warm_up_steps=1), make=model)
    # P, and Q with the bias; the bucket itself in the first step
    assert results == [(2, (200 * 2, 300 * 2 + 200, 300 * 200 + 208), {"gradient sums"})] * 2


@pytest.mark.parametrize("poison", ["0.weight", "0.bias", "3.weight"])
def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(poison):
    def body(summing):
        summing.steps(range(2))
        before = {name: basis.clone() for name, basis in summing.reducer.bases().items()}
        bad = summing.step(2, poison=poison)
        after = {name: basis.clone() for name, basis in summing.reducer.bases().items()}
        residual = summing.reducer.settle()
        return before, bad, after, residual

    def never_poisoned(summing):
        summing.steps(range(2))
        return summing.reducer.settle()

    method = PowerSGD(rank=2, warm_up_steps=0)
    undisturbed = on_ranks(never_poisoned, method)[0]
    for before, bad, after, residual in on_ranks(body, method):
        assert not any(value.isfinite().any() for value in bad.values())  # known to all, as one
        assert_same([after], before, rtol=0, atol=0)
        for name, value in undisturbed.items():
            differs = (residual[name] - value).abs() > 1e-5
            assert int(differs.sum()) <= (name == poison)  # what was owed there is lost beside an infinity
            assert residual[name].isfinite().all()


@pytest.mark.parametrize("warm_up_steps", [0, 5])
@pytest.mark.parametrize("wire", [Wire.FP32, Wire.INT8])
def test_a_resumed_run_goes_on_with_the_numbers_of_the_unbroken_one(wire, warm_up_steps):
    method = PowerSGD(rank=2, warm_up_steps=warm_up_steps, wire=wire)

    def unbroken(summing):
        summing.steps(range(3))
        state = summing.reducer.settle(), {n: b.clone() for n, b in summing.reducer.bases().items()}
        return state, summing.steps(range(3, 7))

    def resumed(summing):
        summing.reducer.resume(*state, steps=3)
        return summing.steps(range(3, 7))

    results = on_ranks(unbroken, method)
    state = results[0][0]
    assert state[1].keys() == THINNED
    for found in on_ranks(resumed, method):
        for mine, expected in zip(found, results[0][1], strict=True):
            assert_same([mine], expected, rtol=0, atol=0)


def test_another_number_of_replicas_and_other_buckets_take_the_state_over():
    method = PowerSGD(rank=2, warm_up_steps=0)

    def first(summing):
        sums = added(summing.steps(range(3)))
        return sums, summing.reducer.settle(), summing.reducer.bases()

    def then(summing):
        summing.reducer.resume(totals, bases, steps=3)
        assert_same([summing.reducer.bases()], bases, rtol=0, atol=0)
        return added(summing.steps(range(3, 6))), summing.reducer.settle()

    before, totals, bases = on_ranks(first, method)[0]
    after, left = on_ranks(then, method, num_ranks=3, bucket_bytes=2**9)[0]
    expected, more = exact(range(3)), exact(range(3, 6), num_ranks=3)
    whole = {name: before[name] + after[name] + left[name] for name in before}
    assert distance(whole, {name: expected[name] + more[name] for name in expected}) < 1e-5


def test_the_first_basis_is_the_parameters_own_on_any_grid():
    basis = first_basis(3, "layers.2.weight", 30, 4)
    torch.testing.assert_close(basis.T @ basis, torch.eye(4), rtol=0, atol=1e-6)
    assert basis.equal(first_basis(3, "layers.2.weight", 30, 4))
    assert not basis.equal(first_basis(3, "layers.3.weight", 30, 4))
    assert not basis.equal(first_basis(4, "layers.2.weight", 30, 4))


def test_after_gradients_of_zero_it_goes_on():
    def body(summing):
        for _ in range(2):
            summing.reducer.begin(0)
            summing.reducer.finish()
        return added([summing.step(0, rank=1) for _ in range(3)])

    found = on_ranks(body, PowerSGD(rank=2, warm_up_steps=0))[0]
    assert distance(found, {name: 3 * value for name, value in exact([0], rank=1).items()}) < 1e-5


def test_without_feedback_nothing_is_kept():
    def body(summing):
        summing.steps(range(3))
        return summing.reducer.settle(), summing.step(0, rank=2)

    for residual, found in on_ranks(body, PowerSGD(rank=2, warm_up_steps=0, feedback=False)):
        assert residual == {}
        assert distance(found, exact([0], rank=2)) < 1e-5


def test_a_bucket_without_such_matrices_travels_whole():
    def body(summing):
        kinds = [type(each) for each in summing.reducer._sums]
        return kinds, added(summing.steps(range(2)))

    results = on_ranks(body, PowerSGD(rank=2, warm_up_steps=0), bucket_bytes=2**6)
    kinds, sums = results[0]
    assert set(kinds) == {WholeSum, PowerSGDSum}
    assert distance(sums, exact(range(2)), set(sums) - THINNED) < 1e-6


def test_training_reaches_the_minimum_that_whole_gradients_reach():
    """Least squares with gradients of rank 8, of which each step sends rank 1."""

    torch.manual_seed(0)  # not in the ranks, which are threads
    x, truth = torch.randn(64, 8), torch.randn(8, 8)
    start = nn.Linear(8, 8, bias=False)

    def train(world, method):
        model = copy.deepcopy(start)
        reducer = Reducer(list(model.named_parameters()), world.collective(Grid(2, 1), CPU), method)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mine = slice(32 * world.rank, 32 * world.rank + 32)
        for _ in range(200):
            reducer.begin(1)
            ((model(x[mine]) - x[mine] @ truth).square().sum() / 64).backward()
            reducer.finish()
            optimizer.step()
        reducer.close()
        return float((model.weight.detach().T - truth).norm() / truth.norm())

    assert max(run_ranks(2, lambda world: train(world, PowerSGD(1, 0)), timeout_s=60)) < 1e-3
