"""Which samples each replica takes next.  PURE: neither torch nor MPI.

An epoch's order comes from the seed alone.  A step takes the next `batch_size` samples of it and
cuts them by the shares of the replicas, so that every sample comes exactly once an epoch on any
grid, whatever the shares are and wherever a run is stopped and resumed:

    order     7 2 9 4 | 0 5 1 8 | 3 6         10 samples, batch_size 4: the last batch is ragged
    shares    1 : 3
    replica 0 7       | 0       | 3
    replica 1   2 9 4 |   5 1 8 |   6
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """A place in the data: `offset` samples of `epoch` have been taken."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Batch:
    """The samples of one step.

    Args:
        indices: for each replica the samples it takes, [its share]; read-only views.
        size: samples of all replicas together; less than `batch_size` at the end of an epoch.
        next: where the following batch begins.
    """

    indices: tuple[Indices, ...]
    size: int
    next: Cursor


@lru_cache(maxsize=1)  # the current epoch's: 8 bytes a sample
def order(seed: int, epoch: int, num_samples: int) -> Indices:
    """A permutation of `range(num_samples)`, read-only.

    Made by sorting PCG64's raw output: numpy promises those bits for all its versions, and does not
    for `Generator.permutation` (NEP 19), while a resumed run must find the order it left.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_samples)
    permutation = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    permutation.flags.writeable = False
    return permutation


def cut(num_samples: int, shares: Sequence[int]) -> list[int]:
    """Divide `num_samples` in proportion to `shares`, by largest remainder; a zero share stays zero.

    Raises:
        ValueError: a share is negative, or none is positive though there are samples.
    """
    total = sum(shares)
    if min(shares, default=0) < 0 or (total == 0 and num_samples > 0):
        raise ValueError(f"cannot cut {num_samples} samples by shares {list(shares)}")
    if total == 0:
        return [0] * len(shares)
    counts = [num_samples * share // total for share in shares]
    left = num_samples - sum(counts)
    # Fewer are left than there are replicas with a remainder, so a zero share never gets one.
    by_remainder = sorted(range(len(shares)), key=lambda i: (-(num_samples * shares[i] % total), i))
    for replica in by_remainder[:left]:
        counts[replica] += 1
    return counts


def take(num_samples: int, seed: int, cursor: Cursor, batch_size: int, shares: Sequence[int]) -> Batch:
    """The next batch after `cursor`: at most `batch_size` samples, never from two epochs.

    Raises:
        UserError: there are no samples, or the cursor lies beyond them.
    """
    if num_samples == 0:
        raise UserError("the dataset has 0 samples: there is nothing to train on")
    if not 0 <= cursor.offset < num_samples:
        raise UserError(
            f"cannot go on at sample {cursor.offset} of an epoch of {num_samples}: "
            "resume with the dataset that the checkpoint was made with"
        )
    begin, end = cursor.offset, min(cursor.offset + batch_size, num_samples)
    bounds = np.cumsum([begin, *cut(end - begin, shares)])
    epoch_order = order(seed, cursor.epoch, num_samples)
    parts = tuple(epoch_order[a:b] for a, b in pairwise(bounds))
    following = Cursor(cursor.epoch, end) if end < num_samples else Cursor(cursor.epoch + 1, 0)
    return Batch(parts, end - begin, following)
