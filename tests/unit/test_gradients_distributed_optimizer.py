"""The optimizer for own loops, against one process that runs every rank's passes."""

import warnings

import pytest
import torch
from optimizers import CPU, adamw, alone, assert_same, batch, on_ranks, sgd, train, two, wrapped

from hpc_train.gradients.distributed_optimizer import DistributedOptimizer
from hpc_train.grid import Grid


@pytest.fixture
def model():
    return two()


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "passes",
    [
        [[1, 1], [1, 1], [1, 1]],
        [[2, 2], [2, 1], [2, 2]],  # the last window of an epoch is often shorter,
        [[1, 2], [3, 1], [5, 4]],  # or longer, and ranks need not agree:
        [[0, 2], [3, 0], [0, 0]],  # horovod#1549, #2466, #2497
    ],
)
@pytest.mark.parametrize("expected", [1, 2])
def test_windows_of_any_length_are_exact(model, make, overlap, passes, expected):
    windows = [[[batch(s, r, i) for i in range(n)] for r, n in enumerate(w)] for s, w in enumerate(passes)]

    def body(world, mine):
        optimizer = wrapped(world, mine, make, overlap=overlap, backward_passes_per_step=expected)
        train(optimizer, mine, [window[world.rank] for window in windows])
        optimizer.close()

    assert_same(on_ranks(2, model, body), alone(model, windows, make))


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_parameters_that_only_some_ranks_use(model):
    """One that a rank used is averaged; one that none used keeps no gradient, as in one process."""

    def body(world, mine):
        optimizer = wrapped(world, mine, adamw)
        for _ in range(3):
            optimizer.zero_grad()
            (mine.first(batch(1)) if world.rank else mine.second(batch(2))).sum().backward()
            optimizer.step()
            assert mine.unused.weight.grad is None
            assert mine.first.weight.grad is not None
        optimizer.close()

    ranks = on_ranks(3, model, body)
    optimizer = adamw(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        ((2 * model.first(batch(1)).sum() + model.second(batch(2)).sum()) / 3).backward()
        optimizer.step()
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("clear", ["optimizer", "model", "zeros", "never"])
def test_every_way_to_clear_gradients(model, clear):
    def run(optimizer, mine, share):
        for step in range(3):
            if clear == "optimizer":
                optimizer.zero_grad()
            elif clear == "model":
                mine.zero_grad()
            elif clear == "zeros":
                optimizer.zero_grad(set_to_none=False)
            (mine(batch(step)[share]).square().sum() * 2 / len(batch(step)[share])).backward()
            optimizer.step()

    def body(world, mine):
        optimizer = wrapped(world, mine)
        run(optimizer, mine, slice(world.rank, world.rank + 1))
        optimizer.close()

    ranks = on_ranks(2, model, body)
    run(sgd(model.parameters()), model, slice(None))
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_clipping_between_synchronize_and_step(model):
    windows = [[[batch(s, r)] for r in range(2)] for s in range(3)]

    def body(world, mine):
        optimizer = wrapped(world, mine)
        for window in windows:
            optimizer.zero_grad()
            mine(window[world.rank][0]).square().sum().backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(mine.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.close()

    ranks = on_ranks(2, model, body)
    optimizer = sgd(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        (sum(model(x).square().sum() for (x,) in window) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_gradients_scaled_for_fp16(model):
    """GradScaler unscales the averaged gradients, and all ranks skip a step that one rank overflowed."""
    skipped = []

    def body(world, mine):
        optimizer = wrapped(world, mine)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = mine(batch(step, world.rank)).square().sum()
            if step == 1 and world.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        skipped.append(scaler.get_scale())
        optimizer.close()

    windows = [[[batch(step, r)] for r in range(2)] for step in (0, 2)]
    assert_same(on_ranks(2, model, body), alone(model, windows))
    assert skipped == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_learning_rate_schedulers_act_on_it(model):
    def run(optimizer, mine, scale, make_scheduler):
        scheduler = make_scheduler(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            (mine(batch(step)).square().sum() * scale).backward()
            optimizer.step()
            scheduler.step()

    def decay(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def body(world, mine):
        optimizer = wrapped(world, mine)
        assert isinstance(optimizer, torch.optim.Optimizer)
        with warnings.catch_warnings():
            # "lr_scheduler.step() before optimizer.step()" comes where the optimizer hides its steps
            warnings.filterwarnings("error", category=UserWarning, message=".*scheduler.*")
            run(optimizer, mine, 1, decay)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)
        optimizer.close()

    ranks = on_ranks(1, model, body) + on_ranks(2, model, body)
    run(sgd(model.parameters()), model, 1, decay)
    assert_same(ranks, model.state_dict())


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_a_scheduler_made_before_the_wrapping_acts_too(model):
    def body(world, mine):
        inner = sgd(mine.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)
        collective = world.collective(Grid(2, 1), CPU)
        optimizer = DistributedOptimizer(inner, mine.named_parameters(), collective=collective)
        mine(batch(0, world.rank)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        optimizer.close()

    assert_same(on_ranks(2, model, body), alone(model, [[[batch(0, r)] for r in range(2)]]))


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_a_closure_is_averaged_at_every_call(model):
    """LBFGS evaluates several times a step and decides by the loss: all ranks must see the same one."""

    def lbfgs(parameters):
        return torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe")

    def body(world, mine):
        optimizer = wrapped(world, mine, lbfgs)

        def closure():
            optimizer.zero_grad()
            loss = mine(batch(world.rank)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        optimizer.close()

    first, second = on_ranks(2, model, body)
    assert_same([first], second, rtol=0, atol=0)
    optimizer = lbfgs(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (model(batch(0)).square().sum() + model(batch(1)).square().sum()) / 2
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert_same([first], model.state_dict(), rtol=1e-3, atol=1e-4)  # the line search magnifies rounding
