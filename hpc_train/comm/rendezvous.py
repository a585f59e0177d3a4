"""Where torch.distributed's ranks meet: an address that other hosts reach, and a port that is free.

The system picks the port, and both are told over the control plane, so that nothing is configured
and no two jobs meet by accident.
"""

import json
import socket
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in __all__
from torch.distributed.distributed_c10d import Store

from hpc_train.comm.interface import ControlPlane
from hpc_train.errors import UserError

_ONE_HOST = "127.0.0.1"
_ANY_PORT = 9  # connecting UDP sends nothing: it only asks which way a packet would go


def my_address(control: ControlPlane, host: str) -> str:
    """An IP address at which the other ranks reach this one.  All ranks call it.

    Raises:
        UserError: on every rank, if some host knows only addresses that others cannot reach.
    """
    hosts = [data.decode() for data in control.all_gather(host.encode())]
    if len(set(hosts)) == 1:
        return _ONE_HOST
    mine = _addresses(host) or _way_to(sorted(set(hosts) - {host}))
    known = [data.decode() for data in control.all_gather(" ".join(mine).encode())]
    lost = sorted({name for name, addresses in zip(hosts, known, strict=True) if not addresses})
    if lost:
        raise UserError(
            f"host {lost[0]} knows itself and its peers by loopback addresses only: correct its /etc/hosts"
        )
    return mine[0]


def open_store(control: ControlPlane, host: str) -> Store:
    """The same store on every rank; rank 0 serves it, on a port that was free.  All ranks call it."""
    address = my_address(control, host)
    if control.rank == 0:
        store: Any = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        control.all_gather(json.dumps([address, store.port]).encode())
        return cast(Store, store)
    address, port = json.loads(control.all_gather(b"")[0])
    return cast(Store, TCPStore(address, port, is_master=False))


def _addresses(host: str) -> list[str]:
    """What the name resolves to, without loopback: Debian gives a host's own name 127.0.1.1."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except socket.gaierror:
        return []
    return [address for address in found if not address.startswith("127.") and address != "::1"]


def _way_to(hosts: list[str]) -> list[str]:
    """The addresses of the interfaces through which packets to `hosts` would leave."""
    ways = []
    for address in (address for host in hosts for address in _addresses(host)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, _ANY_PORT))
            except OSError:  # no way there: the next one may have one
                continue
            ways.append(str(probe.getsockname()[0]))
    return ways
