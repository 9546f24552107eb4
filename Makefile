# Every target does its own set-up: on a fresh clone, `make quickstart` or `make test` is the only command needed.

PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Two workers of one thread each: with more, torch's own threads fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

.DEFAULT_GOAL := help
.PHONY: help quickstart venv test test-slow lint format types floors bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

quickstart: .venv/runtime  ## build a small model, train it, generate, and look inside
	@$(BIN)/sublayer quickstart

venv: .venv/dev  ## the development environment in .venv (PYTHON=python3.12 chooses another Python)

test: .venv/dev  ## all tests but the slow ones and those on real weights (ARGS="-k norm" chooses)
	@$(PYTEST) -m "not slow and not assets" $(ARGS)

test-slow: .venv/dev  ## the slow tests, and those that fetch real weights and data
	@$(PYTEST) -m "slow or assets" $(ARGS)

lint: .venv/dev  ## style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: .venv/dev  ## mend what can be mended of style and format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: .venv/dev  ## static types
	@$(BIN)/pyright

floors: .venv/dev  ## who may import whom
	@$(BIN)/lint-imports --no-logo

bench: .venv/dev  ## ratios against peers, side by side (ONLY=name chooses one, FULL=1 takes all sizes)
	@$(BIN)/python -m bench $(if $(ONLY),--only $(ONLY)) $(if $(FULL),--full)

clean:  ## remove the environment and the caches
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist

# Stamps. A changed pyproject.toml or constraints.txt installs again.
.venv/runtime: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing Sublayer into .venv (torch is large: this can take minutes)"
	@$(PIP) -e .
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "Installing Sublayer and its development tools into .venv (torch is large: this can take minutes)"
	@$(PIP) -e '.[dev,bench]'
	@touch .venv/runtime $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Sublayer needs Python 3.11 or newer; $(PYTHON) is " \
	  + sys.version.split()[0] + ". Choose one: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv .venv
