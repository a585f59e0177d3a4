"""The contract on ranks that are threads of this process."""

import cases
import pytest

from hpc_train.comm.loopback import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", cases.checks())
def test_contract(name, num_ranks):
    run_ranks(num_ranks, cases.checks()[name], timeout_s=60)
