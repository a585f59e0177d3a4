"""The choice of a backend, where it needs no other rank."""

import importlib.util

import pytest

from hpc_train.comm.connect import connect
from hpc_train.errors import UserError


def test_horovod_that_is_not_there_is_told_with_the_fix(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name))
    with pytest.raises(UserError, match="horovod is missing: make horovod"):
        connect("horovod")
