"""The optimizer for own loops, against one process that runs every rank's passes."""

import copy
import warnings

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.gradients.distributed_optimizer import Compression, DistributedOptimizer
from hpc_train.grid import Grid

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two layers that can be used apart, and one that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Two()


def batch(*key):
    """Samples of their own for every key."""
    return torch.randn(
        2, 4, generator=torch.Generator().manual_seed(sum(7**i * k for i, k in enumerate(key)))
    )


def adamw(parameters):
    # Weight decay moves a parameter whose gradient is zero, and leaves alone one without gradient.
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrapped(world, model, make=sgd, named=True, **options):
    return DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters() if named else None,
        collective=world.collective(Grid(world.size, 1), CPU),
        **{"bucket_bytes": 64, **options},
    )


def on_ranks(num_ranks, model, body):
    """The parameters of each rank after `body(world, its copy of the model)`."""

    def run(world):
        mine = copy.deepcopy(model)
        body(world, mine)
        return mine.state_dict()

    return run_ranks(num_ranks, run, timeout_s=60)


def alone(model, windows, make=sgd):
    """One process: per step the mean over ranks of the sums of their passes.  `windows[step][rank]`."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        for passes in window:
            for x in passes:
                (model(x).square().sum() / len(window)).backward()
        optimizer.step()
    return model.state_dict()


def assert_same(ranks, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    for found in ranks:
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], **tolerance)


def train(optimizer, model, windows):
    for passes in windows:
        optimizer.zero_grad()
        for x in passes:
            model(x).square().sum().backward()
        optimizer.step()


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
