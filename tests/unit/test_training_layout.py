"""Where layers stand when stages hold several chunks, and what is told of layers that see the cut."""

from functools import partial

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import (
    Layout,
    about_batch_norm,
    find_schedule,
    layer_costs,
    split_layers,
    stages_of_layers,
)

TASK = Regression(samples=40, inputs=3, hidden=8, depth=7)  # 8 layers


def settings(stages, schedule="1f1b", split="auto", **more):
    return Settings.model_validate(
        {
            "task": "regression",
            "grid": {"stages": stages},
            "batch": {"size": 12, "micro_batch": 3},
            "pipeline": {"schedule": schedule, "split": split, **more},
        }
    )


def linear(cost=None):
    return LayerSpec(partial(nn.Linear, 3, 3), cost=cost)


def reading(cost=None):
    """A layer that reads values while it is built, and so cannot be looked at without memory."""
    return LayerSpec(lambda: nn.Dropout(torch.linspace(0, 0.5, 3)[1].item()), cost=cost)


def test_layers_that_normalise_over_micro_batches_are_warned_of_by_name():
    specs = [linear(), LayerSpec(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))), linear()]
    warning = about_batch_norm(settings(1), specs)
    assert warning.startswith("warning: layers.1 normalises over the samples of a micro-batch (BatchNorm): ")
    assert "depends on batch.micro_batch=3" in warning
    assert "\n" not in warning
    more = [*specs, LayerSpec(partial(nn.SyncBatchNorm, 3))]
    assert about_batch_norm(settings(1), more).startswith("warning: layers.1 and others normalise")


@pytest.mark.parametrize(
    "norm",
    [partial(nn.LayerNorm, 4), partial(nn.GroupNorm, 2, 4), partial(nn.InstanceNorm1d, 4), nn.Identity],
)
def test_layers_that_normalise_each_sample_by_itself_are_not(norm):
    assert about_batch_norm(settings(1), [linear(), LayerSpec(norm), reading()]) == ""


def test_costs_are_needed_of_all_layers_or_none():
    assert layer_costs([linear(cost=2.5), reading(cost=0)]) == [2.5, 0.0]  # none is looked at
    assert layer_costs([linear(cost=2.5), linear(), LayerSpec(nn.Tanh, cost=7)]) == [12.0, 12.0, 1.0]
    with pytest.raises(UserError, match="reads values while it is built"):
        layer_costs([linear(cost=2.5), reading()])


@pytest.mark.parametrize(
    ("schedule", "chunks", "stages"),
    [("1f1b", 0, 3), ("interleaved", 0, 2), ("interleaved", 3, 2), ("zb-v", 0, 3), ("gpipe", 0, 1)],
)
def test_every_layer_is_in_one_chunk_and_every_chunk_on_its_stage(schedule, chunks, stages):
    chosen = settings(stages, schedule, chunks=chunks)
    split = split_layers(chosen, TASK.layers())
    rule = find_schedule(chosen)
    assert len(split) == stages * rule.chunks == stages * (chunks or rule.chunks)
    assert [layer for layers in split for layer in layers] == list(range(8))
    assert all(split)
    stage_of = stages_of_layers(split, rule, stages)
    assert len(stage_of) == 8
    assert set(stage_of) == set(range(stages))


def test_both_chunks_of_a_stage_count_together():
    """zb-v: the stage with the costly last layer has the first chunk, too, which gets but one layer."""
    specs = [linear(cost) for cost in (1, 1, 1, 1, 1, 1, 4)]
    assert list(map(len, split_layers(settings(2, "zb-v"), specs))) == [1, 3, 2, 1]


def test_interleaved_goes_round_and_zb_v_comes_back():
    by_hand = (2, 2, 2, 2)
    rounds, back = (settings(2, schedule, by_hand) for schedule in ("interleaved", "zb-v"))
    split = split_layers(rounds, TASK.layers())
    assert split == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert stages_of_layers(split, find_schedule(rounds), 2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stages_of_layers(split, find_schedule(back), 2) == [0, 0, 1, 1, 1, 1, 0, 0]


def test_a_stage_holds_both_of_its_chunks_and_reads_data_where_one_is_at_an_end():
    chosen = settings(3, "zb-v", (1, 1, 2, 2, 1, 1))
    layouts = run_ranks(3, lambda world: Layout(chosen, TASK, world))
    assert [layout.chunks for layout in layouts] == [
        {0: range(0, 1), 5: range(7, 8)},
        {1: range(1, 2), 4: range(6, 7)},
        {2: range(2, 4), 3: range(4, 6)},
    ]
    assert [layout.reads_data for layout in layouts] == [True, False, False]
    assert [layout.num_chunks for layout in layouts] == [6] * 3
    assert layouts[0].stage_of == layouts[2].stage_of == [0, 1, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("stages", "schedule", "split", "words"),
    [
        (2, "1f1b", (4, 5), "holds 9 layers, but the model has 8"),
        (2, "interleaved", (4, 4), "has 2 numbers for "),
        (8, "zb-v", "auto", "8 layers cannot fill 8 stages of 2 chunks: set grid.stages to at most 4"),
    ],
)
def test_a_split_that_does_not_fit_is_told_with_its_numbers(stages, schedule, split, words):
    with pytest.raises(UserError, match=words) as caught:
        split_layers(settings(stages, schedule, split), TASK.layers())
    assert "\n" not in str(caught.value)


def test_layers_that_share_parameters_may_be_in_two_chunks_of_a_stage():
    """The first and the last of four layers are one module: zb-v has them on one stage, others apart."""
    shared = nn.Linear(3, 3)
    specs = [LayerSpec(lambda: shared), linear(), linear(), LayerSpec(lambda: shared)]
    assert len(split_layers(settings(2, "zb-v"), specs)) == 4
    for schedule in ("1f1b", "interleaved"):
        with pytest.raises(UserError, match="layers 0 and 3 share parameters, but stand on stages 0 and 1"):
            split_layers(settings(2, schedule), specs)
