# Every command sets up its environment first; a second call starts immediately.
# An existing environment in .venv is used, and missing packages are added to it.
#
#   make test ARGS="-k ring"             arguments for pytest
#   make test WORKERS=0                  in one process, for a debugger or prints (default: one per core)
#   make demo PYTHON=/path/to/python3    the Python for a new .venv (default: the newest found)

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo peers docs notebooks gpu tpu test test-slow test-other-end test-mutations fuzz lint format clean

ARGS ?=
WORKERS ?= logical
# Tests mostly compile, which uses one core. Each worker needs about 1 GB.
PARALLEL := -n $(WORKERS) --maxprocesses 4 --dist worksteal
export PYTHON

help: ## list these commands
	@grep -E '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## make .venv with all development packages
	@tools/setup_env.sh .venv dev
	@echo "Ready: source .venv/bin/activate"

demo: ## compare speculative with plain decoding (downloads 1.6 GB at most); writes results/demo/
	@tools/setup_env.sh .venv experiments
	@.venv/bin/python -m experiments.demo $(ARGS)

peers: ## compare with transformers, llama.cpp and OpenVINO; writes results/peers_llm/
	@tools/setup_env.sh .venv experiments
	@tools/setup_peers.sh
	@.venv/bin/python -m experiments.studies.peers experiments/configs/peers_llm.yaml

docs: ## build the documentation in build/docs, with warnings as errors
	@tools/setup_env.sh .venv docs
	@.venv/bin/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "Open build/docs/index.html"

notebooks: ## run the notebooks and store their outputs (downloads 93 MB)
	@tools/setup_env.sh .venv notebooks
	@.venv/bin/python -m magicjax fetch smollm2
	@.venv/bin/python -m experiments.notebooks $(ARGS)

gpu tpu: ## measure everything that needs an NVIDIA GPU or a TPU, with a python3 that has JAX
	@$(or $(PYTHON),python3) -m experiments.studies.accelerator $(ARGS)

test: ## run the quick test suite
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m pytest $(PARALLEL) --failed-first --new-first $(ARGS)

test-slow: ## run the slow tests
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m pytest $(PARALLEL) -m slow $(ARGS)

test-other-end: ## run kernel and loop tests with the oldest supported JAX
	@tools/test_other_end.sh $(PARALLEL) $(ARGS)

test-mutations: ## check that the quick suite catches wrong changes to the core
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m tests.mutations

fuzz: ## compare random configurations and engine schedules with plain decoding (ARGS="--minutes 60")
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m tests.fuzz $(ARGS)

lint: ## check formatting, lint and types
	@tools/setup_env.sh .venv dev
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy

format: ## format the code and apply lint fixes
	@tools/setup_env.sh .venv dev
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

clean: ## remove environments, caches and builds, but not results/
	rm -rf .venv .venv-jax-* .venv-peers .venv*.lock build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
