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


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
@pytest.mark.usefixtures("no_garbage_collection")
def test_with_halves_and_several_chunks_too(schedule):
    """Of a micro-batch whose first half is over only what its second half needs is kept."""
    num_stages = 3
    chunks = find(schedule).chunks

    def body(pipeline):
        counting = [layer for layer in pipeline.stage.layers.values() if isinstance(layer, Counting)]
        peak, run = [0, 0], pipeline._work.forward

        def forward(*args):
            peak[0] = max(peak[0], len(pipeline._live))
            output = run(*args)
            peak[1] = max(peak[1], sum(len(layer.kept) for layer in counting))
            return output

        pipeline._work.forward = forward
        pipeline.run(batch([2] * 7), 1.0)
        assert not any(layer.kept for layer in counting)
        assert not pipeline._live
        return peak

    specs = layers(*[lambda: nn.Linear(4, 4), Counting] * num_stages * chunks)
    results = on_stages(specs, [2] * num_stages * chunks, body, schedule)
    expected = simulate(find(schedule).order(num_stages, 7), 1, 1, 1).peak_live
    assert [live for live, _ in results] == expected
    assert all(kept <= live for live, kept in results)
    if schedule == "interleaved":
        assert [kept for _, kept in results] == expected


@pytest.mark.usefixtures("no_garbage_collection")
def test_no_message_is_kept_after_a_step_or_an_evaluation():
    def body(pipeline):
        data = batch([2] * 4)
        pipeline.run(data, 1.0)
        pipeline.evaluate(data, lambda output, target: {})
        pipeline.forward(data[0][0])
        traffic = pipeline._traffic
        boxes = (traffic._activations, traffic._gradients)
        return [len(box._sent) for box in boxes], len(traffic._arriving), len(traffic._outputs)

    specs = layers(lambda: nn.Linear(4, 4), Counting, nn.Tanh)
    assert on_stages(specs, [1, 1, 1], body) == [([0, 0], 0, 0)] * 3
