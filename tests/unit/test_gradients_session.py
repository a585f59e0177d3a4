"""A script's place in its job, with one rank; tests/parallel/test_own_loop.py has several."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

import hpc_train
from hpc_train.errors import UserError
from hpc_train.gradients import session


@pytest.fixture
def job():
    hooks = sys.excepthook, threading.excepthook
    hpc_train.init()
    yield
    hpc_train.shutdown()
    assert (sys.excepthook, threading.excepthook) == hooks


def run(script, timeout_s=60):
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize("ask", ["rank", "size", "local_rank", "local_size"])
def test_init_comes_first(ask):
    with pytest.raises(UserError, match=r"hpc_train\.init\(\) comes first"):
        getattr(hpc_train, ask)()


@pytest.mark.usefixtures("job")
def test_alone_a_script_is_a_job_of_one_rank():
    hpc_train.init()  # a second one does nothing
    assert (hpc_train.rank(), hpc_train.size()) == (0, 1)
    assert (hpc_train.local_rank(), hpc_train.local_size()) == (0, 1)


@pytest.mark.usefixtures("job")
def test_the_horovod_names_work_alone():
    model = torch.nn.Linear(2, 2)
    optimizer = hpc_train.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hpc_train.Compression.fp16,
        backward_passes_per_step=2,
    )
    hpc_train.broadcast_parameters(model.state_dict(), root_rank=0)
    before = model.weight.detach().clone()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    hpc_train.broadcast_optimizer_state(optimizer, root_rank=0)
    torch.testing.assert_close(model.weight.detach(), before - 0.1)
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_an_optimizer_that_is_closed_early_is_not_kept_until_shutdown():
    """The session kept each of them, with its model and state: a search over settings ran out of memory."""
    hpc_train.init()
    model = torch.nn.Linear(2, 2)
    early, late = (
        hpc_train.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2)
    )
    here = session.current()
    assert here.closed_at_shutdown == [early, late]
    early.close()
    early.close()  # a second one does nothing
    assert here.closed_at_shutdown == [late]
    gone = weakref.ref(early)
    del early
    gc.collect()
    assert gone() is None
    hpc_train.shutdown()
    assert here.closed_at_shutdown == []
    late.close()


def test_shutdown_without_init_does_nothing():
    hpc_train.shutdown()


def test_importing_the_package_imports_neither_torch_nor_mpi():
    """Workers that load data import the user's script again: they must not pay, nor start MPI."""
    done = run("import hpc_train, sys; print(sorted({'torch', 'mpi4py', 'numpy'} & sys.modules.keys()))")
    assert done.stdout == "[]\n", done.stderr


def test_public_names_are_there():
    assert set(hpc_train.__all__) <= set(dir(hpc_train))
    for name in set(hpc_train.__all__) - {"Trainer"}:
        assert getattr(hpc_train, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hpc_train.nothing  # noqa: B018


def test_a_mistake_of_the_user_is_one_line():
    done = run("import hpc_train; hpc_train.init(); hpc_train.DistributedOptimizer(3)")
    assert done.returncode == 1
    assert done.stderr.endswith("DistributedOptimizer wraps a torch optimizer, not int\n")
    assert done.stderr.count("\n") == 1


def test_other_exceptions_are_shown_as_python_does():
    done = run("import hpc_train; hpc_train.init(); 1 / 0")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
