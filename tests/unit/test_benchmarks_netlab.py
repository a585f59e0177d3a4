"""The lab of hosts with links of their own; skips where it cannot be made, and says why."""

import os
import subprocess
import time

import pytest

from benchmarks import netlab
from benchmarks.netlab import Lab, NoLab, sent_bytes

SEND = """
import socket, sys
out = socket.create_connection((sys.argv[1], int(sys.argv[2])))
out.sendall(bytes(int(sys.argv[3])))
out.shutdown(socket.SHUT_WR)
assert out.recv(1) == b""
"""
RECEIVE = """
import socket
server = socket.create_server(("", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
"""


@pytest.fixture
def lab():
    try:
        with Lab(2, "50mbit") as lab:
            yield lab
    except NoLab as reason:
        pytest.skip(str(reason))


def on(lab, host, *command, **options):
    line = lab.on_first_host(command)
    line[line.index("h0")] = host
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **options)


def test_a_host_has_its_own_name_memory_and_addresses_of_all(lab):
    done = on(lab, "h1", "sh", "-c", "hostname; cat /etc/hosts; ls /dev/shm")
    assert done.communicate(timeout=30)[0].split() == [
        "h1",
        *("127.0.0.1", "localhost", "10.77.0.1", "h0", "10.77.0.2", "h1"),
    ]


def test_a_link_keeps_its_rate_and_counts_what_is_sent(lab):
    num_bytes = 2**20
    before = lab.sent_bytes()
    server = on(lab, "h1", "python3", "-c", RECEIVE)
    port = server.stdout.readline().strip()
    began = time.monotonic()
    client = on(lab, "h0", "python3", "-c", SEND, "h1", port, str(num_bytes))
    assert client.wait(30) == 0
    took_s = time.monotonic() - began
    assert server.wait(30) == 0
    assert took_s > 0.9 * 8 * num_bytes / 50e6
    sent = {host: count - before[host] for host, count in sent_bytes(lab.folder).items()}
    assert num_bytes < sent["h0"] < 1.1 * num_bytes
    assert sent["h1"] < 0.1 * num_bytes


def test_nothing_is_left_when_the_lab_ends_by_an_error():
    try:
        with Lab(2, "50mbit") as lab:
            left = on(lab, "h1", "sleep", "60")
            raise ZeroDivisionError
    except NoLab as reason:
        pytest.skip(str(reason))
    except ZeroDivisionError:
        pass
    assert left.wait(10) < 0  # killed
    assert not os.path.exists(lab.folder)


def test_without_root_there_is_no_lab_and_a_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoLab, match="hosts with links of their own need root"), Lab(2, "50mbit"):
        pass


def test_without_its_tools_there_is_no_lab_and_a_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(netlab, "_PATH", "")
    with pytest.raises(NoLab, match="need iproute2 and util-linux"), Lab(2, "50mbit"):
        pass


def test_a_lab_that_cannot_be_made_says_what_failed_and_leaves_nothing(monkeypatch):
    monkeypatch.setattr(netlab, "why_not", lambda: None)
    lab = Lab(1, "no rate at all")
    with pytest.raises(NoLab, match=r"hosts with links of their own cannot be made here: \w"), lab:
        pass
    assert not os.path.exists(lab.folder)
