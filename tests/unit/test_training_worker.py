"""What a rank holds is decided without a message; what came of a step is known to all ranks."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import LoopbackWorld, run_ranks
from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import Layout, layer_costs, make_grid, split_layers
from hpc_train.training.worker import Worker

TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)  # 4 layers


def settings(**sections):
    return Settings(task="regression", **{"batch": {"size": 8, "micro_batch": 2}, **sections})


def linear(inputs, outputs, cost=None):
    return LayerSpec(partial(nn.Linear, inputs, outputs), cost=cost)


def test_costs_are_those_of_the_layers_where_all_have_one():
    assert layer_costs([linear(1, 1, cost=3), linear(9, 9, cost=0)]) == [3.0, 0.0]


@pytest.mark.parametrize("second", [None, 7.0])
def test_parameters_stand_for_costs_where_a_layer_has_none(second):
    specs = [linear(3, 4), linear(4, 2, cost=second), LayerSpec(nn.ReLU)]
    assert layer_costs(specs) == [3 * 4 + 4, 4 * 2 + 2, 1.0]  # a layer without parameters costs something


def test_the_split_is_even_by_cost_or_by_hand():
    specs = [linear(1, 1, cost=cost) for cost in (6, 1, 1, 1, 1, 2)]
    assert split_layers(settings(grid={"stages": 2}), specs) == [range(1), range(1, 6)]
    by_hand = settings(grid={"stages": 2}, pipeline={"split": (4, 2)})
    assert split_layers(by_hand, specs) == [range(4), range(4, 6)]
    with pytest.raises(UserError, match="has 2 numbers for 3 stages"):
        split_layers(settings(grid={"stages": 3}, pipeline={"split": (4, 2)}), specs)


@pytest.mark.parametrize("fastest", ["stage", "replica"])
def test_every_rank_has_its_place_and_the_layers_of_its_stage(fastest):
    chosen = settings(grid={"stages": 3, "fastest": fastest}, pipeline={"split": (1, 2, 1)})
    layouts = run_ranks(6, lambda world: Layout(chosen, TASK, world))
    places = [tuple(layout.place) for layout in layouts]
    assert sorted(places) == [(replica, stage) for replica in range(2) for stage in range(3)]
    assert places[1] == ((0, 1) if fastest == "stage" else (1, 0))
    held = [range(1), range(1, 3), range(3, 4)]
    assert [layout.chunks for layout in layouts] == [{stage: held[stage]} for _, stage in places]
    assert [layout.reads_data for layout in layouts] == [stage != 1 for _, stage in places]


def test_a_batch_smaller_than_the_replicas_is_a_users_mistake_on_every_rank():
    small = settings(batch={"size": 3, "micro_batch": 1}, grid={"stages": 2})

    def body(world):
        with pytest.raises(UserError) as caught:
            Layout(small, TASK, world)
        return str(caught.value)

    words = "batch.size=3 cannot be cut into 4 replicas: set batch.size to at least 4, or start fewer ranks"
    assert run_ranks(8, body) == [words] * 8
    assert make_grid(small, 6).replicas == 3


def test_stages_that_do_not_fit_are_a_users_mistake():
    with pytest.raises(UserError, match="2 stages cannot share 1 rank"):
        Layout(settings(grid={"stages": 2}), TASK, LoopbackWorld())
    with pytest.raises(UserError, match="4 layers cannot fill 5 stages"):
        run_ranks(5, lambda world: Layout(settings(grid={"stages": 5}), TASK, world))


@pytest.mark.usefixtures("threads_as_before")
def test_a_worker_sets_torchs_threads():
    for number in (2, 1):
        chosen = settings(train={"threads": number})
        Worker(chosen, TASK, LoopbackWorld(), Layout(chosen, TASK, LoopbackWorld())).close()
        assert torch.get_num_threads() == number


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize("poisoned", [False, True])
def test_a_gradient_that_is_not_finite_on_one_replica_is_known_to_all_and_skips_the_update(poisoned):
    """2 replicas x 2 stages; one input of replica 1 is NaN, which no rank of replica 0 ever sees."""
    chosen = settings(grid={"stages": 2}, batch={"size": 4, "micro_batch": 2}, train={"threads": 1})

    def body(world):
        layout = Layout(chosen, TASK, world)
        worker = Worker(chosen, TASK, world, layout)
        before = [parameter.detach().clone() for parameter in worker.parameters.values()]
        inputs = torch.ones(2, 3)
        if poisoned and layout.place.replica == 1:
            inputs[0, 0] = math.nan
        outcome = worker.backward([(inputs, torch.zeros(2, 1))], batch_size=4)
        worker.update(outcome, learning_rate=0.1)
        moved = any(not torch.equal(a, b) for a, b in zip(before, worker.parameters.values(), strict=True))
        worker.close()
        return outcome, moved

    outcomes = run_ranks(4, body)
    assert [moved for _, moved in outcomes] == [not poisoned] * 4
    for outcome, _ in outcomes:
        assert outcome.finite is not poisoned
        assert math.isnan(outcome.grad_norm) is poisoned
        assert poisoned or outcome == outcomes[0][0]  # the same bits on all ranks
