# Everything a newcomer or CI needs; each target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What pip does file by file, on all cores; some packages ship files that are no Python of this version.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python*/site-packages >/dev/null || true

# Two test processes more than the machine has cores, up to eight: a third of a test's time is waiting for others.
PROCESSES = $(shell $(BIN)/python -c 'import os; print(min(8, 2 + (os.cpu_count() or 1)))')
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal
# These fork their own process in nearly every test, and a fork costs what the process holds: run first, by processes
# that never import PyTorch, they take a quarter of the processor time.
FORKING := tests/unit/runtime
# Each test starts processes; without cached bytecode each of those would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test collected test-fast test-long lint docs vectors count clean bench-package bench-lifecycle bench-evidence bench-gate bench-collectives bench-nulls bench-places bench-spread bench-trainer bench-checkpoints bench-hardware bench-coverage

help: ## this list
	@grep -E '^[a-z][a-z -]*:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Glasshouse needs Python 3.11 or newer; name one with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Enough to seal, serve, run and verify the example.
$(VENV)/.ready-run: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing Glasshouse and its training frameworks (a few minutes the first time) ..."
	$(PIP) -e '.[train,examples]'
	@$(COMPILE)
	@touch $@

# The same, what tests and linters need, and what measures.
$(VENV)/.ready-dev: $(BIN)/python pyproject.toml bench/pyproject.toml constraints.txt
	@echo "Installing Glasshouse with its development tools (a few minutes the first time) ..."
	$(PIP) -e '.[dev]' -e bench
	@$(COMPILE)
	@touch $@ $(VENV)/.ready-run

setup: $(VENV)/.ready-dev ## install everything into .venv

demo: $(VENV)/.ready-run ## a protected LoRA run on this machine, verified
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/clinic/demo.sh

test: $(VENV)/.ready-dev ## the whole test suite
	$(PYTEST) $(FORKING) $(ARGUMENTS)
	$(PYTEST) $(FORKING:%=--ignore=%) $(ARGUMENTS)

# Each of several processes would compile all tests of a fresh clone for itself.
collected: $(VENV)/.ready-dev
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true  # what is wrong is told by `make test`

test-fast: $(VENV)/.ready-dev ## units, vectors, properties and a few whole runs, in about three minutes
	$(PYTEST) $(FORKING) -m 'not long and not slow'
	$(PYTEST) $(FORKING:%=--ignore=%) -m 'not long and not slow and (not integration or smoke)'

test-long: $(VENV)/.ready-dev ## the tests that take minutes
	$(BIN)/python -m pytest -m long

lint: $(VENV)/.ready-dev ## style, types, import layers, how much code is trusted with keys
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd bench && ../$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.trusted --check

# What links lead to keeps its place, so that the site's links are the repository's.
SITE := build/site-source

docs: $(VENV)/.ready-dev ## the documentation as a site, in build/site
	rm -rf $(SITE) build/site && mkdir -p $(SITE)/benchmarks
	ln -s $(CURDIR)/*.md $(CURDIR)/docs $(CURDIR)/spec $(CURDIR)/examples $(SITE)
	ln -s $(CURDIR)/benchmarks/results $(SITE)/benchmarks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

vectors: $(VENV)/.ready-dev ## write spec/vectors again from their generators
	for generator in spec/vectors/generate_*.py; do $(BIN)/python $$generator || exit 1; done

bench-package bench-lifecycle bench-evidence bench-gate bench-collectives bench-nulls bench-places bench-spread bench-trainer bench-checkpoints bench-hardware: $(VENV)/.ready-dev ## a measurement; options in ARGUMENTS, -o FILE keeps it
	$(BIN)/python -m benchmarks.$(@:bench-%=%) $(ARGUMENTS)

bench-coverage: $(VENV)/.ready-dev ## how often the interval holds the truth in simulated worlds; takes four minutes
	$(BIN)/python -m glasshouse_bench.coverage $(ARGUMENTS)

count: $(VENV)/.ready-dev ## lines of code by what they are trusted with: package key, other keys, plaintext
	@$(BIN)/python -m benchmarks.trusted

clean: ## remove what the targets above made
	rm -rf $(VENV) .glasshouse build dist src/*.egg-info bench/src/*.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis
