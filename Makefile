# A fresh clone needs python3 (>= 3.11) with pip and venv; everything else is set up here.
PYTHON ?= python3
VENV ?= .venv
GPU_PYTHON ?= python3
# Test processes side by side; each computes on one thread, because the models of the tests are small.
WORKERS ?= 2
ROUNDS ?= 20
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

# bf16 matrix products can die with SIGILL under AMX in virtual machines that announce AMX but do not enable it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16
# Forked workers would make tokenizers warn; nothing here may reach for the network.
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

# Every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo native test test-all test-interpreted test-gpu soak lint format clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.stamp-demo  ## train the demo model
	$(BIN)/overspill train --demo

# By file: tests of a file share what is dear, as what the plain loop makes of a model.
test: $(VENV)/.stamp-test  ## the tests of every change, on the CPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile tests

test-all: test-interpreted $(VENV)/.stamp-test  ## also the long tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu" tests

test-interpreted: $(VENV)/.stamp-test build/triton/.stamp  ## the GPU's kernels on the CPU, by Triton's interpreter
	TRITON_INTERPRET=1 PYTHONPATH=build/triton OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m interpreted tests/gpu

# What installing does too.
native:  ## build the native kernels where they are
	cmake -S csrc -B build/native -DOVERSPILL_OUT=$(CURDIR)/overspill/kernels
	cmake --build build/native --parallel

# For a machine that is offline and has torch, pytest and cmake in its own Python: nothing is installed.
test-gpu: native  ## the tests that need cuda, with GPU_PYTHON
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest -q -m gpu tests/gpu

soak: $(VENV)/.stamp-test  ## kills and resumes, over and over: ROUNDS times
	for round in $$(seq $(ROUNDS)); do OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/cpu/test_crash.py \
		tests/cpu/test_resume.py tests/cpu/test_checkpoint_folder.py || exit 1; done

lint: $(VENV)/.stamp-dev  ## ruff, mypy, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(VENV)/.stamp-dev  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build overspill/kernels/*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, as the plain pinned version: what is installed afterwards finds it there and cannot
# pull another build of it.
$(VENV)/.stamp-torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	@touch $@

# Apart, for torch would load it wherever it finds it. An older one's interpreter rounds a fused product twice.
build/triton/.stamp: $(VENV)/.stamp-torch
	$(PIP) --no-deps --upgrade --target build/triton triton==3.9.0
	@touch $@

$(VENV)/.stamp-%: $(VENV)/.stamp-torch pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	$(PIP) -e ".[$*]"
	@touch $@
