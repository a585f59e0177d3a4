"""The lines that start ranks, compared with what each MPI's launcher takes."""

import pytest

from hpc_train.errors import UserError
from hpc_train.launch.line import Host, Line, Site, make_line, parse_hosts
from hpc_train.launch.mpirun import Mpirun

OPEN_MPI = Mpirun("mpirun", "Open MPI", "5.0.11")
MPICH = Mpirun("mpirun", "MPICH", "5.0.2")
INTEL = Mpirun("mpirun", "Intel MPI", "2021.10")
AB = (Host("a", 4), Host("b", 4))


@pytest.mark.parametrize(
    ("mpirun", "num_ranks", "site", "line"),
    [
        # one host
        (OPEN_MPI, 2, Site(2), "-n 2 --map-by slot:PE=1 --bind-to core"),
        (OPEN_MPI, 4, Site(32), "-n 4 --map-by slot:PE=8 --bind-to core"),
        (OPEN_MPI, 3, Site(32), "-n 3 --map-by slot --bind-to none"),
        (OPEN_MPI, 4, Site(0), "-n 4 --map-by slot --bind-to none"),
        (
            OPEN_MPI,
            4,
            Site(2),
            "-n 4 --map-by slot --bind-to none --oversubscribe --mca mpi_yield_when_idle 1",
        ),
        (
            OPEN_MPI,
            1,
            Site(1, is_root=True),
            "-n 1 --allow-run-as-root --map-by slot:PE=1 --bind-to core",
        ),
        # several hosts: nothing is known of their cores
        (OPEN_MPI, 8, Site(2, hosts=AB), "-n 8 --host a:4,b:4 --map-by slot --bind-to none"),
        (
            OPEN_MPI,
            8,
            Site(2, hosts=AB, interface="ib0"),
            "-n 8 --host a:4,b:4 --map-by slot --bind-to none --mca btl_tcp_if_include ib0",
        ),
        # an allocation: mpirun asks the scheduler
        (OPEN_MPI, 8, Site(2, allocated=8), "-n 8 --map-by slot --bind-to none"),
        (OPEN_MPI, 9, Site(2, allocated=8), "-n 9 --map-by slot --bind-to none --oversubscribe"),
    ],
)
def test_open_mpi(mpirun, num_ranks, site, line):
    made = make_line(mpirun, num_ranks, ["python", "x"], site)
    assert str(made) == f"mpirun {line} -x HPC_TRAIN_TERMINAL=0 python x"


@pytest.mark.parametrize(
    ("mpirun", "num_ranks", "site", "line"),
    [
        (MPICH, 2, Site(8), "mpirun -n 2 -bind-to core:4"),
        (MPICH, 4, Site(2, is_root=True), "mpirun -n 4 -bind-to none"),
        (MPICH, 8, Site(8, hosts=AB, interface="ib0"), "mpirun -n 8 -hosts a:4,b:4 -bind-to none -iface ib0"),
        (
            INTEL,
            2,
            Site(8),
            "I_MPI_JOB_SIGNAL_PROPAGATION=on mpirun -n 2 -genv I_MPI_PIN_DOMAIN 4",
        ),
        (
            INTEL,
            8,
            Site(8, hosts=AB),
            "I_MPI_JOB_SIGNAL_PROPAGATION=on mpirun -n 8 -hosts a,b -ppn 4 -genv I_MPI_PIN 0",
        ),
    ],
)
def test_hydra(mpirun, num_ranks, site, line):
    made = make_line(mpirun, num_ranks, ["python", "x"], site)
    assert str(made) == f"{line} -genv HPC_TRAIN_TERMINAL 0 python x"


def test_the_terminal_reaches_the_ranks():
    assert "HPC_TRAIN_TERMINAL=120" in make_line(OPEN_MPI, 1, ["x"], Site(1, terminal_columns=120)).argv


def test_intel_mpi_takes_equal_hosts_only():
    with pytest.raises(UserError, match="same number of ranks on each host"):
        make_line(INTEL, 5, ["x"], Site(8, hosts=(Host("a", 4), Host("b", 1))))


def test_a_line_can_be_copied_into_a_shell():
    line = Line(("mpirun", "-n", "1", "a b", "task_options.text='x'"), {"A": "1 2"})
    assert str(line) == """A='1 2' mpirun -n 1 'a b' 'task_options.text='"'"'x'"'"''"""


def test_hosts():
    assert parse_hosts("a:4, b:2", 6) == (Host("a", 4), Host("b", 2))
    assert parse_hosts("a,b", 2) == (Host("a", 1), Host("b", 1))


@pytest.mark.parametrize(
    ("text", "num_ranks", "words"),
    [
        ("a:2,b:1", 4, "--hosts a:2,b:1 has 3 slots for 4 ranks: write --hosts a:2,b:2"),
        ("a,b,c", 8, "has 3 slots for 8 ranks: write --hosts a:3,b:3,c:3"),
        ("a:x", 1, "'a:x' is not HOST:SLOTS"),
        ("a:0", 1, "'a:0' is not HOST:SLOTS"),
        (":4", 1, "':4' is not HOST:SLOTS"),
        ("a:4,", 1, "'' is not HOST:SLOTS"),
    ],
)
def test_wrong_hosts(text, num_ranks, words):
    with pytest.raises(UserError) as caught:
        parse_hosts(text, num_ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
