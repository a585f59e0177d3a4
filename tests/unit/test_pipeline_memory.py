"""Activations are kept from forward to backward and no longer: as many as the simulation says."""

import gc
import weakref

import pytest
import torch
from pipelines import batch, layers, on_stages
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.simulate import simulate


class Kept:
    """An activation that autograd keeps for backward."""

    def __init__(self, tensor):
        self.tensor = tensor


class Counting(nn.Module):
    """Sine, which counts the inputs that are kept for its backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.kept = weakref.WeakSet()
        self.peak = 0

    def forward(self, x):
        with saved_tensors_hooks(self.keep, lambda kept: kept.tensor):
            y = x.sin()  # keeps x, once the weight before it has made x part of a graph
        return y * self.weight

    def keep(self, tensor):
        kept = Kept(tensor)
        self.kept.add(kept)
        self.peak = max(self.peak, len(self.kept))
        return kept


@pytest.fixture
def no_garbage_collection():
    """What is freed is freed because nobody holds it, at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.usefixtures("no_garbage_collection")
def test_live_micro_batches_are_those_of_the_simulation(schedule, num_stages):
    def body(pipeline):
        counting = pipeline.stage.layers[str(2 * pipeline.stage_index + 1)]
        peaks = []
        for share in ([2] * 7, [2, 1]):
            counting.peak = 0
            pipeline.run(batch(share), 1.0)
            assert not counting.kept  # nothing outlives the step
            peaks.append(counting.peak)
        assert not pipeline._live
        return peaks

    specs = layers(*[lambda: nn.Linear(4, 4), Counting] * num_stages)
    results = on_stages(specs, [2] * num_stages, body, schedule)
    for column, micro_batches in enumerate((7, 2)):
        expected = simulate(find(schedule).order(num_stages, micro_batches), 1, 1, 1).peak_live
        assert [peaks[column] for peaks in results] == expected


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_message_is_kept_after_a_step_or_an_evaluation():
    def body(pipeline):
        data = batch([2] * 4)
        pipeline.run(data, 1.0)
        pipeline.evaluate(data, lambda output, target: {})
        pipeline.forward(data[0][0])
        return len(pipeline._activations._sent), len(pipeline._gradients._sent)

    specs = layers(lambda: nn.Linear(4, 4), Counting, nn.Tanh)
    assert on_stages(specs, [1, 1, 1], body) == [(0, 0)] * 3
