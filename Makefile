# `make demo` and `make test` set up everything they need, once, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test test-fast soak lint format docs notebooks picture bench clean

help:  ## Say what there is.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## Make .venv with the package (editable) and all that tests need.

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[torch,plot,test,dev,notebooks,docs]"
	touch $(READY)

demo: $(READY)  ## Elastic training on a local Ray: an actor killed, one joining, the master killed; a table with milliseconds, demo.png.
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

docs: $(READY)  ## The documentation as a site, into build/site; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

notebooks: $(READY)  ## Run the notebooks anew and save their outputs; on a quiet machine, about three minutes.
	$(BIN)/python notebooks/execute.py

picture: $(READY)  ## Take the picture of the live page again.
	$(BIN)/python -m tests.dashboard.screenshot

bench: $(READY)  ## The figures of the README: speed against others, recovery times, torch, the master under 1,000 peers, orders of a ring.
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/shaped_links.py
	$(BIN)/python benchmarks/shared_state.py
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/torch_step.py
	$(BIN)/python benchmarks/master_load.py
	$(BIN)/python benchmarks/topology_sim.py

clean:  ## Remove .venv and caches.
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
