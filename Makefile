PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
# Tests at a time: much of a test's life is waiting for ranks.
WORKERS ?= 4
# One thread each: those that wait for work would take it from others.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
ARGS ?=

.PHONY: install install-dev run test test-all lint docs format keys figures bench chaos clean

# What a run needs.
install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fl_dist needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

# And what tests, linters and benchmarks need.
install-dev: .venv/.installed-dev

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

# The quick start: one server and two workers on the embedded digits.
run: install
	$(BIN)/python -m launch.local --ranks 3 run.dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# Unit tests, and the process tests of every promise: minutes.
test: install-dev
	$(PYTEST) -m 'not exhaustive' tests/unit tests/process $(ARGS)

# Everything, also on a Slurm cluster and in a browser where there are any.
test-all: install-dev
	$(PYTEST) tests $(ARGS)

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/codespell

# The site in site/; a warning is an error. Open site/index.html.
docs: install-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs site

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The listing of all keys that --help shows, from the code.
keys: install-dev
	$(BIN)/python -m fl_dist.config.help

# Every table and picture of the documents, from the records in docs/records: no training.
figures: install-dev
	$(BIN)/python docs/figures.py

# Disturb jobs at random N times and compare with undisturbed runs.
N ?= 100
chaos: install-dev
	$(BIN)/python -m tests.support.chaos $(N) $(ARGS)

bench: install-dev
	$(BIN)/python -m benchmarks.round $(ARGS)

clean:
	rm -rf .venv build site docs/reference/generated *.egg-info
