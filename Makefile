# `make demo` and `make test` set up everything they need, once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test test-fast soak lint format bench clean

help:  ## Say what there is.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## Make .venv with the package (editable) and all that tests need.

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,plot,test,dev]"
	touch $(READY)

demo: $(READY)  ## A group sums tensors, loses a peer and then its master, and goes on: a line per event.
	$(BIN)/python examples/demo.py

test: $(READY)  ## All tests, the fast ones first; then see that nothing was left behind.
	$(BIN)/python -m tests.leftovers --remember
	$(PYTEST) -m "not slow and not ray" -n 2
	$(PYTEST) -m "slow or ray"
	$(BIN)/python -m tests.leftovers

test-fast: $(READY)  ## What one runs while coding: under two minutes.
	$(PYTEST) -m "not slow and not ray" -n 2 -q

soak: $(READY)  ## Kill peers and masters for MINUTES (10), with a progress line; SEED repeats a run.
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

lint: $(READY)  ## ruff and mypy --strict.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Let ruff format everything.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## The figures of the README: speed against others, recovery times, the master under 1,000 peers, orders of a ring.
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/shaped_links.py
	$(BIN)/python benchmarks/shared_state.py
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/master_load.py
	$(BIN)/python benchmarks/topology_sim.py

clean:  ## Remove .venv and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
