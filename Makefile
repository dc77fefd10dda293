# make quickstart: set up and train a small language model on this machine. make test: set up and pass the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers

.PHONY: quickstart test check gate bench nightly gpu clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(PEERS): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,peers]'
	touch $@

quickstart: $(STAMP)
	$(BIN)/shardwise train recipes/quickstart.toml

test: $(STAMP)
	$(BIN)/python -m tests.side_by_side -m "not nightly and not gpu"

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

gate: $(STAMP)
	$(BIN)/python -m benchmarks.engine --blocks 8 --steps 3 --gate 1.10

bench: $(PEERS)
	$(BIN)/python -m benchmarks.engine

nightly: $(PEERS)
	$(BIN)/python -m tests.side_by_side -m "not gpu"
	$(BIN)/python -m benchmarks.engine

gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu -m gpu -rs

clean:
	rm -rf $(VENV) build *.egg-info
