# `make run` and `make test` do all their own set-up; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin

# A shell that forbids bytecode would recompile every import at every start: seconds per command.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH
# DVC stages and tests call `python`, `dvc` and `mlflow` by name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export HF_HUB_DISABLE_TELEMETRY := 1
export MLFLOW_DISABLE_TELEMETRY := true
export DO_NOT_TRACK := true

.PHONY: help run ablation test fast lint types format ui bench clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

run: .venv/installed  ## train, evaluate and compare the default models on the embedded corpus
	@trap 'trap "" TERM; kill -TERM 0' INT TERM; $(BIN)/dvc repro report & wait $$!
	@cat reports/summary.txt

ablation: .venv/installed  ## a small ablation table with verdicts: part of hlr_cycles; Ctrl-C, and again, goes on
	$(BIN)/dvc repro tokenize
	$(BIN)/python -m pipelines.sweep +sweep=hlr_cycles 'only={h_cycles: [1, 2], l_cycles: [1, 2]}' workers=2

test: .venv/installed-test  ## every test, the slow ones last
	$(BIN)/python -m pytest -q -n 2 -m "not slow"
	$(BIN)/python -m pytest -q -m slow

fast: .venv/installed-test  ## the tests that take seconds
	$(BIN)/python -m pytest -q -n 2 -m "not slow"

lint: .venv/installed-test  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/installed-test  ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ui: .venv/installed  ## MLflow UI over the recorded runs, on this machine only
	$(BIN)/mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

bench: .venv/installed-test  ## speed, against other implementations
	$(BIN)/python -m benchmarks

clean:  ## remove every result (not the environment)
	rm -rf data artifacts evaluations reports checkpoints runs mlruns mlartifacts mlflow.db* dvc.lock .dvc/cache .dvc/tmp

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev,huggingface]'
	@touch $@
