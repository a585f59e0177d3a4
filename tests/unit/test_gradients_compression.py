"""Compression of an own loop's gradients, and passes that add up before they are sent."""

import pytest
import torch
from optimizers import CPU, alone, assert_same, batch, on_ranks, sgd, train, two, wrapped
from reducers import Recorded

from hpc_train.errors import UserError
from hpc_train.gradients.distributed_optimizer import Compression, DistributedOptimizer
from hpc_train.grid import Grid


@pytest.fixture
def model():
    return two()


def trained(model, windows, num_ranks=3, **options):
    def body(world, mine):
        optimizer = wrapped(world, mine, **options)
        train(optimizer, mine, [window[world.rank] for window in windows])
        optimizer.close()

    return on_ranks(num_ranks, model, body)


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        (Compression.none, 1e-6),
        (Compression.fp16, 5e-3),
        (Compression.bf16, 2e-2),
        (Compression.int8, 1e-1),
        (Compression.powersgd(rank=1, warm_up_steps=3), 1e-6),
    ],
)
def test_every_compression_is_close_and_alike_on_all_ranks(model, compression, tolerance):
    windows = [[[batch(s, r)] for r in range(3)] for s in range(3)]
    first, *others = trained(model, windows, compression=compression)
    assert_same(others, first, rtol=0, atol=0)
    assert_same([first], alone(model, windows), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_powersgd_after_its_warm_up_is_another_gradient(model):
    """Two samples of each of three ranks make gradients of rank up to six; one of 4 x 4 is thinned."""
    windows = [[[batch(s, r)] for r in range(3)] for s in range(3)]
    compression = Compression.powersgd(rank=1, warm_up_steps=0)
    first, *others = trained(model, windows, compression=compression)
    assert_same(others, first, rtol=0, atol=0)
    expected = alone(model, windows)
    assert not torch.allclose(first["first.weight"], expected["first.weight"], rtol=0, atol=1e-3)
    assert torch.allclose(first["first.weight"], expected["first.weight"], rtol=0, atol=0.5)


@pytest.mark.filterwarnings("ignore:no gradient for")
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("passes", [1, 4])
def test_passes_add_up_here_and_are_sent_once(model, passes, overlap):
    def body(world, mine):
        collective = Recorded(world.collective(Grid(world.size, 1), CPU))
        optimizer = DistributedOptimizer(
            sgd(mine.parameters()),
            mine.named_parameters(),
            backward_passes_per_step=passes,
            collective=collective,
            overlap=overlap,
        )
        numel = sum(bucket.buffer.numel() for bucket in optimizer._reducer.buckets)
        for step in range(3):
            train(optimizer, mine, [[batch(step, world.rank, i) for i in range(passes)]])
        gradients = [n for n in collective.lengths if n > 8]  # the rest tells who used which parameter
        assert sum(gradients) == 3 * numel
        optimizer.close()

    windows = [[[batch(s, r, i) for i in range(passes)] for r in range(2)] for s in range(3)]
    assert_same(on_ranks(2, model, body), alone(model, windows))


@pytest.mark.filterwarnings("ignore:no gradient for")
def test_parameters_that_join_take_nothing_from_what_is_owed(model):
    """A parameter group is added, which makes new buckets; the residual goes along."""
    windows = [[[batch(s, r)] for r in range(2)] for s in range(2)]

    def body(world, mine):
        first, second = mine.first, mine.second
        optimizer = DistributedOptimizer(
            sgd(first.parameters()),
            first.named_parameters(),
            Compression.int8,
            collective=world.collective(Grid(world.size, 1), CPU),
        )
        train(optimizer, mine, [windows[0][world.rank]])
        owed = optimizer._reducer.settle()
        optimizer.add_param_group({"params": list(second.parameters())})
        after = optimizer._reducer.settle()
        assert any(bool(value.any()) for value in owed.values())
        assert_same([after], owed, rtol=1e-6, atol=1e-9)
        train(optimizer, mine, [windows[1][world.rank]])
        optimizer.close()

    first, second = on_ranks(2, model, body)
    assert_same([second], first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("compression", "feedback", "expected"),
    [
        (Compression.int8, None, True),
        (Compression.fp16, None, False),
        (Compression.bf16, True, True),
        (Compression.none, True, False),
        (Compression.int8, False, False),
        (Compression.powersgd(), None, True),
        (Compression.powersgd(), False, False),
    ],
)
def test_feedback_is_for_what_loses_much_or_for_those_who_ask(model, compression, feedback, expected):
    def body(world, mine):
        optimizer = wrapped(world, mine, compression=compression, error_feedback=feedback)
        assert optimizer._method.error_feedback is expected
        optimizer.close()

    on_ranks(2, model, body)


def test_wrong_options_are_one_line(model):
    with pytest.raises(UserError, match="rank must be 1 or more"):
        Compression.powersgd(rank=0)
    with pytest.raises(UserError, match="warm_up_steps 0 or more"):
        Compression.powersgd(warm_up_steps=-1)

    def body(world, mine):
        with pytest.raises(UserError, match=r"compression='fp16' is not known"):
            wrapped(world, mine, compression="fp16")

    on_ranks(1, model, body)
