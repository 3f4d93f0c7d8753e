# Every command does its own set-up, on a fresh machine too, and starts at once the second time.
# An environment of your own in .venv is accepted, and only added to.
#
#   make test ARGS="-k ring"             arguments for pytest
#   make test WORKERS=0                  in one process (a debugger, prints); else one for each core
#   make demo PYTHON=/path/to/python3    the Python for a new .venv (else the newest one found)

SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo notebooks gpu test test-slow test-other-end lint format clean

ARGS ?=
WORKERS ?= logical
# Tests spend their time compiling, which keeps one core busy. Each worker needs about 1 GB.
PARALLEL := -n $(WORKERS) --maxprocesses 4 --dist worksteal
export PYTHON

help: ## list these commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## make .venv with everything for developing
	@tools/setup_env.sh .venv dev
	@echo "Ready: source .venv/bin/activate"

demo: ## plain against speculative decoding on long text: a table, results/demo/
	@tools/setup_env.sh .venv experiments
	@.venv/bin/python -m experiments.launch experiments/configs/demo.yaml

notebooks: ## run the notebooks, and store them with their outputs
	@tools/setup_env.sh .venv notebooks
	@.venv/bin/python -m experiments.notebooks $(ARGS)

gpu: ## measure everything that needs an NVIDIA GPU, with the python3 that has JAX for it
	@$(or $(PYTHON),python3) -m experiments.studies.measure_gpu $(ARGS)

test: ## the test suite
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m pytest $(PARALLEL) $(ARGS)

test-slow: ## the tests that take minutes
	@tools/setup_env.sh .venv test
	@.venv/bin/python -m pytest $(PARALLEL) -m slow $(ARGS)

test-other-end: ## kernel and loop tests with the other end of the supported range of JAX
	@tools/setup_env.sh .venv test
	@tools/test_other_end.sh $(PARALLEL) $(ARGS)

lint: ## formatting, lint and types
	@tools/setup_env.sh .venv dev
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m ruff check .
	.venv/bin/python -m mypy

format: ## format the code, and fix what lint can fix by itself
	@tools/setup_env.sh .venv dev
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

clean: ## remove the environments, caches and builds (results/ stays)
	rm -rf .venv .venv-oldest .venv-newest .venv*.lock build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
