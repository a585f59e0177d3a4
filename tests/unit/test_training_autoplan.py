"""What settings leave open is measured and chosen alike on all ranks; what they give stays."""

import threading

import pytest
from profiles import even_layers

from hpc_train.comm.interface import Wire
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import Settings, changed
from hpc_train.errors import UserError
from hpc_train.planning.cluster import Cluster
from hpc_train.planning.options import Options
from hpc_train.tasks.regression import Regression
from hpc_train.training import autoplan
from hpc_train.training.autoplan import is_open, options_of, resolve

pytestmark = pytest.mark.usefixtures("threads_as_before")

TASK = Regression(samples=40, inputs=3, hidden=8, depth=3)  # 4 layers


def settings(grid="auto", **sections):
    train = {"threads": 1}
    return Settings.model_validate({"task": "regression", "grid": grid, "train": train, **sections})


@pytest.fixture
def planned_with(monkeypatch):
    """Resolves settings with a profile and a cluster that were not measured; what was told, by rank."""

    def run(chosen, profile, ranks=1, **cluster):
        machines = Cluster(ranks, ranks, **cluster)
        monkeypatch.setattr(autoplan, "measure_all", lambda *args: (profile, machines))
        told = [[] for _ in range(ranks)]

        def body(world):
            return resolve(chosen, TASK, world, told[world.rank].append)

        return run_ranks(ranks, body), told

    return run


def test_what_is_open():
    assert is_open(settings("auto"))
    assert is_open(settings({"auto": True, "fastest": "replica", "stages": 2}))
    assert is_open(settings({"stages": 2}, pipeline={"recompute": "auto"}))
    assert not is_open(settings({"stages": 2}))
    assert not is_open(settings({}, pipeline={"recompute": "all"}))


def test_nothing_given_leaves_all_to_the_planner_but_what_gradients_are():
    assert options_of(settings("auto")) == Options()


def test_what_the_user_gives_is_kept_and_the_rest_is_open():
    options = options_of(
        settings(
            {"auto": True, "fastest": "replica", "stages": 2},
            batch={"size": 64, "micro_batch": 3},
            pipeline={"schedule": "interleaved", "chunks": 4, "recompute": "none", "wire": "bf16"},
            gradients={"wire": "int8", "error_feedback": False, "bucket_bytes": "1MiB", "overlap": False},
            optimizer={"sharded": True},
        )
    )
    assert options == Options(
        schedules=("interleaved",),
        chunks=(4,),
        stages=(2,),
        fastest=("replica",),
        micro_batches=(3,),
        recompute=("none",),
        wires=(Wire.INT8,),
        pipeline_wires=(Wire.BF16,),
        sharded=True,
        error_feedback=False,
        bucket_bytes=2**20,
        overlap=False,
    )
    half = options_of(settings("auto", batch={"size": 64}, pipeline={"recompute": "auto"}))
    assert half == Options()


def test_wires_are_those_given_and_those_that_may_be_tried():
    """Wires change a run's numbers: none is chosen that the settings do not name."""
    wires = {"wire": "fp16", "tune_wires": ["int8", "fp16"]}
    sections = {"gradients": wires, "pipeline": {"tune_wires": ["bf16"]}}
    options = options_of(settings("auto", **sections))
    assert options.wires == (Wire.FP16, Wire.INT8)
    assert options.pipeline_wires == (Wire.FP32, Wire.BF16)
    fixed = settings({"stages": 2}, gradients={**wires, "tune": True}, pipeline={"recompute": "auto"})
    assert options_of(fixed).wires == (Wire.FP16,)


def test_wires_that_were_chosen_are_not_chosen_again(planned_with):
    sections = {"gradients": {"tune_wires": ["int8"]}, "pipeline": {"tune_wires": ["bf16"]}}
    profile = even_layers(4, parameter_bytes=1000, output_bytes=1000)
    (one, other), _ = planned_with(settings("auto", **sections), profile, 2, bandwidth=1.0)
    assert one == other
    assert (one.gradients.tune_wires, one.pipeline.tune_wires) == ((), ())
    tuned = settings("auto", gradients={"tune": True, "tune_wires": ["int8"]})
    assert planned_with(tuned, profile)[0][0].gradients.tune_wires == ("int8",)  # the first steps try it, too


def test_a_fixed_grid_leaves_recomputation_alone_to_choose():
    options = options_of(
        settings({"stages": 2}, pipeline={"recompute": "auto"}, batch={"size": 12, "micro_batch": 2})
    )
    assert (options.stages, options.schedules, options.micro_batches) == ((2,), ("1f1b",), (2,))
    assert (options.fastest, options.recompute) == (("stage",), ("none", "all"))
    (fixed,) = options_of(settings({"stages": 2}, pipeline={"recompute": "all"})).recompute
    assert fixed == "all"


def test_a_fixed_grid_has_the_chunks_of_its_run():
    """A stage of interleaved holds two unless the settings say otherwise; the planner may try more."""
    sections = {"schedule": "interleaved", "recompute": "auto"}
    assert options_of(settings({"stages": 2}, pipeline=sections)).chunks == (2,)
    assert options_of(settings({"stages": 2}, pipeline={**sections, "chunks": 3})).chunks == (3,)
    assert options_of(settings("auto", pipeline=sections)).chunks == Options().chunks


def test_settings_that_leave_nothing_open_are_not_measured(monkeypatch):
    monkeypatch.setattr(autoplan, "measure", lambda *args: pytest.fail("measured"))
    given = settings({"stages": 2}, batch={"size": 12, "micro_batch": 2})
    assert run_ranks(2, lambda world: resolve(given, TASK, world, pytest.fail)) == [given, given]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_all_ranks_choose_the_same_and_rank_0_tells_what(hosts):
    given = settings("auto", batch={"size": 12})
    told = [[] for _ in hosts]

    def body(world):
        return resolve(given, TASK, world, told[world.rank].append)

    first, *others = run_ranks(len(hosts), body, hosts=hosts)
    assert all(other == first for other in others)
    assert not is_open(first)
    assert first.grid.auto is False
    assert 4 % first.grid.stages == 0
    assert sum(first.pipeline.split) == 4
    assert first.batch.size == 12
    assert first.gradients == given.gradients
    assert told[0][0].startswith("measuring layers and network")
    assert any(line.startswith("1 ") and f"{4 // first.grid.stages}x{first.grid.stages}" in line
               for line in told[0])  # fmt: skip
    assert told[1:] == [[], [], []]


def test_ranks_that_measured_different_things_choose_the_same(monkeypatch):
    """Where an update takes long two stages win, as each rank has half the parameters to update."""

    def measured(*args):
        rank = int(threading.current_thread().name.removeprefix("rank "))
        profile = even_layers(4, parameter_bytes=1000)
        return profile.model_copy(update={"optimizer_s_a_byte": 10.0 * rank})

    monkeypatch.setattr(autoplan, "measure", measured)
    given = settings("auto", batch={"size": 2})
    one, other = run_ranks(2, lambda world: resolve(given, TASK, world, lambda line: None))
    assert one == other


def test_a_slow_rank_slows_its_host_in_the_plan(monkeypatch):
    """The profile is the ranks' median, and each rank is told against it."""
    seen = []

    def measured(*args):
        rank = int(threading.current_thread().name.removeprefix("rank "))
        return even_layers(4, sample_s=[1.0, 1.0, 2.0][rank])

    def cluster(world, device, speed):
        seen.append((world.rank, speed))
        return Cluster(3, 1)

    monkeypatch.setattr(autoplan, "measure", measured)
    monkeypatch.setattr(autoplan, "measure_cluster", cluster)
    run_ranks(3, lambda world: resolve(settings("auto"), TASK, world, lambda line: None))
    assert sorted(seen) == [(0, 1.0), (1, 1.0), (2, 0.5)]


LAYERS = even_layers(4, activation_bytes=1000, output_bytes=10)


@pytest.mark.parametrize(
    ("memory_bytes", "recompute"),
    [
        (1e9, "none"),
        (8000, "none"),  # 4 layers of a micro-batch of 2
        (7999, "all"),
        (2060, "all"),  # 3 inputs of 2 x 10, and one layer's 2 x 1000
    ],
)
def test_recomputation_only_where_memory_fits_with_it_alone(planned_with, memory_bytes, recompute):
    given = settings({}, batch={"size": 4, "micro_batch": 2}, pipeline={"recompute": "auto"})
    (resolved,), _ = planned_with(given, LAYERS, memory_bytes=memory_bytes)
    assert resolved == changed(given, {"pipeline.recompute": recompute, "grid.auto": False})


def test_nothing_else_of_a_fixed_grid_is_changed(planned_with):
    given = settings(
        {"stages": 2, "fastest": "replica"},
        batch={"size": 16, "micro_batch": 2},
        pipeline={"recompute": "auto", "schedule": "zb-h1", "split": (3, 1), "wire": "bf16"},
    )
    resolved, _ = planned_with(given, LAYERS, ranks=4, memory_bytes=1e9)
    expected = {**given.model_dump(), "pipeline": {**given.pipeline.model_dump(), "recompute": "none"}}
    assert [one.model_dump() for one in resolved] == [expected] * 4


@pytest.mark.parametrize("grid", ["auto", {"stages": 2}])
def test_a_model_that_fits_nowhere_is_a_users_mistake_of_one_line_on_every_rank(planned_with, grid):
    given = settings(grid, batch={"size": 16, "micro_batch": 2}, pipeline={"recompute": "auto"})
    with pytest.raises(UserError, match=r"^none of \d+ ways fits into 100 B a rank: the least, ") as caught:
        planned_with(given, LAYERS, ranks=2, memory_bytes=100)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stages", "sections", "words"),
    [
        (3, {}, "3 stages cannot share 4 ranks evenly"),
        (4, {"schedule": "interleaved"}, "4 layers cannot fill 4 stages of 2 chunks"),
        (2, {"split": (1, 2)}, "holds 3 layers, but the model has 4"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_as_a_run_would_before_anything_is_measured(
    monkeypatch, stages, sections, words
):
    monkeypatch.setattr(autoplan, "measure", lambda *args: pytest.fail("measured"))
    given = settings({"stages": stages}, pipeline={"recompute": "auto", **sections})
    with pytest.raises(UserError, match=words):
        run_ranks(4, lambda world: resolve(given, TASK, world, lambda line: None))


def test_a_split_that_is_given_is_kept_and_says_how_many_stages_there_are(planned_with):
    chosen = settings("auto", batch={"size": 8}, pipeline={"split": [1, 3], "schedule": "1f1b"})
    (first, *others), _ = planned_with(chosen, even_layers(4), ranks=4)
    assert (first.grid.stages, first.pipeline.split) == (2, (1, 3))
    assert others == [first] * 3


def test_recompute_is_judged_by_the_split_that_the_run_will_have(planned_with):
    """Stages of 2 layers would keep little more than 200 bytes, the one of 3 keeps 300."""
    layers = even_layers(4, activation_bytes=100, output_bytes=1)
    given = {"recompute": "auto", "split": [1, 3]}
    chosen = settings({"stages": 2}, batch={"size": 1, "micro_batch": 1}, pipeline=given)
    for memory_bytes, expected in ((320, "none"), (240, "all")):
        (first, _), _ = planned_with(chosen, layers, ranks=2, memory_bytes=memory_bytes)
        assert (first.pipeline.recompute, first.pipeline.split) == (expected, (1, 3))
