"""Ranks and places: each other's inverse, whatever the order, and grids that do not fit."""

import pytest

from hpc_train.errors import UserError
from hpc_train.grid import Grid, Place


@pytest.mark.parametrize("fastest", ["stage", "replica"])
@pytest.mark.parametrize(("replicas", "stages"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 2), (64, 64)])
def test_rank_and_place_are_inverse(replicas, stages, fastest):
    grid = Grid(replicas, stages, fastest)
    places = [grid.place(rank) for rank in range(grid.size)]
    assert len(set(places)) == grid.size
    assert [grid.rank(*place) for place in places] == list(range(grid.size))


def test_stage_fastest_keeps_a_replica_together():
    grid = Grid.for_ranks(6, stages=3)
    assert grid.place(4) == Place(replica=1, stage=1)
    assert grid.stages_of(1) == [3, 4, 5]
    assert grid.replicas_of(2) == [2, 5]


def test_replica_fastest_keeps_a_stage_together():
    grid = Grid.for_ranks(6, stages=3, fastest="replica")
    assert grid.stages_of(1) == [1, 3, 5]
    assert grid.replicas_of(2) == [4, 5]


@pytest.mark.parametrize(
    ("ranks", "stages", "fixes"),
    [
        (3, 2, ["-n 2 or -n 4", "grid.stages=1"]),
        (6, 4, ["-n 4 or -n 8", "grid.stages=3"]),
        (1, 2, ["-n 2", "stages=1"]),
    ],
)
def test_ranks_that_stages_do_not_divide(ranks, stages, fixes):
    with pytest.raises(UserError) as caught:
        Grid.for_ranks(ranks, stages)
    text = str(caught.value)
    assert f"{stages} stages" in text
    assert f"{ranks} rank" in text
    assert all(fix in text for fix in fixes)


def test_a_rank_outside():
    with pytest.raises(ValueError, match="rank 4"):
        Grid(2, 2).place(4)
    with pytest.raises(ValueError, match="stage 2"):
        Grid(2, 2).rank(0, 2)
