"""The contract on ranks that are threads of this process, on hosts of many shapes."""

import cases
import pytest

from hpc_train.comm.loopback import run_ranks

HOSTS = ["0", "01", "00", "012", "001", "0123", "0011", "0101", "0001", "0120121"]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("name", cases.checks())
def test_contract(name, hosts):
    run_ranks(len(hosts), cases.checks()[name], timeout_s=60, hosts=[int(host) for host in hosts])
