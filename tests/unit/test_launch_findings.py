"""What doctor says of made-up launches."""

import dataclasses
import json

from hpc_train.comm.loopback import run_ranks
from hpc_train.launch.doctor import Findings, examine, render, spans
from hpc_train.launch.facts import RankFacts, slurm_variables
from hpc_train.launch.findings import judge

MPI = {
    "vendor": "Open MPI",
    "version": "5.0.11",
    "standard": "3.1",
    "thread_level": "multiple",
    "thread_level_asked": "multiple",
    "ulfm": True,
    "ulfm_started": False,
    "cuda_aware": False,
}


def launch(num_ranks, ranks_a_host=4, host_cores=8, cores=None, **others):
    """Facts of healthy ranks; `cores(local_rank)` says which cores a rank may use."""
    return [
        RankFacts(
            rank=rank,
            size=others.get("size", num_ranks),
            host=f"host{rank // ranks_a_host}",
            local_rank=rank % ranks_a_host,
            local_size=ranks_a_host,
            cores=list(cores(rank % ranks_a_host) if cores else range(host_cores)),
            host_cores=host_cores,
            launcher=others.get("launcher", "mpirun"),
            launcher_size=others.get("launcher_size", num_ranks),
            mpi={**MPI, **others.get("mpi", {})},
            mpirun="/usr/bin/mpirun (Open MPI 5.0.11)",
            versions={"torch": "2.13.0", "mpi4py": "4.1.2"},
            gpus=others.get("gpus", []),
            nccl=None,
            horovod=None,
            slurm={},
            srun=None,
        )
        for rank in range(num_ranks)
    ]


def told(facts):
    return [str(finding) for finding in judge(facts)]


def test_a_healthy_launch():
    assert told(launch(8)) == []
    assert told(launch(1, launcher=None, launcher_size=None)) == []


def test_singletons():
    """Plain srun starts N times rank 0 of 1."""
    assert told(launch(1, launcher="srun", launcher_size=8)) == [
        "stops: srun started 8 ranks, and each is rank 0 of 1: srun --mpi=pmix"
    ]
    [line] = told(launch(1, launcher="mpirun", launcher_size=2))
    assert "use the mpirun of mpi4py's MPI: /usr/bin/mpirun (Open MPI 5.0.11)" in line


def test_more_ranks_than_cores():
    assert told(launch(4, host_cores=2)) == [
        "slow: 4 ranks on host0 share 2 cores: start at most 2 ranks on this host"
    ]


def test_all_ranks_on_one_core():
    assert told(launch(4, cores=lambda local_rank: [0])) == [
        "slow: 4 ranks on host0 may use 1 of its 8 cores: --bind-to none, or --map-by slot:PE=2"
    ]


def test_srun_forgets_cpus_per_task():
    [line] = told(launch(4, launcher="srun", cores=lambda local_rank: [0]))
    assert line.endswith("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK before srun")


def test_one_core_a_rank_and_the_rest_idle():
    """Open MPI's default for two ranks on a large host."""
    [line] = told(launch(2, host_cores=64, cores=lambda local_rank: [local_rank]))
    assert line == (
        "note: the 2 ranks on host0 may use 2 of its 64 cores: "
        "if the rest is yours too, --bind-to none, or --map-by slot:PE=32"
    )


def test_each_host_is_judged_by_itself():
    facts = launch(8)
    facts[5:] = [dataclasses.replace(rank, cores=[3]) for rank in facts[5:]]
    facts[4] = dataclasses.replace(facts[4], cores=[3])
    [line] = told(facts)
    assert "host1" in line
    assert "host0" not in line


def test_thread_level_too_low():
    [line] = told(launch(2, mpi={"thread_level": "funneled"}))
    assert line == (
        "slow: MPI gives thread level funneled (asked for multiple): gradients are summed after backward: "
        "use an MPI built with MPI_THREAD_MULTIPLE"
    )
    [line] = told(launch(2, mpi={"thread_level": "funneled", "thread_level_asked": "funneled"}))
    assert line.endswith("unset HPC_TRAIN_THREAD_LEVEL")
    assert told(launch(2, mpi={"thread_level": "serialized"})) == []


def test_mixed_versions():
    facts = launch(8)
    facts[4:] = [
        dataclasses.replace(rank, versions={"torch": "2.12.0", "mpi4py": "4.1.2"}) for rank in facts[4:]
    ]
    assert told(facts) == [
        "stops: torch differs: 2.13.0 on host0, 2.12.0 on host1: start all ranks from the same environment"
    ]


def test_many_hosts_are_told_in_short():
    facts = launch(64, ranks_a_host=1)
    facts[0] = dataclasses.replace(facts[0], mpi={**MPI, "version": "4.1.4"})
    [line] = told(facts)
    assert "Open MPI 5.0.11 on host1, host2, host3 and 60 more" in line


def test_ranks_that_share_gpus():
    assert told(launch(4, gpus=["H200", "H200"])) == [
        "slow: 4 ranks on host0 share 2 GPUs: start 2 ranks on this host"
    ]
    assert told(launch(4, gpus=["H200"])) == []  # each may be shown another one


def test_without_mpi_one_rank_still_trains():
    facts = launch(1, launcher=None, launcher_size=None)
    facts = [dataclasses.replace(facts[0], mpi={"missing": "cannot load MPI library"})]
    findings = Findings(facts, judge(facts))
    assert findings.exit_code == 0
    assert "note: no MPI (cannot load MPI library)" in render(findings)


def test_exit_code_says_whether_training_would_stop():
    slow, stops = launch(4, host_cores=2), launch(1, launcher_size=8)
    assert Findings(slow, judge(slow)).exit_code == 0
    assert Findings(stops, judge(stops)).exit_code == 1


def test_what_a_person_reads():
    facts = launch(8, cores=lambda local_rank: [2 * local_rank, 2 * local_rank + 1])
    lines = render(Findings(facts, judge(facts))).splitlines()
    assert lines[0] == (
        "MPI          Open MPI 5.0.11 (standard 3.1), thread level multiple (asked for multiple), "
        "ULFM built in, not started, GPU aware: no"
    )
    assert "launched by  mpirun: 8 ranks" in lines
    assert (
        "host         host0, 8 cores: rank 0 on cores 0-1; rank 1 on cores 2-3; "
        "rank 2 on cores 4-5; rank 3 on cores 6-7" in lines
    )
    assert lines[-1] == "nothing is wrong"


def test_a_thousand_hosts_fit_on_a_screen():
    facts = launch(4096)
    lines = render(Findings(facts, judge(facts))).splitlines()
    assert len(lines) < 40
    assert "             and 1008 more hosts" in lines


def test_spans():
    assert spans([5, 1, 2, 3, 9, 10]) == "1-3,5,9-10"
    assert spans([]) == ""


def test_slurm_variables():
    environ = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_CONF": "/x", "PATH": "/bin"}
    assert slurm_variables(environ) == {"JOB_ID": "7", "NTASKS": "4"}


def test_examine_gathers_every_rank():
    findings = run_ranks(2, examine)
    assert findings[0] == findings[1]
    assert [rank.rank for rank in findings[0].ranks] == [0, 1]
    assert json.loads(json.dumps(findings[0].as_dict()))["ranks"][1]["versions"]["torch"]
