"""`hpc-train plan` for a cluster that need not be there: what is printed, written and refused."""

import json
import re
from pathlib import Path

import pytest

from hpc_train.config import load
from hpc_train.training import foresee as foresee_file

CONFIG = str(Path(__file__).parents[2] / "examples" / "regression.toml")  # 5 layers
CLUSTER = ["--ranks", "4", "--ranks-per-host", "2", "--bandwidth", "1GB/s", "--latency", "5us"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch, threads_as_before):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(hpc_train_here):
    """Runs `hpc-train plan`; returns what it printed, and on stderr."""

    def run(*args, config=CONFIG, code=0):
        ended, out, err = hpc_train_here("plan", config, *args)
        assert ended == code
        return out, err

    return run


@pytest.fixture
def refused(plan):
    """Runs a `plan` that must be refused; returns the one line behind `error: `."""

    def run(*args):
        out, err = plan(*args, code=2)
        assert out == ""
        *progress, error = err.splitlines()
        assert error.startswith("error: ")
        assert all(line.startswith("measuring layer ") for line in progress)
        return error.removeprefix("error: ")

    return run


@pytest.fixture
def profile(tmp_path):
    """Layers that were measured elsewhere: five equal ones."""
    curve = {"points": [[1, 11e-5], [2, 21e-5]]}
    layer = {"forward": curve, "input": curve, "weight": curve, "parameter_bytes": 4000}
    layer |= {"activation_bytes": 1000, "output_bytes": 100}
    path = tmp_path / "five.json"
    path.write_text(json.dumps({"layers": [layer] * 5, "source": "five equal layers"}))
    return path


def best_grid(out):
    """(replicas, stages) of the first row of the table."""
    (row,) = [line for line in out.splitlines() if line.startswith("1 ")]
    return tuple(map(int, row.split()[1].split("x")))


def test_a_plan_names_the_profile_the_best_grids_and_the_schedule(plan, profile):
    out, err = plan(*CLUSTER, "--profile", profile)
    assert err == ""
    source, considered, table, split, losers, schedule = out.rstrip().split("\n\n")
    assert source == "profile: five equal layers"
    assert "ways considered" in considered
    assert table.split()[:3] == ["grid", "fastest", "schedule"]
    replicas, stages = best_grid(out)
    assert replicas * stages == 4
    assert split.startswith("layers of each chunk of the best: ")
    assert losers.startswith("why others lose:")
    assert len([line for line in schedule.splitlines() if line.startswith("stage ")]) == stages


def test_a_grid_that_is_left_open_is_planned_for_without_a_word_of_the_cluster(plan, profile):
    out, _ = plan("grid=auto", "--ranks", "2")
    assert out.startswith("profile: measured on ")
    one, two = best_grid(out)
    assert one * two == 2


def test_a_saved_profile_gives_the_same_plan_without_measuring(plan, monkeypatch):
    measured, err = plan(*CLUSTER, "--save-profile", "layers.json")
    assert [line for line in err.splitlines() if line.startswith("measuring layer 1 of 5")]
    assert measured.startswith("profile: measured on ")
    monkeypatch.setattr(foresee_file, "measure", lambda *args: pytest.fail("measured"))
    again, err = plan(*CLUSTER, "--profile", "layers.json")
    assert (again, err) == (measured, "")


def test_the_source_of_a_profile_tells_the_cores(plan):
    out, _ = plan("train.threads=2", "--save-profile", "layers.json")
    assert out.splitlines()[0].endswith(", 2 cores")


def test_settings_with_the_best_plan_are_those_of_a_run(plan, profile):
    given = ["optimizer.learning_rate=0.5", "gradients.wire=fp16", "--profile", profile]
    out, _ = plan(*CLUSTER, *given, "--write", "best.toml")
    assert "settings with the best plan: best.toml" in out
    settings = load("best.toml")
    replicas, stages = best_grid(out)
    assert (settings.grid.stages, settings.grid.auto) == (stages, False)
    assert sum(settings.pipeline.split) == 5
    assert (settings.optimizer.learning_rate, settings.gradients.wire) == (0.5, "fp16")
    assert (settings.name, settings.batch.size) == ("regression", 64)
    preview, _ = plan("--ranks", "4", config="best.toml")
    many = "s" if replicas > 1 else ""
    assert preview.startswith(f"grid: 4 ranks = {replicas} replica{many} x {stages} stage")
    assert f"schedule {settings.pipeline.schedule}: " in preview


def test_what_the_settings_give_is_kept_in_the_plan(plan, profile):
    given = ["batch.micro_batch=3", "pipeline.schedule=gpipe", "pipeline.recompute=all"]
    plan(*CLUSTER, *given, "--profile", profile, "--write", "best.toml")
    settings = load("best.toml")
    assert settings.batch.micro_batch == 3
    assert (settings.pipeline.schedule, settings.pipeline.recompute) == ("gpipe", "all")


def test_a_grid_that_is_given_is_kept_beside_auto_and_searched_anew_without(plan, profile):
    anew, _ = plan(*CLUSTER, "--profile", profile)
    assert plan(*CLUSTER, "grid.stages=4", "--profile", profile)[0] == anew
    grids = set()
    for stages in (1, 2, 4):
        out, _ = plan(*CLUSTER, "grid.auto=true", f"grid.stages={stages}", "--profile", profile)
        grids.add(best_grid(out))
    assert grids == {(4, 1), (2, 2), (1, 4)}


def test_the_schedule_is_drawn(plan, profile):
    pytest.importorskip("matplotlib")
    out, _ = plan(*CLUSTER, "--profile", profile, "--draw", "plan.png")
    assert out.endswith("drawn: plan.png\n")
    assert Path("plan.png").read_bytes().startswith(PNG)


def test_a_cluster_that_is_too_small_is_one_line(refused, profile):
    words = refused(*CLUSTER, "--profile", profile, "--memory", "1kB")
    assert words.startswith("none of ")
    assert "fits into 1 kB a rank" in words


def test_wires_that_are_allowed_are_tried_and_written(plan, profile):
    slow = [*CLUSTER[:4], "--bandwidth", "1MB/s", "--profile", profile, "batch.micro_batch=1"]
    alone, _ = plan(*slow, "--write", "alone.toml")
    out, _ = plan(*slow, "--wires", "fp16,int8", "--pipeline-wires", "bf16", "--write", "best.toml")
    settings = load("best.toml")
    assert load("alone.toml").gradients.wire == "fp32"  # never a lossier one than the file's unless allowed
    assert load("alone.toml").pipeline.wire == "fp32"
    assert settings.gradients.wire == "int8"
    assert " fp32" in alone.split("why others lose:")[0]
    assert " int8" in next(line for line in out.splitlines() if line.startswith("1 "))
    losers = out.split("why others lose:")[1]
    assert "gradients in fp32: " in losers
    assert "gradients in fp16: " in losers
    assert "gradients in " not in alone


def test_activations_in_bf16_win_where_lines_are_slow_and_stages_are_asked_for(plan, profile):
    slow = [*CLUSTER[:4], "--bandwidth", "100kB/s", "--profile", profile, "grid.auto=true", "grid.stages=4"]
    out, _ = plan(*slow, "--pipeline-wires", "bf16", "--write", "best.toml")
    assert load("best.toml").pipeline.wire == "bf16"
    assert "activations in fp32: " in out.split("why others lose:")[1]


def test_wires_that_the_settings_allow_are_tried_without_an_option(plan, profile):
    slow = [*CLUSTER[:4], "--bandwidth", "1MB/s", "--profile", profile, "grid=auto"]
    given = ['gradients.tune_wires=["int8"]', 'pipeline.tune_wires=["bf16"]']
    plan(*slow, *given, "--write", "best.toml")
    settings = load("best.toml")  # which has no grid left to choose, and so no wires to choose from
    assert settings.gradients.wire == "int8"
    assert (settings.gradients.tune_wires, settings.pipeline.tune_wires) == ((), ())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--wires", "fp16,fp8"], "--wires fp16,fp8: 'fp8' is unknown: known are fp32, fp16, bf16, int8"),
        (
            ["--pipeline-wires", "int8"],
            "--pipeline-wires int8: 'int8' is unknown: known are fp32, fp16, bf16",
        ),
        (
            ["--wires", "fp16", "gradients.local_steps=4"],
            "--wires fp16: with gradients.local_steps=4 no gradi",
        ),
        (["--speeds", "1,fast"], "--speeds 1,fast: no numbers: write for instance 1,1,0.5"),
        (["--speeds", "1,0.5,1"], "3 speeds [1.0, 0.5, 1.0] for 2 hosts of 2 ranks: give a number above 0"),
        (["--speeds", "1,nan"], "2 speeds [1.0, nan] for 2 hosts of 2 ranks: give a number above 0"),
        (["--latency-host", "1"], "--latency-host 1: no time: write for instance 2us"),
        (["pipeline.tune_wires=['bf16']"], 'pipeline.tune_wires=bf16 are tried by grid="auto" only'),
    ],
)
def test_options_that_are_wrong_are_one_line(refused, profile, more, words):
    options = [text for text in more if "=" not in text]
    overrides = [text for text in more if "=" in text]
    assert words in refused(*overrides, *CLUSTER, "--profile", profile, *options)


def test_slow_hosts_hold_fewer_layers(plan, profile):
    given = ["--ranks", "2", "--ranks-per-host", "1", "--profile", profile]
    given += ["grid.auto=true", "grid.stages=2", "pipeline.schedule=1f1b"]
    for speeds, split in (("1,0.4", (4, 1)), ("0.4,1", (1, 4))):
        plan(*given, "--speeds", speeds, "--write", "best.toml")
        assert load("best.toml").pipeline.split == split


@pytest.mark.parametrize("given", ["gradients.compression=powersgd", "gradients.local_steps=8"])
def test_what_is_not_foreseen_is_said(plan, profile, given):
    out, _ = plan(*CLUSTER, given, "--profile", profile)
    (line,) = [line for line in out.splitlines() if line.startswith("not foreseen: ")]
    assert line.startswith(f"not foreseen: {given}: sends less ")
    assert "not foreseen" not in plan(*CLUSTER, "--profile", profile)[0]


def test_latency_within_a_host_is_counted(plan, profile):
    given = ["--ranks", "2", "--profile", profile, "grid.auto=true", "grid.stages=2", "batch.micro_batch=1"]
    near, _ = plan(*given)
    far, _ = plan(*given, "--latency-host", "1s")
    assert re.search(r"^1 1x2 .* [\d.]+ ms +", near, re.MULTILINE)
    assert re.search(r"^1 1x2 .* [\d.]+ s +", far, re.MULTILINE)


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--save-profile", "none/a.json", "none/a.json cannot be written: No such file or directory"),
        ("--write", "none/a.toml", "none/a.toml cannot be written: No such file or directory"),
        ("--write", ".", ". cannot be written: Is a directory"),
        ("--draw", "none/a.png", "cannot write the chart none/a.png: "),
        ("--draw", "a.xyz", "cannot write the chart a.xyz: "),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(refused, profile, option, name, words):
    assert words in refused(*CLUSTER, "--profile", profile, option, name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "broken.json: no such profile"),
        ("{", "broken.json: the file: Invalid JSON"),
        ('{"layers": [{"forwrd": 1}]}', "layers.0.forwrd: "),
        ('{"layers": []}', "0 layers"),
        (
            '{"layers": [{"forward": {"points": [[1, 1]]}}]}',
            "broken.json is of 1 layer, but task regression has 5: measure it again",
        ),
    ],
)
def test_a_profile_that_is_none_or_of_another_model_is_one_line(refused, text, words):
    if text is not None:
        Path("broken.json").write_text(text)
    assert words in refused(*CLUSTER, "--profile", "broken.json")
