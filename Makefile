# `make demo` and `make test` set up all they need in .venv; the rest is for those who change the code.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(not (3, 10) < sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
DEMO_HOME := $(CURDIR)/.demo
SOURCES := mlflow_batchai projects tests benchmarks

.PHONY: help demo test test-all check setup setup-dev format lint types layers faults contract screenshots bench bench-short constraints clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

$(VENV)/.setup: pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV) training
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	@PYTHON="$(PYTHON)" scripts/setup.sh $(VENV) training,azure,dev
	@touch $@

setup: $(VENV)/.setup ## Make .venv with the pinned packages and a Horovod wheel.
setup-dev: $(VENV)/.setup-dev ## The same with what tests and checks need.

demo: $(VENV)/.setup ## Train the CIFAR network on real digit images: two ranks on two nodes of this machine.
	@BATCHAI_HOME=$(DEMO_HOME)/batchai MLFLOW_TRACKING_URI=sqlite:///$(DEMO_HOME)/mlflow.db scripts/demo.sh $(BIN) $(DEMO_HOME)

test: $(VENV)/.setup-dev ## Tests that a change can break, a file at a time in each of two processes (about 15 minutes on 2 cores).
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/.setup-dev ## Every test: also trainings, browsers, random faults, wheels, machines, documentation (about 40 minutes).
	$(BIN)/python -m pytest -n 2 --dist loadfile

faults: $(VENV)/.setup-dev ## Failures, killed processes, fifty jobs at once (about an hour); SEEDS=1-50 [TOGETHER=5]: those seeds of the randomized run.
ifdef SEEDS
	@$(BIN)/python tests/faults/seeds.py $(SEEDS) --together $(or $(TOGETHER),1)
else
	$(BIN)/python -m pytest tests/faults tests/e2e/test_failures.py
	$(BIN)/python tests/faults/seeds.py 1-50 --together 5
	$(BIN)/python tests/faults/crowd.py
	$(BIN)/python tests/faults/crowd.py --kills 8
endif

contract: $(VENV)/.setup-dev ## Calls of scripts to MLflow, and its calls of the backend, with the oldest and the newest MLflow (a minute).
	@scripts/contract.sh $(BIN)

bench: $(VENV)/.setup-dev ## All benchmarks: ratios measured side by side, written into docs/benchmarks.md (half an hour on an idle machine).
	$(BIN)/python benchmarks/all.py

bench-short: $(VENV)/.setup-dev ## Two short ones, which fail where a figure passes twice its limit (under two minutes).
	$(BIN)/python benchmarks/all.py --short

screenshots: $(VENV)/.setup-dev ## Take docs/images anew: MLflow's pages of jobs that train here (about 4 minutes).
	$(BIN)/python -m pytest tests/e2e/test_ui.py --screenshots docs/images --basetemp /tmp/batchai

format: $(VENV)/.setup-dev ## Format the code.
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

lint: $(VENV)/.setup-dev ## Formatting and lint, without changing anything.
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(VENV)/.setup-dev ## mypy, strict.
	$(BIN)/mypy

layers: $(VENV)/.setup-dev ## Which package may import which.
	$(BIN)/lint-imports

check: lint types layers test-all ## Everything that CI runs.

constraints: $(VENV)/.setup-dev ## Write constraints.txt from what is installed now.
	@(head -1 constraints.txt; $(BIN)/pip freeze --exclude-editable | grep -viE '^(horovod|mlflow-batchai)|@ file') > constraints.new && mv constraints.new constraints.txt

clean: ## Remove .venv and what the demo left.
	rm -rf $(VENV) $(DEMO_HOME)
