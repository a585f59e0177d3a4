"""A run with grid="auto" that goes on keeps what it had chosen: random numbers depend on the micro-batch."""

import pytest
from profiles import even_layers

from hpc_train.checkpoint import manifest as manifests
from hpc_train.checkpoint.manifest import FORMAT, Manifest
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings, changed
from hpc_train.planning.cluster import Cluster
from hpc_train.tasks.regression import Regression
from hpc_train.training import autoplan
from hpc_train.training.autoplan import resolve

TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)  # 4 layers
MEASURED = "measuring layers and network to choose what the settings leave open"


def settings(**sections):
    given = {"task": "regression", "grid": "auto", "batch": {"size": 16}, "train": {"threads": 1}}
    return Settings.model_validate({**given, **sections})


CHOSEN = changed(
    settings(),
    {
        "grid.auto": False,
        "grid.stages": 2,
        "batch.micro_batch": 3,  # which no plan would choose
        "pipeline.schedule": "zb-h1",
        "pipeline.split": (3, 1),
        "gradients.wire": "fp16",
    },
)

SAVED = CHOSEN.to_toml()


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """Resolves settings beside a checkpoint of `CHOSEN` on two ranks; what was told on rank 0."""
    monkeypatch.setattr(autoplan, "measure_all", lambda *args: (even_layers(4), Cluster(args[2].size, 4)))

    def run(given, ranks=2, resume="auto", saved=SAVED, wrote=2):
        path = tmp_path / "checkpoints" / "step-00000002"
        path.mkdir(parents=True, exist_ok=True)
        state = {"settings": saved, **({"ranks": wrote} if wrote else {})}
        manifests.write(path, Manifest(format=FORMAT, step=2, serial=1, files={}, tensors={}, state=state))
        told = []

        def body(world):
            note = told.append if world.rank == 0 else pytest.fail
            return resolve(given, TASK, world, note, tmp_path, resume)

        first, *others = run_ranks(ranks, body)
        assert all(other == first for other in others)
        return first, told

    return run


ALLOWED = settings(gradients={"tune_wires": ["fp16"]})


def test_as_many_ranks_go_on_as_they_began(resumed, tmp_path):
    kept, told = resumed(ALLOWED)
    assert kept.grid == CHOSEN.grid
    assert kept.batch == CHOSEN.batch
    assert kept.pipeline.model_dump() == CHOSEN.pipeline.model_dump()
    assert (kept.gradients.wire, kept.gradients.tune_wires) == ("fp16", ())
    path = tmp_path / "checkpoints" / "step-00000002"
    assert told == [
        f"grid=auto goes on as {path} had chosen: 1x2 replicas x stages, zb-h1, micro-batches of 3"
    ]


def test_the_checkpoint_that_is_named_counts(resumed, tmp_path):
    assert resumed(ALLOWED, resume=str(tmp_path))[0].batch.micro_batch == 3
    assert MEASURED in resumed(ALLOWED, resume=str(tmp_path / "none"))[1]


def test_what_is_given_now_as_it_was_chosen_is_no_reason_to_measure(resumed):
    given = changed(ALLOWED, {"batch.micro_batch": 3, "pipeline.split": "auto", "pipeline.recompute": "auto"})
    assert MEASURED not in resumed(given)[1]


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, {"ranks": 4}),
        ({}, {"wrote": 0}),  # by a version that did not say its ranks
        ({}, {"resume": "never"}),
        ({"batch.micro_batch": 4}, {}),
        ({"grid.stages": 1}, {}),
        ({"pipeline.schedule": "gpipe"}, {}),
        ({"batch.size": 32}, {}),
        ({"gradients.tune_wires": ()}, {}),  # fp16 is no longer allowed
        ({}, {"saved": SAVED.replace("zb-h1", "zb-h7")}),  # of another version
        ({}, {"saved": "no = [toml"}),
        ({}, {"saved": SAVED.replace("3,\n    1,", "3,\n    2,")}),  # of another model
    ],
)
def test_otherwise_it_is_measured_anew(resumed, values, more):
    again, told = resumed(changed(ALLOWED, values), **more)
    assert told[0] == MEASURED
    assert again.grid.auto is False
    assert again.pipeline.split != (3, 1)
