# Two commands set everything up: `make demo` and `make test`. The rest is for those who work on the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One torch thread: on small or shared machines a second one costs more than it brings. The library itself
# never touches thread settings.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-quantized test-exact test-parallel fuzz lint format results bench-engine paper-evaluation ablation pictures docs clean

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

test: $(VENV)/installed lint test-quantized  ## Lint, types, and the tests (minutes)
	$(BIN)/python -m pytest

# In a folder of its own: where torchao is installed, every program that imports transformers loads it, noisily.
build/torchao: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target $@ torchao
	touch $@

test-quantized: build/torchao  ## The tests that need torchao
	PYTHONPATH=build/torchao $(BIN)/python -m pytest tests/api/test_wrappers.py -k quantisation

test-exact: $(VENV)/installed  ## 1,200 greedy, 500 sampled and 300 batched random cases against transformers' own generate
	$(BIN)/python tests/support/run_exactness.py --cases 1000 --seed 0
	$(BIN)/python tests/support/run_exactness.py --cases 200 --seed 1 --engine static
	$(BIN)/python tests/support/run_sampling.py --cases 500 --seed 0
	$(BIN)/python tests/support/run_batches.py --cases 300 --seed 0
	$(BIN)/python -m pytest tests/backends/test_tree_attention.py -m exact

test-parallel: $(VENV)/installed  ## 200 random cases on 1 to 4 ranks against one process, 20 times a rank is killed, and every signal in every phase
	$(BIN)/python tests/support/run_parallel.py --cases 200 --kills 20 --signals 5 --seed 0

CASES ?= 3000
SEED ?=
fuzz: $(VENV)/installed  ## CASES=3000 random cases on every family of models against transformers' own generate; SEED=n one again
	$(BIN)/python tests/support/run_fuzz.py $(if $(SEED),--seed $(SEED),--cases $(CASES))

lint: $(VENV)/installed  ## Style, types, and which package may import which
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/ruff format --check src tests tools benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed  ## Put the code into the project's style
	$(BIN)/ruff check --fix src tests tools benchmarks
	$(BIN)/ruff format src tests tools benchmarks

# Prompts and the story model lie outside of this repository; RESTART=--restart measures everything anew.
SHARED ?= ../shared
RESTART ?=
results: $(VENV)/installed  ## Measure step compression and write docs/results.md (ten minutes); SHARED=folder of data and models
	$(BIN)/python benchmarks/step_compression.py --model demo --prompts $(SHARED)/data/humaneval.jsonl --name humaneval \
		--max-new-tokens 128 --dtype float32 --threads 1 --output benchmarks/results/humaneval-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/step_compression.py --model $(SHARED)/models/stories260k --prompts $(SHARED)/data/stories.jsonl \
		--name stories --max-new-tokens 200 --dtype float32 --threads 1 \
		--output benchmarks/results/stories-stories260k.jsonl $(RESTART)
	$(BIN)/python benchmarks/write_results.py

bench-engine: $(VENV)/installed  ## Measure what steps cost on one CPU thread and write docs/engine.md (twenty minutes)
	$(BIN)/python benchmarks/engine.py --model random --dtype bfloat16 --threads 1 \
		--output benchmarks/results/engine-random.jsonl $(RESTART)
	$(BIN)/python benchmarks/engine.py --model demo --dtype bfloat16 --threads 1 \
		--output benchmarks/results/engine-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/write_engine.py

paper-evaluation: $(VENV)/installed  ## Repeat the paper's evaluation and write docs/paper.md (half an hour); SHARED=folder
	$(BIN)/python benchmarks/paper_evaluation.py grid --model $(SHARED)/models/stories260k --data $(SHARED)/data \
		--prompts stories.jsonl --threads 1 --output benchmarks/results/paper-grid-stories260k.jsonl $(RESTART)
	$(BIN)/python benchmarks/paper_evaluation.py tasks --model demo --data $(SHARED)/data \
		--prompts humaneval.jsonl,classeval.jsonl,gsm8k.jsonl,spec_bench.jsonl --per-task 4 --max-new-tokens 96 \
		--threads 1 --output benchmarks/results/paper-tasks-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/paper_evaluation.py sampling --model $(SHARED)/models/stories260k --data $(SHARED)/data \
		--prompts stories.jsonl --seeds 3 --max-new-tokens 100 --threads 1 \
		--output benchmarks/results/paper-sampling-stories260k.jsonl $(RESTART)
	$(BIN)/python benchmarks/paper_evaluation.py sampling --model demo --data $(SHARED)/data \
		--prompts humaneval.jsonl,gsm8k.jsonl --per-task 3 --seeds 2 --max-new-tokens 64 --threads 1 \
		--output benchmarks/results/paper-sampling-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/write_paper_evaluation.py

ablation: $(VENV)/installed  ## Measure what each part of drafting brings and takes, and write docs/drafting.md (fifteen minutes); SHARED=folder
	$(BIN)/python benchmarks/ablation.py --model $(SHARED)/models/stories260k --prompts $(SHARED)/data/stories.jsonl \
		--name stories --limit 12 --max-new-tokens 200 --threads 1 \
		--output benchmarks/results/ablation-stories260k.jsonl $(RESTART)
	$(BIN)/python benchmarks/ablation.py --model demo --prompts $(SHARED)/data/humaneval.jsonl --name humaneval \
		--limit 8 --max-new-tokens 128 --threads 1 --output benchmarks/results/ablation-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/ablation.py --model demo --prompts $(SHARED)/data/classeval.jsonl --name classeval \
		--limit 20 --nodes 16 64 --max-new-tokens 128 --threads 1 \
		--output benchmarks/results/ablation-classeval-demo.jsonl $(RESTART)
	$(BIN)/python benchmarks/drafting_cost.py --output benchmarks/results/drafting-cost.jsonl
	$(BIN)/python benchmarks/write_ablation.py

pictures: $(VENV)/installed  ## Draw the pictures of docs/method.md from a real run of the demo model
	$(BIN)/python benchmarks/method_pictures.py

$(VENV)/docs-installed: pyproject.toml constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/docs-installed  ## Build the documentation into build/site; warnings and dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove the environment and all that the tools left behind
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
