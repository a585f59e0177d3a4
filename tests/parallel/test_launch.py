"""`hpc-train launch` with the MPIs that are here: exit codes, signals, and what it starts."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import psutil
import pytest
from mpich import mpich_python

# Runs a line as `launch` does, for any program: launch.py PROGRAM
LAUNCH = """
import sys
from hpc_train.launch.launcher import STOP_SIGNAL, command, run
from hpc_train.launch.line import Line
from hpc_train.launch.mpirun import find_mpirun
mpirun = find_mpirun()
argv = command(2, None, [], mpirun=mpirun).argv
program = argv.index(sys.executable)
sys.exit(run(Line((*argv[: program + 1], "-c", sys.argv[1])), STOP_SIGNAL[mpirun.family]))
"""
# Waits for two signals, and says what it sees.
WAITS = """
import select, signal, socket, sys
from hpc_train.launch.signals import SignalFlag
reader, writer = socket.socketpair()
writer.setblocking(False)
signal.set_wakeup_fd(writer.fileno())
with SignalFlag() as flag:
    print("ready.", flush=True)
    for _ in range(NUM):
        if not select.select([reader], [], [], 60)[0]:
            sys.exit("no signal came")
        reader.recv(1)
        print("seen.", flush=True)
sys.exit(75)
"""


@pytest.fixture(params=["this environment's MPI", "MPICH"])
def python(request):
    return sys.executable if request.param != "MPICH" else mpich_python()


@contextmanager
def started(python, program):
    """A launch of two ranks under way; whatever is left of it at the end is killed."""
    process = subprocess.Popen(
        [python, "-c", LAUNCH, program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            for member in [process, *family]:
                member.kill()
        process.wait()
        process.stdout.close()


def read_until(process, word, times):
    """Return when the ranks have said `word` so many times; their lines may mix."""
    text = b""
    while text.count(word) < times:
        more = os.read(process.stdout.fileno(), 4096)
        assert more, text
        text += more


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_exit_codes_come_back(python, code):
    with started(python, f"raise SystemExit({code})") as process:
        assert process.wait(60) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_the_ranks_are_asked_to_stop(python, number):
    """A scheduler's SIGTERM must leave the time to save: Open MPI's mpirun would kill the ranks at once."""
    with started(python, WAITS.replace("NUM", "1")) as process:
        read_until(process, b"ready.", 2)
        process.send_signal(number)
        read_until(process, b"seen.", 2)
        assert process.wait(60) == 75


def test_a_second_term_ends_the_job(python):
    with started(python, WAITS.replace("NUM", "2")) as process:
        read_until(process, b"ready.", 2)
        process.send_signal(signal.SIGTERM)
        read_until(process, b"seen.", 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) not in (0, 75)


def hpc_train(python, *args):
    return subprocess.run(
        [python, "-m", "hpc_train", *args],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_doctor_on_more_ranks_than_cores(python):
    num_ranks = (os.cpu_count() or 1) + 1
    done = hpc_train(python, "launch", "-n", str(num_ranks), "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert f"-n {num_ranks}" in done.stderr.splitlines()[0]  # the line, where it does not mix with the JSON
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == list(range(num_ranks))
    assert told["ranks"][0]["mpi"]["vendor"] in told["ranks"][0]["mpirun"]
    assert any("more" in f["what"] or "share" in f["what"] for f in told["findings"])


def test_doctor_alone_names_the_mpi():
    done = hpc_train(sys.executable, "doctor", "--json")
    assert done.returncode == 0, done.stderr
    [rank] = json.loads(done.stdout)["ranks"]
    assert rank["size"] == 1
    assert rank["launcher"] is None
    assert rank["mpi"]["thread_level"] in ("single", "funneled", "serialized", "multiple")


def test_bench_allreduce(python):
    args = ("bench", "allreduce", "--sizes", "4KiB,64KiB", "--wires", "fp32,fp16", "--json")
    done = hpc_train(python, "launch", "-n", "2", *args)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [(r["wire"], r["bytes"]) for r in records if r["impl"] == "hpc_train"] == [
        ("fp32", 4096),
        ("fp16", 4096),
        ("fp32", 65536),
        ("fp16", 65536),
    ]
    assert len({r["impl"] for r in records}) == 2
    assert len(records) == 6
    assert all(0 < r["min_s"] <= r["median_s"] < 10 for r in records)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("launch", "-n", "4", "--hosts", "a:1,b:2", "doctor"),
            "has 3 slots for 4 ranks: write --hosts a:2,b:2",
        ),
        (("bench", "allreduce"), "1 rank has nothing to sum"),
    ],
)
def test_a_mistake_is_one_line(args, words):
    done = hpc_train(sys.executable, *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
