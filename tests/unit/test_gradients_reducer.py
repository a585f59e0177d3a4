"""Gradient sums beside backward, against one process with all samples."""

import copy
import threading
import warnings

import pytest
import torch
from reducers import (
    CPU,
    MODELS,
    Branching,
    Recorded,
    alone,
    assert_same,
    backward,
    build,
    conv,
    gradients,
    plain,
    samples,
    summed,
)
from torch import nn

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.gradients.bucket_sum import Whole
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [64, 2**20])
@pytest.mark.parametrize("make", MODELS)
def test_sums_are_those_of_one_process(make, bucket_bytes, overlap):
    model = build(make)
    batches = list(samples(12).split(2))
    shares = [batches[:2], batches[2:4], batches[4:]]
    ranks = summed(model, shares, steps=2, bucket_bytes=bucket_bytes, overlap=overlap)
    # fp32 sums in another order; fp64 gradients travel as fp32
    assert_same(ranks, alone(model, batches), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("passes", [(3, 1), (1, 3), (4, 0), (0, 4), (0, 0)])
def test_shares_may_differ_and_be_zero(make, passes):
    model = build(make)
    batches = list(samples(2 * sum(passes)).split(2)) if sum(passes) else []
    shares = [batches[: passes[0]], batches[passes[0] :]]
    assert_same(summed(model, shares, steps=2), alone(model, batches), rtol=1e-5, atol=1e-5)


def test_all_ranks_end_with_the_same_bits():
    first, *others = summed(build(plain), list(samples(12).view(3, 2, 2, 6)), method=Whole(Wire.FP16))
    assert_same(others, first, rtol=0, atol=0)


def test_fp16_wire_rounds_by_its_eleven_bits():
    model = build(plain)
    batches = list(samples(12).split(2))
    shares = [batches[:3], batches[3:]]
    found = summed(model, shares, method=Whole(Wire.FP16), bucket_bytes=2**20)[0]
    expected = alone(model, batches)
    contributions = [alone(model, share) for share in shares]
    worst = 0.0
    for name, exact in expected.items():
        # each contribution is rounded once, and the sum once, by half of 2^-10 of its value
        bound = 2**-11 * (sum(c[name].abs() for c in contributions) + exact.abs()) * 1.01 + 1e-6
        assert ((found[name] - exact).abs() <= bound).all()
        worst = max(worst, float(((found[name] - exact).abs() / bound).max()))
    assert worst > 0.1  # it did travel in 16 bits


def test_channels_last_gradients_keep_their_layout():
    """A gradient with other strides than its parameter makes torch warn, and work slower."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in summed(build(conv), list(samples(8).view(2, 2, 2, 6)), steps=2):
            assert found["1.weight"].is_contiguous(memory_format=torch.channels_last)


def test_buckets_are_summed_while_backward_still_runs():
    """Backward of the first layer waits here until the bucket of the last layer is summed."""

    def body(world):
        model = copy.deepcopy(original)
        done = threading.Event()
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        sum_ = collective.sum_

        def sum_and_tell(buffer, wire, residual=None):
            sum_(buffer, wire, residual)
            done.set()

        collective.sum_ = sum_and_tell
        reducer = Reducer(list(model.named_parameters()), collective, bucket_bytes=64)
        seen = []
        model[0].register_full_backward_hook(lambda *_: seen.append(done.wait(20)))
        reducer.begin(1)
        backward(model, samples(2).requires_grad_())
        reducer.finish()
        reducer.close()
        return seen, {name for _, name in collective.sums}

    original = build(plain)
    assert run_ranks(2, body, timeout_s=60) == [([True], {"gradient sums"})] * 2


def test_without_a_thread_the_main_one_sums():
    collectives = []

    def wrap(collective):
        collectives.append(Recorded(collective, threaded=False))
        return collectives[-1]

    model = build(plain)
    batches = list(samples(4).split(2))
    ranks = summed(model, [batches[:1], batches[1:]], wrap=wrap)
    assert_same(ranks, alone(model, batches), rtol=1e-5, atol=1e-6)
    assert {name for c in collectives for _, name in c.sums} == {"rank 0", "rank 1"}


@pytest.mark.parametrize("overlap", [True, False])
def test_the_order_is_fixed_whatever_backward_meets_first(overlap):
    """Rank 0 uses layer a then b, rank 1 the other way round: their backward passes do the same."""

    def body(world):
        layers = {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        named = [(f"{n}.{k}", p) for n, layer in layers.items() for k, p in layer.named_parameters()]
        reducer = Reducer(named, collective, bucket_bytes=256, overlap=overlap)
        order = "ab" if world.rank == 0 else "ba"
        for _ in range(3):
            reducer.begin(1)
            x = samples(2)
            for name in order:
                x = layers[name](x)
            x.sum().backward()
            reducer.finish()
        reducer.close()
        buffers = [bucket.buffer.data_ptr() for bucket in reducer.buckets]
        return len(buffers), [buffers.index(pointer) for pointer, _ in collective.sums]

    assert run_ranks(2, body, timeout_s=30) == [(2, [0, 1] * 3)] * 2


def test_a_parameter_without_gradient_is_told_once_and_counts_as_zero():
    """horovod#564: a branch that one rank does not take made all ranks wait for ever."""
    model = build(Branching)
    taken = next(x for x in samples(50).split(1) if model.first(x)[0, 0] > 0)
    not_taken = next(x for x in samples(50).split(1) if model.first(x)[0, 0] <= 0)
    with pytest.warns(UserWarning, match=r"sometimes\.weight, sometimes\.bias in .* of replica 1") as told:
        ranks = summed(model, [[taken], [not_taken]], steps=3)
    assert len(told) == 1
    assert_same(ranks, alone(model, [taken, not_taken]), rtol=1e-5, atol=1e-6)


def test_a_rank_without_passes_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        summed(build(plain), [[samples(2)], []])


@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_that_somebody_else_made_are_taken(overlap):
    """zero_grad() drops the views, and hooks of users put gradients of their own in their place."""
    model = build(plain)

    def body(world):
        mine = copy.deepcopy(model)
        collective = world.collective(Grid(2, 1), CPU)
        reducer = Reducer(list(mine.named_parameters()), collective, bucket_bytes=64, overlap=overlap)
        for _ in range(2):
            reducer.begin(2)
            backward(mine, samples(2))
            mine.zero_grad(set_to_none=True)  # drops the first pass
            mine[0].weight.grad = torch.ones_like(mine[0].weight)
            backward(mine, samples(2))
            reducer.finish()
        reducer.close()
        return gradients(mine)

    expected = {name: 2 * g for name, g in alone(model, [samples(2)]).items()}
    expected["0.weight"] += 2
    assert_same(run_ranks(2, body, timeout_s=30), expected, rtol=1e-5, atol=1e-6)
