"""A signal sets a flag, and no more."""

import os
import signal
import subprocess
import sys

import pytest

from hpc_train.launch.signals import SignalFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_sets_the_flag(number):
    with SignalFlag() as flag:
        assert flag.seen == 0
        os.kill(os.getpid(), number)
        assert flag.seen == number


def test_the_handlers_before_come_back():
    def mine(number, frame):
        raise AssertionError("not called")

    before = signal.signal(signal.SIGUSR2, mine)
    try:
        with SignalFlag():
            assert signal.getsignal(signal.SIGUSR2) != mine
        assert signal.getsignal(signal.SIGUSR2) == mine
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_it_can_be_entered_again():
    flag = SignalFlag()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        with flag:
            os.kill(os.getpid(), number)
        assert flag.seen == number


def test_any_number_of_usr2_does_no_harm():
    with SignalFlag() as flag:
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGTERM)  # the first SIGTERM is still only noted
        assert flag.seen == signal.SIGTERM


@pytest.mark.parametrize("between", ["", "os.kill(os.getpid(), signal.SIGUSR2)"])
def test_a_second_term_ends_the_process(between):
    story = f"""
import os, signal
from hpc_train.launch.signals import SignalFlag
with SignalFlag() as flag:
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    {between}
    os.kill(os.getpid(), signal.SIGTERM)
    print("not here any more", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", story], capture_output=True, text=True, timeout=30)
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGTERM
