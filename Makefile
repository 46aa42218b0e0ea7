# Two commands do everything: `make demo` and `make test`. Both set up .venv first (seconds on a rerun).
PYTHON ?= python3
BIN := .venv/bin
# test processes
WORKERS ?= 2

.PHONY: help setup demo test pytest lint format test-gpu mutants tutorial docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv from the lock of this machine's kind (CPU or CUDA)
	@$(PYTHON) scripts/setup_env.py

demo: setup  ## a real model: build, calibrate, serve both, chat, compare (DEMO="--help" for options)
	@$(BIN)/python scripts/demo.py $(DEMO)

test: setup  ## linters, types and every test that runs without a GPU
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# one thread each: those of two test processes would wait for each other
pytest:
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations 40 $(TESTS)

test-gpu: setup  ## the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu $(TESTS)

mutants: setup  ## wrong changes that the tests must catch, one at a time (MUTANTS="--help" for options)
	@$(BIN)/python scripts/mutants.py $(MUTANTS)

tutorial: setup  ## run every chapter of docs/tutorial, a line each (TUTORIAL="05 06" runs some)
	@$(BIN)/python scripts/tutorial.py $(TUTORIAL)

docs: setup  ## the tutorial and all pages as a site in results/site
	@$(BIN)/python scripts/tutorial.py --changed && $(BIN)/python scripts/build_docs.py

lint: setup  ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: setup  ## let ruff fix and format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean:  ## remove what the targets made
	rm -rf .venv .venv-docs models results reports .pytest_cache .mypy_cache .ruff_cache .hypothesis
