"""The optimizer for own loops over its life: groups, state, hooks, closing and mistakes."""

import copy
import warnings

import pytest
import torch
from optimizers import CPU, adamw, alone, assert_same, batch, on_ranks, sgd, train, two, wrapped

from hpc_train.errors import UserError
from hpc_train.gradients.distributed_optimizer import Compression, DistributedOptimizer
from hpc_train.grid import Grid


@pytest.fixture
def model():
    return two()


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_layers_that_are_unfrozen_later_are_averaged_from_their_first_step(model):
    def run(optimizer, mine, inputs):
        for step in range(4):
            mine.first.requires_grad_(step >= 1)
            mine.second.requires_grad_(step != 2)
            optimizer.zero_grad()
            inputs(step).backward()
            optimizer.step()

    def body(world, mine):
        mine.first.requires_grad_(False)
        optimizer = wrapped(world, mine, adamw)
        run(optimizer, mine, lambda step: mine(batch(step, world.rank)).square().sum())
        optimizer.close()

    ranks = on_ranks(2, model, body)

    def both(step):
        return sum(model(batch(step, rank)).square().sum() for rank in range(2)) / 2

    run(adamw(model.parameters()), model, both)
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_parameter_groups_and_one_that_joins_later(model):
    def groups(mine):
        return [{"params": mine.first.parameters()}, {"params": mine.unused.parameters(), "lr": 0.5}]

    def run(optimizer, mine, loss):
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": mine.second.parameters(), "lr": 0.02})
            mine.zero_grad()
            loss(step).backward()
            optimizer.step()

    def body(world, mine):
        collective = world.collective(Grid(2, 1), CPU)
        optimizer = DistributedOptimizer(torch.optim.SGD(groups(mine), lr=0.1), collective=collective)
        run(optimizer, mine, lambda step: mine(batch(step, world.rank)).square().sum())
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 0.02]
        optimizer.close()

    ranks = on_ranks(2, model, body)

    def both(step):
        return sum(model(batch(step, rank)).square().sum() for rank in range(2)) / 2

    run(torch.optim.SGD(groups(model), lr=0.1), model, both)
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_state_loads_with_or_without_the_wrapper(model):
    windows = [[[batch(s, r)] for r in range(2)] for s in range(4)]

    def body(world, mine):
        mine_only = [window[world.rank] for window in windows]
        optimizer = wrapped(world, mine)
        train(optimizer, mine, mine_only[:2])
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["momentum_buffer"].shape == (4, 4)
        optimizer.close()

        again = wrapped(world, mine)
        again.load_state_dict(state)
        assert again.state[mine.first.weight]["momentum_buffer"].equal(state["state"][0]["momentum_buffer"])
        sgd(mine.parameters()).load_state_dict(again.state_dict())
        train(again, mine, mine_only[2:])
        again.close()

    assert_same(on_ranks(2, model, body), alone(model, windows))


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_fp16_compression_is_close_and_alike_on_all_ranks(model):
    windows = [[[batch(s, r)] for r in range(3)] for s in range(3)]

    def body(world, mine):
        optimizer = wrapped(world, mine, compression=Compression.fp16)
        train(optimizer, mine, [window[world.rank] for window in windows])
        optimizer.close()

    first, *others = on_ranks(3, model, body)
    assert_same(others, first, rtol=0, atol=0)
    assert_same([first], alone(model, windows), rtol=5e-3, atol=5e-3)


def test_one_rank_is_the_plain_optimizer_to_the_bit(model):
    windows = [[[batch(s, 0)]] for s in range(3)]

    def body(world, mine):
        optimizer = wrapped(world, mine, adamw)
        train(optimizer, mine, [window[0] for window in windows])
        optimizer.close()

    assert_same(on_ranks(1, model, body), alone(model, windows, adamw), rtol=0, atol=0)


def test_step_hooks_of_the_wrapped_optimizer_work(model):
    seen = []

    def body(world, mine):
        optimizer = wrapped(world, mine)
        optimizer.register_step_post_hook(lambda *_: seen.append(world.rank))
        mine(batch(0)).sum().backward()
        optimizer.step()
        optimizer.close()

    on_ranks(1, model, body)
    assert seen == [0]


def test_dropping_gradients_that_are_being_summed_is_refused(model):
    """As in Horovod: other ranks would add theirs to what this rank has dropped."""

    def body(world, mine):
        optimizer = wrapped(world, mine, bucket_bytes=2**20)
        (mine(batch(0)).sum() + mine.unused(torch.ones(3)).sum()).backward()
        with pytest.raises(RuntimeError, match=r"call optimizer.synchronize\(\) first"):
            optimizer.zero_grad()
        with (
            pytest.raises(RuntimeError, match=r"after optimizer.synchronize\(\)"),
            optimizer.skip_synchronize(),
        ):
            optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        optimizer.step()
        optimizer.close()

    assert_same(on_ranks(2, model, body), model.state_dict(), rtol=0, atol=0)


def test_averaging_twice_is_told_and_changes_nothing(model):
    windows = [[[batch(0, r)] for r in range(2)]]

    def body(world, mine):
        del mine.unused
        optimizer = wrapped(world, mine)
        mine(windows[0][world.rank][0]).square().sum().backward()
        optimizer.synchronize()
        optimizer.step()
        optimizer.close()

    with pytest.warns(UserWarning, match="averages again after"):
        ranks = on_ranks(2, model, body)
    expected = alone(model, windows)
    assert_same(ranks, {name: expected[name] for name in ranks[0]})


def test_closing_in_the_middle_of_a_window_waits_for_nobody(model):
    """A script may end after a backward pass without a step, on all ranks or on one."""

    def body(world, mine):
        optimizer = wrapped(world, mine)
        if world.rank == 0:
            mine(batch(0)).sum().backward()
        optimizer.close()
        optimizer.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_ranks(2, model, body)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (lambda m: [*m.named_parameters(), ("first.weight", m.first.weight)], "'first.weight' 2 times"),
        (lambda m: m.first.named_parameters(), "4 of the optimizer's 6 parameters are not in named_param"),
        (lambda m: m.parameters(), "must be pairs"),
        (lambda m: [], "6 of the optimizer's 6"),
    ],
)
def test_names_that_do_not_fit_are_refused(model, named, message):
    with pytest.raises(UserError, match=message) as error:
        DistributedOptimizer(sgd(model.parameters()), named(model))
    assert "\n" not in str(error.value)


def test_what_is_no_torch_optimizer_is_refused(model):
    def body(world, mine):
        optimizer = wrapped(world, mine)
        with pytest.raises(UserError, match="not DistributedOptimizer"):
            DistributedOptimizer(optimizer)
        with pytest.raises(UserError, match="not generator"):
            DistributedOptimizer(mine.parameters())
        with pytest.raises(UserError, match="backward_passes_per_step=0 must be 1 or more"):
            wrapped(world, mine, backward_passes_per_step=0)
        with pytest.raises(UserError, match=r"hpc_train\.init\(\) comes first"):
            DistributedOptimizer(sgd(mine.parameters()))

    on_ranks(1, model, body)


def test_ranks_with_different_options_are_refused(model):
    def body(world, mine):
        with pytest.raises(UserError, match="same model and options on every rank"):
            wrapped(world, mine, compression=[Compression.none, Compression.fp16][world.rank])

    on_ranks(2, model, body)
