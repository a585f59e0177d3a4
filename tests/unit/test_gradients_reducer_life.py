"""The reducer beyond a plain step: mistakes, lost peers, closing, and what it costs."""

import copy
import threading

import pytest
import torch
from reducers import CPU, Recorded, alone, assert_same, backward, build, gradients, plain, samples, summed
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import PeerLost, UserError
from hpc_train.gradients.reducer import Reducer
from hpc_train.grid import Grid


def test_more_passes_than_expected_raise_instead_of_spoiling_the_sum():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        backward(mine, samples(2))
        with pytest.raises(RuntimeError, match=r"4\.bias, 4\.weight.* had more gradients than the 1 passes"):
            reducer.finish()
        reducer.finish()  # the sum itself is whole
        reducer.close()
        return gradients(mine)

    model = build(plain)
    assert_same(run_ranks(2, body, timeout_s=30), alone(model, [samples(2)] * 2), rtol=1e-5, atol=1e-6)


def test_late_gradients_are_added_by_a_second_round():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU), bucket_bytes=64)
        reducer.begin(1)
        for _ in range(1 + 2 * world.rank):
            backward(mine, samples(2))
        late = reducer.take_late()
        reducer.finish()
        reducer.add_late(late)
        reducer.close()
        return len(late), gradients(mine)

    model = build(plain)
    (none, first), (all_of_them, second) = run_ranks(2, body, timeout_s=30)
    assert (none, all_of_them) == (0, 6)
    assert_same([first, second], alone(model, [samples(2)] * 4), rtol=1e-5, atol=1e-5)


def test_a_lost_peer_is_raised_by_finish_and_close_still_ends():
    def body(world):
        def fail():
            raise PeerLost([1], "sum")

        mine = copy.deepcopy(model)
        reducer = Reducer(
            list(mine.named_parameters()), Recorded(world.collective(Grid(2, 1), CPU), on_sum=fail)
        )
        reducer.begin(1)
        backward(mine, samples(2))
        with pytest.raises(PeerLost, match="lost rank 1 during sum"):
            reducer.finish()
        reducer.close()

    model = build(plain)
    run_ranks(2, body, timeout_s=30)


def test_no_thread_and_no_hook_is_left_after_close():
    before = set(threading.enumerate())
    started = []

    def body(world):
        reducer = Reducer(list(models[world.rank].named_parameters()), world.collective(Grid(2, 1), CPU))
        new = set(threading.enumerate()) - before
        started.append(sum(t.name == "gradient sums" for t in new))
        world.control.barrier()
        reducer.close()
        reducer.close()

    models = [build(plain), build(plain)]
    run_ranks(2, body, timeout_s=30)
    assert max(started) == 2
    assert {t for t in threading.enumerate() if t.name == "gradient sums"} <= before
    for model in models:
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_closed_reducer_leaves_backward_alone():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        mine.zero_grad()
        backward(mine, samples(2))
        return gradients(mine)

    model = build(plain)
    assert_same(run_ranks(2, body, timeout_s=30), alone(model, [samples(2)]), rtol=0, atol=0)


def test_one_replica_costs_neither_thread_nor_hook_nor_copy():
    model = build(plain)
    before = set(threading.enumerate())

    def body(world):
        reducer = Reducer(list(model.named_parameters()), world.collective(Grid(1, 1), CPU))
        assert not reducer.buckets
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not {t for t in set(threading.enumerate()) - before if t.name == "gradient sums"}
        for passes in (2, 0):
            reducer.begin(passes)
            for _ in range(passes):
                backward(model, samples(2))
            reducer.finish()
            assert_same([gradients(model)], alone(original, [samples(2)] * passes), rtol=0, atol=0)

    original = copy.deepcopy(model)
    run_ranks(1, body, timeout_s=30)


def test_replicas_with_different_models_are_refused():
    """Their sums would mix what does not belong together, or wait for ever."""

    def body(world):
        model = nn.Linear(4, 3 + world.rank)
        with pytest.raises(UserError, match="replicas train different parameters"):
            Reducer(list(model.named_parameters()), world.collective(Grid(2, 1), CPU))

    run_ranks(2, body, timeout_s=30)


def test_a_stage_without_trained_parameters_has_nothing_to_do():
    def body(world):
        reducer = Reducer([], world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        reducer.finish()
        reducer.close()

    run_ranks(2, body, timeout_s=30)


def test_a_step_cannot_begin_before_the_last_one_is_finished():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(0)
        with pytest.raises(RuntimeError, match=r"call finish\(\) before"):
            reducer.begin(1)
        reducer.finish()
        reducer.begin(1)
        reducer.finish()
        reducer.close()

    model = build(plain)
    run_ranks(2, body, timeout_s=30)


def test_backward_between_steps_starts_no_sum():
    def body(world):
        mine = copy.deepcopy(model)
        collective = Recorded(world.collective(Grid(2, 1), CPU))
        reducer = Reducer(list(mine.named_parameters()), collective)
        reducer.begin(1)
        backward(mine, samples(2) if world.rank else [])
        reducer.finish()
        if world.rank == 0:
            backward(mine, samples(2))
        assert not reducer.under_way
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        return len(collective.sums), gradients(mine)

    model = build(plain)
    results = run_ranks(2, body, timeout_s=30)
    assert [n for n, _ in results] == [2, 2]
    assert_same([g for _, g in results], alone(model, [samples(2)] * 2), rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_is_exact():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = plain()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    model = build(Checkpointed)
    batches = list(samples(8).split(2))
    assert_same(summed(model, [batches[:2], batches[2:]]), alone(model, batches), rtol=1e-5, atol=1e-6)


def test_times_of_a_step_are_known():
    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(list(mine.named_parameters()), world.collective(Grid(2, 1), CPU))
        reducer.begin(1)
        backward(mine, samples(2))
        reducer.finish()
        reducer.close()
        return reducer.summed_s, reducer.exposed_s

    model = build(plain)
    for summed_s, exposed_s in run_ranks(2, body, timeout_s=30):
        assert summed_s > 0
        assert exposed_s > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("side", [False, True])
def test_sums_follow_kernels_on_a_gpu(side):
    model = build(plain).cuda()
    batches = list(samples(8).cuda().split(2))

    def body(world):
        mine = copy.deepcopy(model)
        reducer = Reducer(
            list(mine.named_parameters()),
            world.collective(Grid(2, 1), torch.device("cuda", 0)),
            bucket_bytes=64,
        )
        with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
            for _ in range(5):
                reducer.begin(2)
                for batch in batches[2 * world.rank : 2 * world.rank + 2]:
                    backward(mine, batch)
                reducer.finish()
            result = gradients(mine)
            torch.cuda.synchronize()
        reducer.close()
        return result

    assert_same(run_ranks(2, body, timeout_s=60), alone(model, batches), rtol=1e-5, atol=1e-6)
