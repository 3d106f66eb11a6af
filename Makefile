# make train   set up .venv and train the embedded default model
# make test    set up .venv and run all tests that need no system package
# make check   formatting, lint, types, layers
# make docs    build the documentation into docs/_build/html
PYTHON ?= python3
BIN := .venv/bin
# torch goes first and pinned: with it in place nothing that follows asks for another build of it.
TORCH := $(shell grep '^torch==' constraints.txt)
# Where to take torch from, e.g. TORCH_FLAGS="--index-url <PyTorch's index of CPU wheels>".
TORCH_FLAGS ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: train test check docs clean

train: .venv/.installed
	$(BIN)/outlast train

test: .venv/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: .venv/.installed-test
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: .venv/.installed-test
	$(BIN)/sphinx-build --fail-on-warning --quiet docs docs/_build/html

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
	@$(PIP) --editable .
	@touch $@

.venv/.installed-test: .venv/.installed
	@$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv docs/_build
