"""What Horovod's users have in their environment: honoured, or named."""

import subprocess
import sys
import warnings

import pytest
import torch

import hpc_train
from hpc_train.comm.loopback import run_ranks
from hpc_train.config import load
from hpc_train.errors import UserError
from hpc_train.launch.horovod_settings import bucket_bytes, honour, variables, without_effect


@pytest.fixture
def settings(tmp_path):
    def settings(text="", *overrides):
        path = tmp_path / "my.toml"
        path.write_text(f'task = "regression"\n{text}')
        return load(path, overrides)

    return settings


def test_what_means_the_same_is_honoured(settings):
    found = {"HOROVOD_FUSION_THRESHOLD": "67108864", "HOROVOD_AUTOTUNE": "1"}
    gradients = honour(settings(), found).gradients
    assert gradients.bucket_bytes == 64 * 2**20
    assert gradients.tune is True
    assert gradients.wire == "fp32"


def test_a_setting_counts_more_than_the_environment(settings):
    found = {"HOROVOD_FUSION_THRESHOLD": "67108864", "HOROVOD_AUTOTUNE": "1"}
    by_file = honour(settings("[gradients]\nbucket_bytes = '1MiB'\n"), found).gradients
    assert (by_file.bucket_bytes, by_file.tune) == (2**20, True)
    # even one that says the default
    override = honour(settings("", "gradients.bucket_bytes=4MiB", "gradients.tune=false"), found).gradients
    assert (override.bucket_bytes, override.tune) == (4 * 2**20, False)


def test_nothing_in_the_environment_changes_nothing(settings):
    assert honour(settings(), {}) == settings()
    assert honour(settings(), {"HOROVOD_AUTOTUNE": "0", "HOROVOD_CYCLE_TIME": "5"}) == settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gradients]\nlocal_steps = 4\n", "gradients.tune=true: set it to false, or local_steps to 1"),
        ("grid = 'auto'\n[gradients]\nlocal_steps = 2\n", "gradients.tune=true"),
    ],
)
def test_what_does_not_go_with_the_settings_is_refused_by_its_name(settings, text, words):
    """It came after the check of the settings, and was ignored or failed later."""
    with pytest.raises(UserError) as caught:
        honour(settings(text), {"HOROVOD_AUTOTUNE": "1"})
    assert str(caught.value).startswith("HOROVOD_AUTOTUNE=1 in the environment: gradients.local_steps=")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    off = honour(settings(f"{text}tune = false\n"), {"HOROVOD_AUTOTUNE": "1"})
    assert off.gradients.tune is False


def test_no_fusion_is_one_parameter_a_bucket():
    assert bucket_bytes({"HOROVOD_FUSION_THRESHOLD": "0"}) == 1
    assert bucket_bytes({}) is None


@pytest.mark.parametrize("text", ["64MB", "-1", "", "1e6"])
def test_a_threshold_that_is_no_number_is_refused(text):
    with pytest.raises(UserError, match=rf"HOROVOD_FUSION_THRESHOLD={text} is no number of bytes.* 67108864"):
        bucket_bytes({"HOROVOD_FUSION_THRESHOLD": text})


def test_what_has_no_effect_is_named():
    found = {name: "1" for name in ("HOROVOD_TIMELINE", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME")}
    text = without_effect(found, "mpi")
    assert text.startswith("HOROVOD_CYCLE_TIME, HOROVOD_TIMELINE: no effect with comm.backend=mpi")
    assert "\n" not in text
    assert without_effect(["HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE"], "auto") == ""
    assert without_effect(["HOROVOD_AUTOTUNE"], "auto", tunes=False).startswith("HOROVOD_AUTOTUNE: ")


def test_horovod_reads_its_own():
    assert without_effect(["HOROVOD_TIMELINE", "HOROVOD_CYCLE_TIME"], "horovod") == ""


def test_rank_0s_environment_counts_for_all():
    """mpirun hands a variable to other hosts only when it is told to."""

    def body(world):
        mine = {"HOROVOD_FUSION_THRESHOLD": "100", "HOROVOD_NO_SUCH": "1", "PATH": "/bin"}
        return variables(mine if world.rank == 0 else {"HOROVOD_TIMELINE": "x"}, world.control)

    assert run_ranks(3, body) == [{"HOROVOD_FUSION_THRESHOLD": "100"}] * 3


@pytest.fixture
def job():
    yield
    hpc_train.shutdown()


@pytest.mark.usefixtures("job")
def test_an_own_loop_takes_its_buckets_from_the_environment(monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "48")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hpc_train.init()
    inner = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1)
    assert hpc_train.DistributedOptimizer(inner)._bucket_bytes == 48
    assert hpc_train.DistributedOptimizer(inner, bucket_bytes=2**20)._bucket_bytes == 2**20


@pytest.mark.usefixtures("job")
def test_an_own_loop_is_told_what_has_no_effect(monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", "/tmp/timeline.json")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    with pytest.warns(UserWarning, match="HOROVOD_AUTOTUNE, HOROVOD_TIMELINE: no effect") as told:
        hpc_train.init()
    assert len(told) == 1


def test_horovodruns_ranks_that_see_no_mpi_are_refused(monkeypatch):
    """horovodrun without mpirun starts processes that MPI takes for worlds of one rank."""
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    command = [sys.executable, "-m", "hpc_train", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: horovodrun started 4 tasks, but MPI sees 4 worlds of one rank: ")
    assert "mpirun -n" in done.stderr
