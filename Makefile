# make train   set up .venv and train the embedded default model
# make test    set up .venv and run the quick tests: 6 to 7 minutes on two cores
# make test-rest    run all others: slow ones, those of several processes, Slurm's where it is installed
# make test-all     run both
# make test-float8    install torchao and test the layers with float8 products
# make gpu     on a machine with a GPU: its tests and benchmarks, in calls of 9 minutes
# make check   formatting, lint, types, layers
# make package build sdist and wheel into dist/, and check them
# make docs    build the documentation into docs/_build/html
PYTHON ?= python3
BIN := .venv/bin
# torch goes first and pinned: with it in place nothing that follows asks for another build of it.
TORCH := $(shell grep '^torch==' constraints.txt)
# Where to take torch from, e.g. TORCH_FLAGS="--index-url <PyTorch's index of CPU wheels>".
TORCH_FLAGS ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What `make test` runs: unit tests that are not slow, and a process test of each feature.
NEWCOMER := smoke or not (slow or distributed or slurm or alone)
WORKERS ?= 2
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal

# Else every process that a test starts compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-rest test-all test-float8 gpu check docs package clean

train: .venv/.installed
	$(BIN)/outlast train

test: .venv/.installed-test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "$(NEWCOMER)" $(PYTEST_ARGS)

# Tests that assert on the clock run last, with nothing beside them.
test-rest: .venv/.installed-test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not ($(NEWCOMER)) and not alone" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m alone $(PYTEST_ARGS) $(shell grep -lrw --include=*.py mark.alone tests)

test-all: test test-rest

# Not among the other tests: wherever torchao is installed, transformers imports all of it into
# every process that makes a model.
test-float8: .venv/.installed-test
	@$(PIP) --editable '.[float8]'
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/tensorize/test_tensorize_precision.py

# GPU_ARGS="--part guard --again" runs one part again.
gpu: .venv/.installed-test
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

check: .venv/.installed-test
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/.installed-test
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build/html

package: .venv/.installed
	@$(PIP) build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist >/dev/null
	$(BIN)/twine check --strict dist/*
	@test "$$(stat -c %s dist/*.whl)" -le 2500000 || { echo "the wheel has more than 2.5 MB"; exit 1; }

.venv/.installed: pyproject.toml constraints.txt
	@echo "Setting up .venv (a few minutes the first time) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outlast needs Python 3.11 or newer; say e.g. make PYTHON=python3.11 train")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@command -v nvidia-smi >/dev/null || { \
	  ! $(PIP) $(TORCH_FLAGS) --dry-run --report - $(TORCH) 2>/dev/null | grep -q '"name": "nvidia' || { \
	    echo "pip would install $(TORCH) with CUDA packages, but this machine has no NVIDIA GPU:"; \
	    echo 'name the index of CPU wheels, make TORCH_FLAGS="--index-url URL" train,'; \
	    echo "or take the CUDA build all the same, make TORCH_FLAGS=--no-input train."; \
	    test -n "$(TORCH_FLAGS)"; }; }
	@$(PIP) $(TORCH_FLAGS) $(TORCH)
	@$(PIP) --editable '.[all]'
	@touch $@

.venv/.installed-test: .venv/.installed
	@$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv docs/_build dist
