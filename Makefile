# Two commands set everything up: `make demo` and `make test`. The rest is for those who work on the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One torch thread: on small or shared machines a second one costs more than it brings. The library itself
# never touches thread settings.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-exact lint format results clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/installed  ## Decode a built-in prompt plainly and with lookahead, side by side
	$(BIN)/lookahead compare --dtype float32

test: $(VENV)/installed lint  ## Lint, types, and the tests (minutes)
	$(BIN)/python -m pytest

test-exact: $(VENV)/installed  ## 1,000 random cases against transformers' own generate
	$(BIN)/python tests/run_exactness.py --cases 1000 --seed 0

lint: $(VENV)/installed  ## Style and types
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/mypy

format: $(VENV)/installed  ## Put the code into the project's style
	$(BIN)/ruff check --fix src tests tools benchmarks
	$(BIN)/ruff format src tests tools benchmarks

clean:  ## Remove the environment and all that the tools left behind
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
