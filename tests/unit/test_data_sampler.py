"""The sampler: every sample exactly once an epoch, whatever the shares, the grid and the resumes."""

import random
from fractions import Fraction

import numpy as np
import pytest

from hpc_train.data.sampler import Cursor, cut, order, take
from hpc_train.errors import UserError


def test_order_is_a_permutation_of_its_own_for_each_seed_and_epoch():
    orders = [tuple(order(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert len(set(orders)) == len(orders)


def test_order_stays_the_same_for_ever():
    """A checkpoint of last year must find its place: these numbers may never change."""
    assert order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert order(7, 3, 8).tolist() == [2, 4, 7, 3, 5, 1, 0, 6]


def test_order_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 4)[0] = 1


def test_order_keeps_one_epoch_in_memory():
    order.cache_clear()
    first = order(1, 0, 10)
    assert order(1, 0, 10) is first
    order(1, 1, 10)
    assert order.cache_info().currsize == 1


def test_cut_is_exact_near_the_quota_and_keeps_zeros():
    rng = random.Random(0)
    for _ in range(2000):
        shares = [rng.choice([0, 1, rng.randrange(1, 40)]) for _ in range(rng.randrange(1, 12))]
        if not any(shares):
            continue
        num_samples = rng.randrange(0, 200)
        counts = cut(num_samples, shares)
        assert sum(counts) == num_samples
        for count, share in zip(counts, shares, strict=True):
            assert abs(count - Fraction(num_samples * share, sum(shares))) < 1
            assert share or count == 0


def test_cut_gives_a_full_batch_its_shares():
    assert cut(12, [5, 0, 4, 3]) == [5, 0, 4, 3]
    assert cut(10, [1, 1, 1]) == [4, 3, 3]
    assert cut(0, [0, 0]) == [0, 0]


@pytest.mark.parametrize("shares", [[0, 0], [], [3, -1]])
def test_cut_refuses_shares_that_cannot_be(shares):
    with pytest.raises(ValueError, match="cannot cut 4 samples"):
        cut(4, shares)


def random_shares(rng: random.Random) -> list[int]:
    """A new grid and new shares, zeros among them, as plans of a run may bring at every step."""
    shares = [rng.choice([0, rng.randrange(1, 9)]) for _ in range(rng.randrange(1, 6))]
    return shares if any(shares) else [1]


def test_every_sample_exactly_once_an_epoch_for_any_shares_and_grids():
    rng = random.Random(1)
    for trial in range(200):
        num_samples = rng.randrange(1, 60)
        cursor = Cursor()
        for epoch in range(3):
            seen: list[int] = []
            while cursor.epoch == epoch:
                batch_size, shares = rng.randrange(1, 20), random_shares(rng)
                batch = take(num_samples, trial, cursor, batch_size, shares)
                assert batch.size == min(batch_size, num_samples - cursor.offset)
                assert [len(part) for part in batch.indices] == cut(batch.size, shares)
                seen.extend(np.concatenate(batch.indices).tolist())
                cursor = batch.next
            assert cursor == Cursor(epoch + 1, 0)
            assert sorted(seen) == list(range(num_samples))
            assert seen == order(trial, epoch, num_samples).tolist()


def test_a_cursor_goes_on_anywhere():
    """Stopped after any step and resumed on other replicas, a run takes the same batches."""

    def batches(cursor: Cursor, shares: list[int], count: int) -> list[list[int]]:
        taken = []
        for _ in range(count):
            batch = take(23, 5, cursor, 4, shares)
            taken.append(np.concatenate(batch.indices).tolist())
            cursor = batch.next
        return taken

    unbroken = batches(Cursor(), [2, 2], 15)
    cursor = Cursor()
    for step in range(15):
        assert batches(cursor, [1, 0, 3], 15 - step) == unbroken[step:]
        cursor = take(23, 5, cursor, 4, [4]).next


def test_one_replica_may_take_all_and_another_nothing():
    batch = take(10, 0, Cursor(), 4, [0, 4])
    assert [part.tolist() for part in batch.indices] == [[], order(0, 0, 10)[:4].tolist()]


def test_resuming_with_a_smaller_dataset_is_refused():
    with pytest.raises(UserError, match="sample 90 of an epoch of 80: resume with the dataset"):
        take(80, 0, Cursor(0, 90), 4, [1])
    with pytest.raises(UserError, match="0 samples"):
        take(0, 0, Cursor(), 4, [1])
