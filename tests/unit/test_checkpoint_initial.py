"""`train --init`: a run on any grid begins with the weights of a plain model or of another run's export."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import EveryKind, assert_same_bits
from plain_loss import plain_loss
from safetensors.torch import load_file, save_file, save_model

from hpc_train.checkpoint.export import export
from hpc_train.checkpoint.initial import read_model
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings
from hpc_train.errors import UserError
from hpc_train.launch.signals import SignalFlag
from hpc_train.tasks.bytelm import ByteLM
from hpc_train.tasks.regression import Regression
from hpc_train.training.layout import Layout
from hpc_train.training.trainer import Trainer

CONFIG = str(Path(__file__).parents[2] / "examples" / "regression.toml")
TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)  # 4 layers
TIED = ByteLM(context=8, hidden=16, blocks=2, heads=2, tied=True)
GRIDS = [
    # ranks, stages, schedule, sharded optimizer
    (1, 1, "1f1b", False),
    (2, 2, "interleaved", False),
    (4, 2, "zb-v", False),
    (4, 2, "gpipe", True),
    (3, 1, "1f1b", True),
]


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, signals_as_before, threads_as_before):
    monkeypatch.chdir(tmp_path)


def settings(stages=1, schedule="1f1b", sharded=False, steps=3):
    return Settings.model_validate(
        {
            "task": "any",
            "grid": {"stages": stages},
            "batch": {"size": 12, "micro_batch": 2},
            "train": {"steps": steps, "threads": 1},
            "optimizer": {"sharded": sharded},
            "pipeline": {"schedule": schedule},
        }
    )


def fit(task, chosen, ranks, run_dir, init=None, resume="auto"):
    """Train; returns the state that all ranks together had before the first step."""

    def body(world):
        layout = Layout(chosen, task, world)
        with Trainer(
            chosen, task, world, layout, SignalFlag(), Path(run_dir), resume=resume, init=init
        ) as trainer:
            begun = {name: tensor.clone() for name, tensor in trainer.worker.take_state().items()}
            trainer.fit()
        return begun

    begun = {}
    for part in run_ranks(ranks, body):
        begun.update(part)
    return {name: tensor for name, tensor in begun.items() if name.startswith("layers.")}


def losses(run_dir):
    lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture
def exported():
    """The weights of a run that has trained for three steps on 2 replicas x 2 stages."""
    fit(TASK, settings(2), 4, "first")
    export(Path("first"), Path("first.safetensors"))
    return Path("first.safetensors")


@pytest.mark.parametrize(("ranks", "stages", "schedule", "sharded"), GRIDS)
def test_an_export_is_what_a_run_on_another_grid_begins_with(exported, ranks, stages, schedule, sharded):
    chosen = settings(stages, schedule, sharded)
    begun = fit(TASK, chosen, ranks, "second", exported)
    assert_same_bits(begun, load_file(exported))
    first, *_, last = losses("second")
    assert first == pytest.approx(plain_loss(chosen, TASK, exported), rel=1e-6)
    assert first < losses("first")[0]
    assert last != first


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plain_models_state_dict_is_as_good(ranks):
    model = TASK.plain_model(seed=7)
    save_file(model.state_dict(), "plain.safetensors")
    chosen = settings(stages=min(ranks, 2), steps=1)
    assert_same_bits(fit(TASK, chosen, ranks, "run", Path("plain.safetensors")), model.state_dict())
    assert losses("run") == [pytest.approx(plain_loss(chosen, TASK, "plain.safetensors"), rel=1e-6)]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_tied_model_as_safetensors_saves_it_begins_with_the_same_weights(stages):
    """save_file refuses tensors in one memory; save_model leaves the second name out, and notes which."""
    model = TIED.plain_model(seed=7)
    save_model(model, "tied.safetensors", metadata={"format": "pt", "best layer": "layers.0.byte.weight"})
    assert len(load_file("tied.safetensors")) == len(model.state_dict()) - 1
    begun = fit(TIED, settings(stages, steps=1), 2, "run", Path("tied.safetensors"))
    assert_same_bits(begun, model.state_dict())


def test_a_run_that_goes_on_keeps_its_own_weights(exported, capsys):
    fit(TASK, settings(steps=2), 1, "run", exported)
    begun = fit(TASK, settings(steps=3), 1, "run", exported)
    assert not torch.equal(begun["layers.0.0.weight"], load_file(exported)["layers.0.0.weight"])
    assert "first.safetensors is not used: the run goes on" in " ".join(capsys.readouterr().out.split())
    assert len(losses("run")) == 3
    again = fit(TASK, settings(steps=1), 1, "run", exported, resume="never")
    assert_same_bits(again, load_file(exported))


def weights():
    return dict(EveryKind().plain_model().state_dict())


def without(*names):
    return {name: tensor for name, tensor in weights().items() if not name.startswith(names)}


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (without("layers.0"), "the model's layers.0.weight [4, 4] is not in it: it holds layers 1-2, 4-5"),
        (without("layers.4.bias"), "the model's layers.4.bias [4] is not in it"),
        ({}, "the model's layers.0.weight [4, 4] is not in it: it holds no layers"),
        (
            {**weights(), "layers.4.weight": torch.zeros(4, 5)},
            "layers.4.weight is [4, 5] there and [4, 4] in this model",
        ),
        (
            {**weights(), "layers.0.extra": torch.zeros(1)},
            "its layers.0.extra [1] is not in this model",
        ),
        (
            {**weights(), "layers.6.weight": torch.zeros(1)},
            "it holds layers 0-2, 4-6, and this model has only layers 0-2, 4-5",
        ),
        ({"model.embed": torch.zeros(1)}, "has 'model.embed', which is no name of the task's plain_model()"),
        ({"layers.head.w": torch.zeros(1)}, "has 'layers.head.w', which is no name of the task's"),
        ({"layers.0": torch.zeros(1)}, "has 'layers.0', which is no name of the task's"),
    ],
)
def test_a_file_of_another_model_is_told_alike_on_all_ranks(held, words):
    save_file({name: tensor.clone() for name, tensor in held.items()}, "other.safetensors")
    assert words in refused("other.safetensors")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.safetensors", None, "none.safetensors: no such file (looked in "),
        (".", None, ".: no such file"),
        ("text.safetensors", "layers", "text.safetensors is no safetensors file: "),
        ("empty.safetensors", "", "empty.safetensors is no safetensors file: "),
    ],
)
def test_a_file_that_cannot_be_read_is_told_alike_on_all_ranks(name, text, words):
    if text is not None:
        Path(name).write_text(text)
    assert f"cannot begin with {name}: " in refused(name)
    assert words in refused(name)


def refused(name):
    """The one line that two ranks, with layers 0-2 and 3-5, raise alike."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights().items()}

    def body(world):
        mine = re.compile(r"layers\.[012]\." if world.rank == 0 else r"layers\.[345]\.")
        wanted = {name: shape for name, shape in shapes.items() if mine.match(name)}
        with pytest.raises(UserError) as caught:
            read_model(Path(name), wanted, world.control)
        return str(caught.value)

    one, other = run_ranks(2, body)
    assert one == other
    assert "\n" not in one
    return one


def test_each_rank_reads_its_own_layers_and_nothing_of_an_optimizer():
    save_file({name: tensor.clone() for name, tensor in weights().items()}, "whole.safetensors")

    def body(world):
        wanted = {f"layers.{4 * world.rank}.weight": (4, 4), f"layers.{4 * world.rank}.bias": (4,)}
        more = {} if world.rank else {name: tuple(t.shape) for name, t in without("layers.4").items()}
        state = {f"optimizer/layers.{4 * world.rank}.weight/exp_avg": (4, 4)}
        return read_model(Path("whole.safetensors"), wanted | more | state, world.control)

    one, other = run_ranks(2, body)
    assert_same_bits(one, without("layers.4"))
    assert sorted(other) == ["layers.4.bias", "layers.4.weight"]


def test_a_wrong_file_on_the_command_line_is_one_line_and_exit_code_2(hpc_train_here):
    save_file({"layers.0.0.weight": torch.zeros(2, 2)}, "other.safetensors")
    code, out, err = hpc_train_here("train", CONFIG, "train.steps=1", "--init", "other.safetensors")
    assert (code, out) == (2, "")
    assert err.startswith("error: other.safetensors is of another model: layers.0.0.weight is [2, 2] there")
    assert err.count("\n") == 1
