"""What `hpc-train plan` draws: grid, stages and schedule, and the same refusals as a run's."""

import doctest
from functools import partial

import pytest
from torch import nn

from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.grid import Grid
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.tasks.regression import Regression
from hpc_train.tasks.task import Task
from hpc_train.training import preview as preview_file
from hpc_train.training.preview import draw_grid, preview

TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)


def settings(**sections):
    return Settings(task="regression", **{"batch": {"size": 12, "micro_batch": 2}, **sections})


def test_the_drawing_in_the_docstring():
    result = doctest.testmod(preview_file)
    assert result.attempted > 0
    assert result.failed == 0


def test_neighbouring_ranks_sum_gradients_where_the_replica_is_fastest():
    assert draw_grid(Grid(3, 2, "replica")).splitlines() == [
        "grid: 6 ranks = 3 replicas x 2 stages, neighbours differ in replica",
        "             stage 0  stage 1",
        "replica 0          0        3",
        "replica 1          1        4",
        "replica 2          2        5",
    ]


def test_one_of_each():
    title, *_ = draw_grid(Grid(1, 1)).splitlines()
    assert title == "grid: 1 rank = 1 replica x 1 stage, neighbours differ in stage"


def test_a_large_grid_is_cut_and_its_columns_stay_in_line():
    _, heading, *rows = draw_grid(Grid(1024, 128)).splitlines()
    assert heading.split("  ")[-1] == "stage 127"
    assert len(rows) == 11
    assert rows[8] == "..."
    assert rows[-1].split() == [
        "replica",
        "1023",
        *map(str, range(130944, 130952)),
        "...",
        "131070",
        "131071",
    ]
    assert {len(row) for row in rows if row != "..."} == {len(heading)}
    assert len(heading) < 150


def test_a_whole_preview():
    chosen = settings(grid={"stages": 2}, pipeline={"split": (1, 3)})
    grid, stages, schedule = preview(chosen, TASK, 4).split("\n\n")
    assert grid == draw_grid(Grid(2, 2))
    # hidden layers of 3*8+8, 8*8+8 and 8*8+8 parameters and an output of 8+1
    assert stages.splitlines() == [
        "stage   parameters   cost  layers",
        "0               32    17%  0-0: hidden 1",
        "1              153    83%  1-3: hidden 2 .. output",
        "all            185   100%  4 layers, task regression",
    ]
    title, *drawing = schedule.splitlines()
    assert title.startswith(
        "schedule 1f1b: 3 micro-batches of up to 2 samples, of the 6 that replica 0 takes of 12"
    )
    assert title.endswith("live micro-batches by stage 2, 1")
    assert drawing[0] == "stage 0  F0 F1 .  .  B0=== F2 B1=== .  B2==="


def test_the_bubble_is_that_of_the_costs():
    """One micro-batch through two equal stages: each stage is idle while the other works."""
    chosen = settings(grid={"stages": 2}, batch={"size": 2, "micro_batch": 2})
    assert "bubble 50%" in preview(chosen, Equal(cost=1.0), 2)
    assert "bubble 0%" in preview(settings(), Equal(cost=1.0), 2)


class Equal(Task):
    """Two layers of one cost."""

    def __init__(self, cost):
        self.cost = cost

    def layers(self):
        return [LayerSpec(partial(nn.Linear, 2, 2), cost=self.cost) for _ in range(2)]


def test_layers_that_cost_nothing_and_have_no_title():
    text = preview(settings(grid={"stages": 2}), Equal(cost=0.0), 2)
    assert "0                6     0%  0-0: layer 0" in text


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_ragged_batch_counts_its_last_micro_batch(schedule):
    chosen = settings(batch={"size": 13, "micro_batch": 3}, pipeline={"schedule": schedule})
    # replica 0 takes 7 of the 13: 3 + 3 + 1
    assert f"schedule {schedule}: 3 micro-batches of up to 3 samples, of the 7" in preview(chosen, TASK, 2)


@pytest.mark.parametrize(
    ("ranks", "sections", "words"),
    [
        (3, {"grid": {"stages": 2}}, "2 stages cannot share 3 ranks evenly"),
        (5, {"grid": {"stages": 5}}, "4 layers cannot fill 5 stages"),
        (4, {"batch": {"size": 3, "micro_batch": 1}}, "batch.size=3 cannot be cut into 4 replicas"),
        (2, {"grid": {"stages": 2}, "pipeline": {"split": (2, 1)}}, "holds 3 layers, but the model has 4"),
    ],
)
def test_what_a_run_would_refuse_is_refused_here(ranks, sections, words):
    with pytest.raises(UserError, match=words):
        preview(settings(**sections), TASK, ranks)
