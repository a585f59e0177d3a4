"""A plain script made parallel: its update is that of one process with the whole batch."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"

# Runs the example as it stands, and keeps the parameters that this rank ends with.
KEEP = """
import runpy, sys
from safetensors.torch import save_file
names = runpy.run_path(sys.argv[1], run_name="__main__")
save_file(names["model"].state_dict(), f"{sys.argv[2]}/{names['hpc_train'].rank()}.safetensors")
"""


@pytest.fixture(scope="module")
def whole_batch():
    """The example without hpc_train."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        for batch in torch.randperm(1472).split(64):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_example_trains_as_one_process_does(mpirun, tmp_path, whole_batch, num_ranks):
    done = mpirun(num_ranks, ["-c", KEEP, EXAMPLE, tmp_path], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("accuracy on 325 held-out digits") == 1
    assert float(done.stdout.split()[-1]) > 0.85
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(num_ranks)]
    for found in ranks:
        for name, expected in whole_batch.items():
            # 115 steps, with fp32 sums in another order
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=1e-4)
            assert found[name].equal(ranks[0][name])


def test_five_lines_are_changed():
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert sum(f"# {n}:" in line for line in lines for n in range(1, 6)) == 5
    assert all("# " in line for line in lines if "hpc_train." in line)


RAISES = """
import hpc_train, torch
hpc_train.init()
model = torch.nn.Linear(2, 2)
optimizer = hpc_train.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(2)).sum().backward()
{fails}
optimizer.step()
hpc_train.broadcast_parameters(model.state_dict())
"""


def test_an_exception_on_one_rank_ends_all_with_its_traceback(mpirun):
    """mpi4py#290: the others would wait for ever."""
    script = RAISES.format(fails="if hpc_train.rank() == 1: [][5]")
    done = mpirun(2, ["-c", script], timeout_s=60)
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "rank 1 of 2 on " in said
    assert "IndexError: list index out of range" in said


def test_an_exception_in_a_thread_ends_all_too(mpirun):
    fails = (
        "import threading\n"
        "thread = threading.Thread(target=lambda: [][5])\n"
        "if hpc_train.rank() == 1: thread.start(); thread.join()"
    )
    done = mpirun(2, ["-c", RAISES.format(fails=fails)], timeout_s=60)
    assert done.returncode == 1
    assert "IndexError: list index out of range" in done.stdout + done.stderr


def test_a_mistake_on_one_rank_ends_all_with_one_line(mpirun):
    fails = "if hpc_train.rank() == 1: hpc_train.broadcast_parameters([3])"
    done = mpirun(2, ["-c", RAISES.format(fails=fails)], timeout_s=60)
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "broadcast_parameters takes a state_dict or pairs" in said
    assert "Traceback" not in said


def test_a_script_may_end_between_backward_and_step(mpirun):
    done = mpirun(2, ["-c", RAISES.format(fails="raise SystemExit")], timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Error" not in done.stdout + done.stderr
