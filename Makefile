PYTHON ?= python3
BIN := .venv/bin
ARGS ?=

.PHONY: install run test lint format bench chaos clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fl_dist needs Python 3.11 or newer; set PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The quick start: one server and two workers on the embedded digits.
run: install
	$(BIN)/python -m launch.local --ranks 3 run.dir=runs/quickstart-$$(date +%Y%m%d-%H%M%S) $(ARGS)

# Two at a time: most of a test's life is waiting for ranks.
test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Disturb jobs at random N times and compare with undisturbed runs.
N ?= 100
chaos: install
	$(BIN)/python -m tests.chaos $(N) $(ARGS)

bench: install
	$(BIN)/python -m benchmarks.round $(ARGS)

clean:
	rm -rf .venv build *.egg-info
