# The two commands a newcomer needs are `make demo` and `make test`; both set up .venv by themselves.
# The rest is for those who work on Gemini. `make help` lists the targets.

SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
# The first Python that runs and is new enough. Each candidate is really started: a shim on PATH may have nothing behind it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done)

NATIVE_SOURCES := $(wildcard setup.py) $(shell find csrc -type f 2>/dev/null)
# Test files at a time: each test computes with one thread. One more than cores, since tests of files and ranks also wait;
# each takes some 20 s of a core before its first test (imports, collection).
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$(( n < 5 ? n + 1 : 6 )))
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Tests and jobs never reach out to a hub, and fork after tokenizers is silent.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Tests start many Pythons, and each would compile all of Gemini again where the shell says to keep no bytecode.
export PYTHONDONTWRITEBYTECODE :=

FAKEGPU ?= .venv-fakegpu

.PHONY: help venv demo test test-slow test-gpu test-fakegpu lint docs wheels doctor clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{ printf "  make %-10s %s\n", $$1, $$2 }'

demo: $(VENV)/.built  ## set up, then train a GPT-2-shaped model in less memory than it needs
	$(BIN)/gemini demo $(ARGS)

test: $(VENV)/.built  ## set up, then run the quick tests (ARGS="-k name" to choose)
	@echo "One case of everything; 'make test-slow' runs more combinations."
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(VENV)/.built  ## set up, then run the wider sweeps, and what takes minutes
	@echo "Every two values of parameters meet in a file; all combinations: make test-slow ARGS='-m slow'."
	$(BIN)/python -m pytest -m "slow and not exhaustive" -n $(JOBS) --dist loadfile $(ARGS)

test-gpu: $(VENV)/.built  ## set up, then run the tests of a GPU (GEMINI_GPU_TESTS=standin: without one)
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

# On a CUDA runtime in host memory (tests/fakegpu), as the first GPU of a process and as the second.
test-fakegpu: $(FAKEGPU)/.built  ## set up the CUDA build of torch (8 GB), then run the tests of a card without one
	preload=$$($(FAKEGPU)/bin/python tests/fakegpu/build_runtime.py $(FAKEGPU)/runtime) && \
	for rank in 0 1; do \
	  LD_PRELOAD=$$preload LOCAL_RANK=$$rank $(FAKEGPU)/bin/python -m pytest -p tests.fakegpu.plugin -p no:cacheprovider \
	    -m gpu -n $(JOBS) --dist loadfile tests/gpu tests/fakegpu $(ARGS) || exit 1; \
	done && \
	LD_PRELOAD=$$preload $(FAKEGPU)/bin/python -m pytest -p tests.fakegpu.plugin -p tests.fakegpu.as_standin \
	  -p no:cacheprovider -n $(JOBS) --dist loadfile \
	  $(addprefix tests/train/test_,placements.py races.py exactness.py parked.py) $(ARGS)

lint: $(VENV)/.built  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.built  ## build the documentation into docs/_build/html; every warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html $(ARGS)
	@echo "docs/_build/html/index.html"

wheels: $(VENV)/.built  ## build the source distribution and wheels into dist/, install each into an empty environment, try it
	PYTHONPATH=. $(BIN)/python benchmarks/installation.py --dist dist $(ARGS)

doctor: $(VENV)/.built  ## set up, then say what this machine offers
	$(BIN)/gemini doctor

venv: $(VENV)/.built  ## set up .venv: pinned packages, Gemini editable, native kernels

# The environment: made anew only when what it depends on changes.
$(VENV)/.made: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "The pinned packages need Python 3.11 or newer, and none was found on PATH."; \
	  echo "Install one (tested: 3.11), or say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON); the first time this takes some minutes."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu install the package python3-venv."; exit 1; }
	@# torch first, by exactly the pinned version (constraints.txt says why), and what a build without isolation needs.
	$(PIP) install -qq -c constraints.txt torch setuptools wheel pybind11
	@touch $@

# Gemini itself, editable, with what it needs. Again when the native sources change: packages that are there already are
# left alone. A leftover build/ could ship objects of another configuration, so it goes first.
$(VENV)/.built: $(VENV)/.made $(NATIVE_SOURCES)
	@rm -rf build
	$(PIP) install -qq -c constraints.txt --no-build-isolation -e ".[test]"
	@touch $@

# pip's configuration may offer a CPU build of torch first, and pip prefers it: without that configuration.
$(FAKEGPU)/.built: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(PYTHON) -m venv $(FAKEGPU)
	env -u PIP_FIND_LINKS PIP_CONFIG_FILE=/dev/null $(FAKEGPU)/bin/python -m pip install -q -c constraints.txt torch
	$(FAKEGPU)/bin/python -m pip install -q -c constraints.txt setuptools wheel pybind11
	$(FAKEGPU)/bin/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[test]"
	@touch $@

clean:  ## remove .venv, builds and caches (not runs/)
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis gemini/*.so
	find gemini integrations tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
