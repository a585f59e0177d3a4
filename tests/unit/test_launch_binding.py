"""Cores, threads and devices of a rank."""

import pytest
import torch

from hpc_train.comm.loopback import run_ranks
from hpc_train.errors import UserError
from hpc_train.launch import binding


def test_unbound_ranks_divide_the_cores():
    everywhere = frozenset(range(8))
    assert [binding.share_of_cores([everywhere] * 4, rank) for rank in range(4)] == [2] * 4
    assert binding.share_of_cores([everywhere] * 3, 0) == 2  # never more threads than cores


def test_bound_ranks_keep_their_own_cores():
    masks = [frozenset({0, 1}), frozenset({2, 3, 4, 5})]
    assert [binding.share_of_cores(masks, rank) for rank in range(2)] == [2, 4]


def test_a_core_that_some_share_counts_in_part():
    masks = [frozenset({0, 1, 2, 3}), frozenset({2, 3})]
    assert [binding.share_of_cores(masks, rank) for rank in range(2)] == [3, 1]


def test_more_ranks_than_cores_have_one_thread_each():
    assert binding.share_of_cores([frozenset({0})] * 5, 3) == 1


def test_hardware_threads_of_one_core_count_once(tmp_path, monkeypatch):
    # cpu:  0  1  2  3       two cores of two hardware threads each
    # core: 0  1  0  1
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(binding, "_CPUS", tmp_path)
    assert binding.cores(frozenset({0, 1, 2, 3})) == {0, 1}
    assert binding.cores(frozenset({1, 3})) == {1}
    assert binding.cores(frozenset({0, 7})) == {0, 7}  # nothing is known of 7


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", float("inf")), ("150000 100000", 1.5), ("", float("inf"))]
)
def test_the_limit_of_a_container(tmp_path, monkeypatch, text, cores):
    monkeypatch.setattr(binding, "_QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(text)
    assert binding.quota() == cores


@pytest.mark.parametrize(
    ("wanted", "stated", "quota", "threads"),
    [
        (0, None, float("inf"), 4),  # 8 cores, 2 ranks that are not bound
        (3, "1", float("inf"), 3),  # the setting goes before the environment
        (0, "2", float("inf"), 2),
        (0, "nonsense", float("inf"), 4),
        (0, None, 5.0, 2),  # a container that gives 5 cores' time to both
        (0, None, 0.5, 1),
    ],
)
def test_threads_of_two_ranks_on_a_host(monkeypatch, wanted, stated, quota, threads):
    monkeypatch.setattr(binding, "cores", lambda: frozenset(range(8)))
    monkeypatch.setattr(binding, "quota", lambda: quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if stated is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    chosen = run_ranks(2, lambda world: binding.choose_threads(world, wanted), hosts=[0, 0])
    assert chosen == [threads, threads]


def test_device_is_the_local_rank_modulo_the_visible_devices(monkeypatch):
    """One visible GPU a task is number 0 for every task, whatever its local rank."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [binding.choose_device("auto", rank) for rank in range(3)] == [torch.device("cuda:0")] * 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [binding.choose_device("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert binding.choose_device("cpu", 1) == torch.device("cpu")


def test_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert binding.choose_device("auto", 3) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(UserError, match=r"local rank 3 sees 0 CUDA devices \(CUDA_VISIBLE_DEVICES=''\)"):
        binding.choose_device("cuda", 3)
