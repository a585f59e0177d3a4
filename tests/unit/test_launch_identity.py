"""Who the launcher says we are: environments as launchers set them."""

import pytest

from hpc_train.errors import UserError
from hpc_train.launch.identity import Identity, check, find

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "7"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
PALS = {
    "PALS_RANKID": "6",
    "PALS_LOCAL_RANKID": "2",
    "PALS_LOCAL_SIZE": "4",
    "PMI_RANK": "6",
    "PMI_SIZE": "8",
}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "0",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}


@pytest.mark.parametrize(
    ("environment", "identity"),
    [
        ({}, None),
        ({"PATH": "/bin", "OMPI_MCA_btl": "tcp,self"}, None),
        (OPEN_MPI, Identity("mpirun", 5, 8, 1, 4)),
        (HYDRA, Identity("mpiexec", 3, 4, 1, 2)),
        (SRUN, Identity("srun", 2, 4, 0, 2)),
        (PALS, Identity("mpiexec (PALS)", 6, 8, 2, 4)),
        (FLUX, Identity("flux", 1, 2, 0, None)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Identity("a launcher", 0, 2, None, None)),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"}, Identity("a launcher", 3, None, None, None)),
        ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, Identity("horovodrun", 1, 2, None, None)),
        (OPEN_MPI | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, Identity("mpirun", 5, 8, 1, 4)),
    ],
)
def test_each_launcher_is_known(environment, identity):
    assert find(environment) == identity


def test_in_a_slurm_allocation_mpirun_counts_and_not_the_srun_of_its_daemons():
    assert find(OPEN_MPI | SRUN) == Identity("mpirun", 5, 8, 1, 4)
    assert find(HYDRA | SRUN) == Identity("mpiexec", 3, 4, 1, 2)


def test_srun_counts_and_not_what_its_pmi2_sets():
    assert find(SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}) == Identity("srun", 2, 4, 0, 2)
    assert find(SRUN | {"PMIX_RANK": "2"}) == Identity("srun", 2, 4, 0, 2)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}])
def test_a_batch_script_or_the_shell_of_salloc_is_no_launcher(step):
    environment = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert find(environment | step) is None


@pytest.mark.parametrize(
    ("tasks", "node", "count"),
    [("4", 0, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,3(x2),5", 2, 3), ("4", 1, None), ("", 0, None)],
)
def test_slurm_writes_tasks_by_node_in_short(tasks, node, count):
    identity = find(SRUN | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)})
    assert identity is not None
    assert identity.local_size == count


def test_singletons_are_refused_with_the_fix():
    with pytest.raises(UserError) as refused:
        check(find(SRUN), world_size=1)
    assert str(refused.value) == (
        "srun started 4 tasks, but MPI sees 4 worlds of one rank: "
        "use srun --mpi=pmix (srun --mpi=list shows what is there)"
    )
    with pytest.raises(UserError, match="the mpirun of the MPI that mpi4py uses"):
        check(find(OPEN_MPI), world_size=1)
    with pytest.raises(UserError, match="a launcher started 4 tasks"):
        check(find({"PMIX_RANK": "3"}), world_size=1)


@pytest.mark.parametrize(
    "environment", [{}, {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}]
)
def test_one_rank_alone_is_fine(environment):
    check(find(environment), world_size=1)


def test_a_world_of_many_is_fine():
    check(find(SRUN), world_size=4)
