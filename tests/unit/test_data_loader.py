"""The loader: what it gives with and without workers, and that workers leave no trace."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hpc_train.data.loader import Loader
from hpc_train.errors import UserError

CPU = torch.device("cpu")
END_S = 10


class Squares:
    """Sample i is (i, i * i); index 99 raises."""

    def __getitem__(self, index):
        if index == 99:
            raise LookupError(f"no sample {index}")
        return torch.tensor(index), index * index


class Draws:
    """A sample of random numbers, as an augmentation draws them."""

    def __getitem__(self, index):
        return torch.rand(()).item(), np.random.rand() + random.random()


class Where:
    """What a sample can see of the process that loads it."""

    def __getitem__(self, index):
        started = "mpi4py.MPI" in sys.modules
        import mpi4py.MPI  # as a user's file may, at its top

        initialized = mpi4py.MPI.Is_initialized()
        return os.getpid(), torch.tensor([started, initialized, torch.get_num_threads() > 1])


class Endless:
    """A sample that is never ready."""

    def __getitem__(self, index):
        while True:
            signal.pause()


class Nested:
    """An input of two tensors and a target by name."""

    def __getitem__(self, index):
        return (torch.zeros(2), torch.ones(3)), {"label": index}


@pytest.fixture
def make():
    """Make loaders that are closed at the end."""
    made = []

    def make(dataset, workers, micro_batch=4, seed=0):
        made.append(Loader(dataset, workers, micro_batch, CPU, seed))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def workers_of(pid: int) -> set[psutil.Process]:
    """Loader workers, which are children of the fork server."""
    return {
        child for child in psutil.Process(pid).children(recursive=True) if len(child.parents()) > 1
    } - set(psutil.Process(pid).children())


@pytest.mark.parametrize("workers", [0, 2])
def test_micro_batches_come_in_order_and_the_last_may_be_smaller(make, workers):
    loader = make(Squares(), workers)
    for indices in ([5, 3, 9, 1, 0, 7, 2, 8, 4, 6], np.array([2, 1]), range(8)):
        micro_batches = loader.load(indices)
        wanted = [int(i) for i in indices]
        assert [len(x) for x, _ in micro_batches] == [4] * (len(wanted) // 4) + [len(wanted) % 4] * (
            len(wanted) % 4 > 0
        )
        assert torch.cat([x for x, _ in micro_batches]).tolist() == wanted
        assert torch.cat([y for _, y in micro_batches]).tolist() == [i * i for i in wanted]
    assert loader.load([]) == []


def test_a_hint_that_holds_is_used_and_one_that_does_not_is_dropped(make):
    loader = make(Squares(), workers=2)
    rng = random.Random(0)
    for _ in range(30):
        for _ in range(rng.randrange(3)):
            loader.prefetch([rng.randrange(50) for _ in range(rng.randrange(40))])
        wanted = [rng.randrange(50) for _ in range(rng.randrange(40))]
        if rng.random() < 0.5:
            loader.prefetch(wanted)
        assert [i for x, _ in loader.load(wanted) for i in x.tolist()] == wanted


def test_more_micro_batches_than_workers_hold_ready(make):
    loader = make(Squares(), workers=1, micro_batch=1)
    loader.prefetch(range(90))
    assert [x.item() for x, _ in loader.load(range(90))] == list(range(90))


def draws(loader: Loader, indices: list[int], epoch: int = 0) -> dict[int, tuple[float, float]]:
    x, y = zip(*loader.load(indices, epoch), strict=True)
    return dict(zip(indices, zip(torch.cat(x).tolist(), torch.cat(y).tolist(), strict=True), strict=True))


def test_random_draws_depend_on_seed_epoch_and_index_alone(make):
    """Not on the micro-batch, the number of workers, dropped hints or what was loaded before."""
    plain = draws(make(Draws(), 0), [4, 8, 1, 3, 7])
    assert len(set(plain.values())) == 5
    loader = make(Draws(), 2, micro_batch=2)
    loader.prefetch([1, 2, 3])
    assert draws(loader, [7, 1, 4, 3, 8]) == plain
    assert draws(loader, [7, 1, 4, 3, 8], epoch=1) != plain
    assert draws(make(Draws(), 0, seed=1), [7, 1, 4, 3, 8]) != plain


@pytest.mark.parametrize("workers", [0, 1])
def test_the_rank_keeps_its_own_random_state(make, workers):
    """A rank that loads must draw the same dropout as one that does not."""

    def draw():
        return torch.rand(()).item(), np.random.rand(), random.random()

    loader = make(Draws(), workers)
    loader.load([0])
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = draw()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    loader.load([1, 2, 3])
    loader.prefetch([3])
    assert draw() == expected


def test_an_exception_in_the_rank_comes_through_and_the_next_load_works(make):
    loader = make(Squares(), workers=0)
    with pytest.raises(LookupError, match="no sample 99"):
        loader.load([0, 99])
    assert loader.load([2])[0][1].tolist() == [4]


def test_an_exception_in_a_worker_comes_with_its_traceback_and_the_next_load_works(make):
    loader = make(Squares(), workers=2)
    with pytest.raises(LookupError) as caught:
        loader.load([0, 1, 2, 3, 99, 5, 6, 7, 8, 9])
    assert "no sample 99" in str(caught.value)
    assert "in __getitem__" in str(caught.value)
    assert __file__ in str(caught.value)
    assert loader.load([2])[0][1].tolist() == [4]


@pytest.mark.parametrize("workers", [0, 1])
def test_tuples_stay_tuples_so_that_layers_take_them_as_arguments(make, workers):
    [(inputs, target)] = make(Nested(), workers).load([4, 5])
    assert isinstance(inputs, tuple)
    assert [x.shape for x in inputs] == [(2, 2), (2, 3)]
    assert target["label"].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("sample", "text"),
    [(torch.tensor(1.0), "gives Tensor"), ((1, 2, 3), "gives list of 3"), ({"a": 1}, "gives dict")],
)
def test_a_sample_that_is_no_pair_is_told(make, sample, text):
    class Other:
        def __getitem__(self, index):
            return sample

    with pytest.raises(UserError, match=f"a sample of Other {text}: return a pair"):
        make(Other(), 0).load([0])


def test_workers_are_not_ranks(make):
    """MPI is up in this process, as in every rank; workers are neither copies of it nor start it again."""
    from mpi4py import MPI

    if not MPI.Is_initialized():  # imported before, by a test that did not start it
        MPI.Init()
    loader = make(Where(), workers=2, micro_batch=1)
    micro_batches = loader.load(range(4))
    pids = {int(pid) for pid, _ in micro_batches}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for _, seen in micro_batches:
        assert seen.tolist()[0][1:] == [False, False]  # MPI not initialized, one torch thread
    assert micro_batches[0][1].tolist()[0][0] is False  # nor was mpi4py.MPI there before it asked
    assert "MPI4PY_RC_INITIALIZE" not in os.environ


def test_a_signal_to_the_process_group_leaves_workers_alive(make):
    """A launcher's "save and stop" reaches workers too; the rank still needs them for its last steps."""
    loader = make(Where(), workers=2, micro_batch=1)
    pids = {int(pid) for pid, _ in loader.load(range(2))}
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            os.kill(pid, number)
    assert {int(pid) for pid, _ in loader.load(range(4))} == pids
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()  # while the rank itself hears them


def test_a_worker_that_dies_is_told(make):
    loader = make(Where(), workers=1)
    [(pid, _)] = loader.load([0])
    os.kill(int(pid), signal.SIGKILL)
    psutil.wait_procs([psutil.Process(int(pid))] if psutil.pid_exists(int(pid)) else [], timeout=END_S)
    with pytest.raises(
        RuntimeError, match=r"DataLoader worker .*exited unexpectedly|killed by signal: Killed"
    ):
        loader.load([0])


@pytest.mark.parametrize("dataset", [Squares(), Endless()])
def test_close_ends_the_workers(make, dataset):
    before = workers_of(os.getpid())
    loader = make(dataset, workers=2)
    loader.prefetch(range(8))
    ours = workers_of(os.getpid()) - before
    assert len(ours) == 2
    loader.close()
    loader.close()
    assert psutil.wait_procs(list(ours), timeout=END_S)[1] == []
    with pytest.raises(ValueError, match="closed"):
        loader.load([0])


RANK = """
import os, signal, sys, torch
sys.path.insert(0, {folder!r})
import test_data_loader as here
from hpc_train.data.loader import Loader

if __name__ == "__main__":
    loader = Loader(here.{dataset}(), 2, 4, torch.device("cpu"), 0)
    loader.prefetch(range(8))
    print("\\n".join(str(p.pid) for p in here.workers_of(os.getpid())), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("dataset", "end"),
    [
        ("Squares", "os.kill(os.getpid(), signal.SIGKILL)"),
        ("Squares", "os._exit(1)"),
        ("Squares", "raise ValueError('a rank that raises')"),
        ("Endless", "sys.exit(3)"),
    ],
    ids=["killed", "aborted", "raised", "exited with busy workers"],
)
def test_workers_end_when_the_rank_does(tmp_path, dataset, end):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(folder=str(Path(__file__).parent), dataset=dataset, end=end))
    rank = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    text = [rank.stdout.readline() for _ in range(2)]
    workers = [psutil.Process(int(line)) for line in text if psutil.pid_exists(int(line))]
    rank.communicate(timeout=2 * END_S)
    assert rank.returncode != 0
    assert psutil.wait_procs(workers, timeout=END_S)[1] == []
