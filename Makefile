# kvlens: `make demo` shows it, `make test` tests it; each sets up what it needs in .venv.

PYTHON ?= python3
# A CPU build is enough for everything here; CONTRIBUTING says how to choose another.
TORCH ?= torch==2.13.0
ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

SHELL := /bin/bash

.PHONY: install demo test lint bench soak gpu-check dashboards lock clean

install: .venv/dev.stamp

.venv/engine.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvlens needs Python 3.10 or newer: set PYTHON=python3.x")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing kvlens into .venv ..." >&2
	@$(BIN)/python -m pip --disable-pip-version-check install -q '$(TORCH)' >&2
	@$(PIP) -e '.[engine]' >&2
	@touch $@

.venv/dev.stamp: .venv/engine.stamp
	@$(PIP) -e '.[dev]' >&2
	@touch $@

demo: .venv/engine.stamp
	@$(BIN)/kvlens demo $(ARGS)

test: .venv/dev.stamp
	@for tool in prometheus promtool tmux npm; do command -v $$tool >/dev/null || \
	  { echo "make test needs $$tool: apt-get install prometheus tmux npm" >&2; exit 2; }; done
	$(MAKE) --no-print-directory lint
	$(BIN)/pytest -m "not soak and not gpu" $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

bench: .venv/dev.stamp
	$(BIN)/kvlens bench publish
	$(BIN)/kvlens bench overhead
	$(BIN)/kvlens bench generate

soak: .venv/dev.stamp
	$(BIN)/pytest -m soak --timeout 7200 $(ARGS)

gpu-check: .venv/dev.stamp
	$(BIN)/pytest -m gpu $(ARGS)
	$(BIN)/kvlens bench overhead --device cuda
	$(BIN)/kvlens bench generate --device cuda

dashboards: .venv/dev.stamp
	$(BIN)/kvlens dashboards build

# Pins for every supported Python, from the ranges in pyproject.toml; torch is chosen by TORCH.
lock: .venv/dev.stamp
	$(BIN)/python -m pip install -q uv
	$(BIN)/uv pip compile -q --universal --python-version 3.10 --all-extras --no-annotate --no-header --no-emit-index-url \
	  --override <(echo '$(TORCH)') pyproject.toml | grep -vE '^(torch|triton|nvidia-|cuda-)' > constraints.txt

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
