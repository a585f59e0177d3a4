"""What is measured of a model: bytes computed by hand, equal layers once, times that make sense."""

from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_train.config import Settings
from hpc_train.pipeline.layers import LayerSpec
from hpc_train.planning.profile import check_profile, read_profile
from hpc_train.tasks.bytelm import ByteLM
from hpc_train.tasks.task import Task
from hpc_train.tasks.translate import Translate
from hpc_train.training import profiling

CPU = torch.device("cpu")
FLOAT = 4  # bytes


class Layers(Task):
    """Any layers on inputs of 3 numbers, or those given."""

    def __init__(self, *builds, inputs=None):
        self.specs = [LayerSpec(build) for build in builds]
        self.inputs = torch.zeros(5, 3) if inputs is None else inputs

    def layers(self):
        return self.specs

    def loss(self, output, target):
        return (output - target).square().sum(dim=1)

    def dataset(self, split):
        return TensorDataset(self.inputs, torch.zeros(len(self.inputs), 1))


def linear_tanh(inputs, outputs, trained=True):
    """Tanh keeps its output, the linear layer its input; their memory may be one."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh()).requires_grad_(trained)


def linear_gelu(inputs, outputs):
    """Both keep their inputs."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU())


def settings(micro_batch=8, **optimizer):
    batch = {"size": 64, "micro_batch": micro_batch}
    return Settings(task="any", batch=batch, optimizer=optimizer)


def measure(task, chosen=None, progress=lambda line: None):
    profile = profiling.measure(chosen or settings(), task, CPU, "here", progress)
    check_profile(profile)
    return profile


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still but for the spans it is given: three of each repetition."""

    def run(*spans_s):
        moments, spans = count(), [0.0]
        for forward_s, input_s, weight_s in spans_s:
            spans += [forward_s, input_s, weight_s, 0.0]
        at = [sum(spans[: i + 1]) for i in range(len(spans))]
        monkeypatch.setattr(profiling, "_now", lambda device: at[min(next(moments), len(at) - 1)])
        monkeypatch.setattr(profiling, "_measure_optimizer", lambda *args: (2.0, 0.0))

    return run


def test_bytes_of_layers_are_those_computed_by_hand():
    hidden = partial(linear_tanh, 4, 4)
    frozen = partial(linear_tanh, 4, 4, trained=False)
    layers = measure(Layers(partial(linear_tanh, 3, 4), hidden, frozen, partial(nn.Linear, 4, 1))).layers
    numbers = [3 * 4 + 4, 4 * 4 + 4, 4 * 4 + 4, 4 + 1]
    assert [layer.parameter_bytes for layer in layers] == [FLOAT * number for number in numbers]
    assert [layer.frozen_bytes for layer in layers] == [0, 0, FLOAT * 20, 0]
    assert [layer.output_bytes for layer in layers] == [FLOAT * 4, FLOAT * 4, FLOAT * 4, 0]
    # The first keeps its input; the others' inputs are kept by the layer before. The last keeps its error.
    assert [layer.activation_bytes for layer in layers] == [FLOAT * 7, FLOAT * 4, FLOAT * 4, FLOAT * 1]
    assert [layer.title for layer in layers] == ["layer 0", "layer 1", "layer 2", "layer 3"]


def test_an_input_counts_where_the_layer_before_does_not_keep_it():
    """The second and the fourth layer are the same, but what comes in was kept for one of them alone."""
    tanh, gelu = partial(linear_tanh, 4, 4), partial(linear_gelu, 4, 4)
    layers = measure(Layers(partial(linear_tanh, 3, 4), tanh, gelu, tanh, gelu, partial(nn.Linear, 4, 1)))
    kept = [layer.activation_bytes / FLOAT for layer in layers.layers]
    assert kept == [3 + 4, 4, 4, 4 + 4, 4, 4 + 1]
    outputs = [layer.kept_output_bytes / FLOAT for layer in layers.layers]
    assert outputs == [4, 4, 0, 4, 0, 0]  # tanh keeps its output, gelu its input


def test_layers_that_are_the_same_are_measured_once():
    told = []
    hidden = partial(linear_tanh, 4, 4)
    layers = [partial(linear_tanh, 3, 4), *[hidden] * 3, partial(linear_tanh, 4, 4), partial(nn.Linear, 4, 1)]
    profile = measure(Layers(*layers), progress=told.append)
    assert told == [f"measuring layer {number} of 6" for number in (1, 2, 6)]
    assert len(profile.layers) == 6
    assert profile.layers[4] == profile.layers[1].model_copy(update={"title": "layer 4"})
    assert profile.source == "here"


def test_layers_whose_arguments_cannot_be_compared_are_measured_each():
    told = []

    def wide(sizes):
        return linear_tanh(*sizes)

    layers = [partial(wide, [3, 4]), partial(wide, [4, 4]), partial(wide, [4, 4]), partial(nn.Linear, 4, 1)]
    measure(Layers(*layers), progress=told.append)
    assert len(told) == 4


def test_the_same_layer_with_inputs_of_another_form_is_measured_again():
    class Once(nn.Module):
        """Three numbers become six, and six stay six."""

        def forward(self, x):
            return torch.cat([x, x], dim=1) if x.shape[1] == 3 else x

    told = []
    profile = measure(
        Layers(Once, Once, Once, partial(nn.Linear, 6, 1)), settings(micro_batch=2), told.append
    )
    assert told == [f"measuring layer {number} of 4" for number in (1, 2, 4)]
    assert [layer.output_bytes for layer in profile.layers] == [FLOAT * 6] * 3 + [0]


def test_layers_without_parameters_and_whole_numbers_as_inputs():
    class OneHot(nn.Module):
        def forward(self, digits):
            return nn.functional.one_hot(digits, 5).float()

    task = Layers(OneHot, partial(nn.Linear, 5, 1), nn.Tanh, inputs=torch.arange(5))
    one_hot, linear, tanh = measure(task).layers
    assert (one_hot.parameter_bytes, one_hot.activation_bytes, one_hot.output_bytes) == (0, 0, FLOAT * 5)
    assert one_hot.input.most_s == one_hot.weight.most_s == 0  # nobody waits for a gradient
    assert linear.activation_bytes == FLOAT * 5
    assert (tanh.parameter_bytes, tanh.activation_bytes) == (0, 2 * FLOAT)  # its output, and the error


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_tie_is_trained_or_frozen_as_its_owner(frozen):
    """The layers are equal but for what their builds freeze."""

    def build(number):
        return nn.Linear(3, 3, bias=False).requires_grad_(number != frozen)

    task = Layers(partial(nn.Linear, 3, 3), partial(nn.Linear, 3, 1))
    task.specs[1:1] = [LayerSpec(partial(build, number), tied="one") for number in range(2)]
    tied = measure(task).layers[1:3]
    if frozen == 0:
        assert [(layer.frozen_bytes, layer.tied) for layer in tied] == [(FLOAT * 9, {})] * 2
    else:
        assert [(layer.frozen_bytes, layer.tied) for layer in tied] == [
            (0, {"layers.1.weight": FLOAT * 9})
        ] * 2


def test_a_small_language_model_with_tied_embeddings():
    task = ByteLM(context=8, hidden=16, blocks=3, heads=2, tied=True)
    told = []
    profile = measure(task, settings(micro_batch=2), told.append)
    embed, *blocks, head = profile.layers
    assert [layer.title for layer in profile.layers] == ["embed", "block 1", "block 2", "block 3", "head"]
    assert len(told) == 3
    matrix = FLOAT * 256 * 16
    assert embed.tied == head.tied == {"layers.0.byte.weight": matrix}
    assert not any(block.tied for block in blocks)
    assert embed.parameter_bytes == matrix + FLOAT * 8 * 16
    assert head.parameter_bytes == matrix + FLOAT * 2 * 16
    assert {layer.output_bytes for layer in (embed, *blocks)} == {FLOAT * 8 * 16}
    assert all(block.activation_bytes > 4 * block.output_bytes for block in blocks)


def test_a_small_translator_that_passes_tuples_on():
    pytest.importorskip("django")
    pytest.importorskip("polib")
    task = Translate(hidden=16, blocks=2, heads=2, context=8, dropout=0.1)
    told = []
    profile = measure(task, settings(micro_batch=2), told.append)
    assert told == [f"measuring layer {number} of 6" for number in (1, 2, 4, 5, 6)]  # encoders are alike
    vectors = FLOAT * 8 * 16
    mask = 8  # bytes
    expected = [*[2 * vectors + mask] * 4, vectors, 0]
    assert [layer.output_bytes for layer in profile.layers] == expected
    assert profile.layers[0].tied == profile.layers[-1].tied == {"layers.0.token.weight": FLOAT * 768 * 16}


def test_batch_norm_can_be_measured_with_any_micro_batch_that_it_trains_with():
    """BatchNorm refuses a single sample, and 4 samples / 4 are one."""
    task = Layers(partial(nn.Linear, 3, 2), partial(nn.BatchNorm1d, 2), partial(nn.Linear, 2, 1))
    for micro_batch in (2, 3, 4):
        assert measure(task, settings(micro_batch)).layers[1].parameter_bytes == FLOAT * 4


def test_a_micro_batch_of_one_and_one_larger_than_the_data():
    for micro_batch in (1, 12):  # of 5 samples
        (layer,) = measure(Layers(partial(nn.Linear, 3, 1)), settings(micro_batch)).layers
        assert layer.activation_bytes == FLOAT * (3 + 1)


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        ({"name": "adamw"}, 2),
        ({"name": "sgd", "momentum": 0.9}, 1),
        ({"name": "sgd", "momentum": 0.0}, 0),
    ],
)
def test_what_the_optimizer_keeps_for_each_byte_of_a_parameter(optimizer, numbers):
    profile = measure(Layers(partial(nn.Linear, 3, 1)), settings(**optimizer))
    assert profile.optimizer_bytes_a_byte == numbers
    assert profile.optimizer_s_a_byte > 0


def test_a_profile_survives_its_file(tmp_path):
    profile = measure(Layers(partial(linear_tanh, 3, 4), partial(nn.Linear, 4, 1)))
    (tmp_path / "a.json").write_text(profile.to_json())
    assert read_profile(tmp_path / "a.json") == profile


def test_times_are_those_of_each_size_without_the_first_repetition(clock):
    slow = [(0.3, 0.3, 0.3)]  # what the first call costs
    clock(*slow, *[(0.02, 0.04, 0.06)] * 3, *slow, *[(0.08, 0.16, 0.24)] * 3)
    (layer,) = measure(Layers(partial(nn.Linear, 3, 1))).layers
    for curve, sample_s in zip(layer.curves, (0.01, 0.02, 0.03), strict=True):
        assert [point[0] for point in curve.points] == [2, 8]
        assert curve.points[0][1] == pytest.approx(2 * sample_s)
        assert curve.points[1][1] == pytest.approx(8 * sample_s)


def test_short_times_are_measured_more_often(clock):
    """One call of many may be slow: 0.1 s of each size are measured, or 20 calls."""
    clock(*[(0.001, 0.0, 0.0)] * 21, *[(0.02, 0.0, 0.0)] * 3, (0.9, 0.0, 0.0), *[(0.02, 0.0, 0.0)] * 2)
    (layer,) = measure(Layers(partial(nn.Linear, 3, 1))).layers
    assert layer.forward.points == ((2, pytest.approx(0.001)), (8, pytest.approx(0.02)))


def test_an_open_micro_batch_is_measured_up_to_the_batch_while_layers_are_quick(clock):
    chosen = Settings(task="any", batch={"size": 128})
    clock(*[(0.01, 0.0, 0.0)] * 11, *[(0.04, 0.0, 0.0)] * 4, *[(0.16, 0.0, 0.0)] * 4)
    (layer,) = measure(Layers(partial(nn.Linear, 3, 1)), chosen).layers
    assert [samples for samples, _ in layer.forward.points] == [2, 8, 32]
    given = Settings(task="any", batch={"size": 128, "micro_batch": 8})
    clock(*[(0.01, 0.0, 0.0)] * 99)
    (layer,) = measure(Layers(partial(nn.Linear, 3, 1)), given).layers
    assert [samples for samples, _ in layer.forward.points] == [2, 8]


def test_no_layer_is_measured_with_more_samples_than_the_one_before(clock):
    """What the first layer took too long for does not reach the second."""
    chosen = Settings(task="any", batch={"size": 128})
    clock(*[(0.04, 0.0, 0.0)] * 4, *[(0.2, 0.0, 0.0)] * 4)
    first, second = measure(Layers(partial(nn.Linear, 3, 2), partial(nn.Linear, 2, 1)), chosen).layers
    assert [[at for at, _ in layer.forward.points] for layer in (first, second)] == [[2, 8], [2, 8]]


def test_a_layer_that_takes_long_runs_once(clock):
    calls = []

    class Slow(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    clock((1.5, 0.0, 0.0), (2.0, 0.0, 0.0))
    (layer,) = measure(Layers(partial(Slow, 3, 1))).layers
    assert calls == [2, 8]
    assert layer.forward.seconds(8) == pytest.approx(2.0)
