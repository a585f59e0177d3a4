"""A micro-batch of one sample: refused where the model cannot take it, and never planned for BatchNorm."""

from functools import partial

import pytest
import torch
from profiles import even_layers
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.comm.loopback import run_ranks
from hpc_train.config import BatchSettings, Settings
from hpc_train.errors import UserError
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options
from hpc_train.planning.planner import Search, plan
from hpc_train.tasks.task import Task
from hpc_train.training import autoplan
from hpc_train.training.autoplan import resolve
from hpc_train.training.layout import lay_out
from hpc_train.training.lone_sample import find_lone, lone_rule
from hpc_train.training.preview import preview

BATCH_NORM = partial(nn.BatchNorm1d, 4)


class Normalised(Task):
    """A linear layer, one that normalises, and an output."""

    def __init__(self, norm=BATCH_NORM, shape=(4,), samples=36):
        self.norm, self.shape, self.samples = norm, shape, samples

    def layers(self):
        return [
            LayerSpec(partial(nn.Linear, self.shape[-1], self.shape[-1])),
            LayerSpec(self.norm),
            LayerSpec(nn.Tanh),
        ]

    def loss(self, output, target):
        return output.square().flatten(1).sum(1)

    def dataset(self, split):
        return TensorDataset(torch.ones(self.samples, *self.shape), torch.ones(self.samples))


def settings(size, micro_batch, **sections):
    batch = {"size": size, "micro_batch": micro_batch} if micro_batch else {"size": size}
    return Settings.model_validate(
        {"task": "normalised", "batch": batch, "train": {"threads": 1}, **sections}
    )


@pytest.mark.parametrize(
    ("size", "micro_batch", "samples", "replicas", "lone"),
    [
        (18, 4, 36, 2, (18, 0)),  # 9 and 9
        (18, 3, 36, 2, None),
        (18, 1, 36, 2, (18, 0)),
        (11, 5, 110, 2, (11, 0)),  # 6 and 5
        (11, 4, 110, 2, (11, 1)),
        (2, 8, 36, 2, (2, 0)),
        (12, 4, 37, 1, (1, 0)),  # the last batch of an epoch
        (12, 4, 38, 1, None),
        (12, 4, 9, 1, (9, 0)),  # fewer samples than a batch
    ],
)
def test_where_a_sample_is_alone(size, micro_batch, samples, replicas, lone):
    assert find_lone(BatchSettings(size=size, micro_batch=micro_batch), samples, replicas) == lone


def test_a_single_sample_that_batch_norm_refuses_is_told_before_training():
    chosen = settings(18, 4)
    words = (
        r"layers.1 normalises over the samples of a micro-batch \(BatchNorm\) and needs 2 or more, "
        r"but batch.micro_batch=4 and batch.size=18 on 2 replicas leave replica 0 one with 1: "
        r"set batch.micro_batch to 5$"
    )
    with pytest.raises(UserError, match=words):
        run_ranks(2, lambda world: lay_out(chosen, Normalised(), world))
    with pytest.raises(UserError, match=words):
        preview(chosen, Normalised(), 2)
    run_ranks(2, lambda world: lay_out(settings(18, 5), Normalised(), world))


def test_the_end_of_an_epoch_counts_too():
    with pytest.raises(UserError, match=r"leave replica 0 one with 1 of the last 1 of an epoch: set"):
        preview(settings(12, 4), Normalised(samples=37), 1)


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (partial(nn.BatchNorm2d, 3), (3, 8, 8)),  # an image has many values of a feature
        (partial(nn.BatchNorm1d, 3), (3, 8)),  # and so has a sequence
        (partial(nn.LayerNorm, 4), (4,)),
    ],
)
def test_a_single_sample_that_is_enough_is_no_mistake(norm, shape):
    for micro_batch in (1, 4):
        assert preview(settings(18, micro_batch), Normalised(norm, shape), 2)


def test_an_image_of_one_pixel_is_not_enough():
    with pytest.raises(UserError, match=r"set batch\.micro_batch to 5"):
        preview(settings(18, 4), Normalised(partial(nn.BatchNorm2d, 3), (3, 1, 1)), 2)


def test_the_planner_leaves_no_sample_alone():
    chosen, cluster = settings(18, None), Cluster(2, 2)
    lone = lone_rule(chosen, Normalised())
    found = {
        (draft.choice.replicas, draft.choice.micro_batch)
        for draft in Search(even_layers(3), cluster, 18, Options(lone=lone)).drafts
    }
    assert {size for replicas, size in found if replicas == 2} == {3, 9}  # of 9: not 1, 2, 4 and 8
    assert {size for replicas, size in found if replicas == 1} == {2, 3, 4, 6, 8, 9, 16, 18}
    assert lone_rule(chosen, Normalised(partial(nn.LayerNorm, 4))) is None


def test_one_sample_is_planned_where_the_user_asks_for_it():
    """Images can be normalised one by one."""
    lone = lone_rule(settings(18, 1), Normalised(partial(nn.BatchNorm2d, 3), (3, 8, 8)))
    assert plan(even_layers(3), Cluster(2, 2), 18, Options(lone=lone, micro_batches=(1,))).best


def test_a_grid_that_is_chosen_can_be_trained_with(monkeypatch):
    """One sample a micro-batch would be the fastest, with the least bubble."""
    chosen = settings(8, None, grid={"auto": True, "stages": 2})
    monkeypatch.setattr(autoplan, "measure_all", lambda *args: (even_layers(3), Cluster(2, 2)))
    first, _ = run_ranks(2, lambda world: resolve(chosen, Normalised(samples=32), world, lambda line: None))
    assert first.batch.micro_batch == 2


def test_where_every_way_leaves_one_alone():
    chosen = settings(2, None)
    lone = lone_rule(chosen, Normalised())
    with pytest.raises(UserError, match=r"and a micro-batch 2 samples \(BatchNorm\)"):
        plan(even_layers(1), Cluster(2, 2), 2, Options(lone=lone))
