"""What would train wrongly without a word is refused, in one line."""

import pytest
import torch
from torch import nn

from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.data.loader import Loader
from hpc_train.errors import EXIT_FAILED, UserError
from hpc_train.pipeline.layers import LayerSpec, layer_name, shared_layers
from hpc_train.pipeline.runtime import Pipeline
from hpc_train.pipeline.schedules import find
from hpc_train.pipeline.stage import Stage
from hpc_train.stopwatch import Stopwatch
from hpc_train.training.guard import guard
from hpc_train.training.layout import split_layers


def tied_layers():
    shared = nn.Linear(3, 3)
    return [LayerSpec(lambda: shared), LayerSpec(lambda: nn.Linear(3, 3)), LayerSpec(lambda: shared)]


def settings(stages, split="auto"):
    return Settings.model_validate(
        {"task": "regression", "grid": {"stages": stages}, "pipeline": {"split": split}}
    )


def test_layers_that_share_parameters_stand_on_one_stage():
    assert shared_layers(tied_layers()) == [(0, 2)]
    with pytest.raises(UserError, match=r"layers 0 and 2 share parameters, but stand on stages 0 and 1"):
        split_layers(settings(2), tied_layers())
    assert split_layers(settings(1), tied_layers()) == [range(3)]
    more = [*tied_layers(), LayerSpec(lambda: nn.Linear(3, 3))]
    assert split_layers(settings(2, (3, 1)), more) == [range(3), range(3, 4)]


def test_layers_that_read_values_while_they_are_built():
    rates = LayerSpec(lambda: nn.Dropout(torch.linspace(0, 0.5, 3)[1].item()), title="drop")
    with pytest.raises(UserError, match="layer drop reads values while it is built"):
        split_layers(settings(2), [rates, rates])
    known = [LayerSpec(rates.build, cost=1.0) for _ in range(2)]
    assert split_layers(settings(2), known) == [range(1), range(1, 2)]


def test_a_task_without_layers():
    with pytest.raises(UserError, match="has 0 layers"):
        split_layers(settings(1), [])


def pipeline(layer, loss):
    stage = Stage({0: [(layer_name(0), layer)]}, 1)
    return Pipeline(stage, None, 0, 1, find("1f1b"), loss, Stopwatch())


def test_a_loss_that_was_detached():
    trains_nothing = pipeline(
        nn.Linear(2, 1), lambda output, target: (output[:, 0] - target).square().detach()
    )
    with pytest.raises(UserError, match="does not depend on the model's output"):
        trains_nothing.run([(torch.ones(4, 2), torch.ones(4))], scale=0.25)


def test_a_frozen_model_is_no_mistake():
    frozen = nn.Linear(2, 1).requires_grad_(False)
    loss = pipeline(frozen, lambda output, target: (output[:, 0] - target).square())
    assert loss.run([(torch.ones(4, 2), torch.ones(4))], scale=0.25).total > 0


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_dataset_that_cannot_be_sent_to_a_worker():
    class Local(torch.utils.data.Dataset):  # pickle finds classes by the module they stand in
        def __getitem__(self, index):
            return torch.zeros(1), torch.zeros(1)

    loader = Loader(Local(), 1, 2, torch.device("cpu"), 0)
    with pytest.raises(UserError, match=r"data.workers=1: the dataset Local cannot be sent"):
        loader.load([0, 1])
    loader.close()


def test_a_task_that_exits_is_a_failure_and_told(capfd):
    def leave():
        raise SystemExit(0)

    def body(world):
        with pytest.raises(SystemExit) as ended:
            guard(world, leave)
        return ended.value.code

    assert run_ranks(1, body) == [EXIT_FAILED]
    assert "rank 0 of 1" in capfd.readouterr().err
