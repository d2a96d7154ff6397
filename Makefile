# `make help` lists the targets. Everything happens in .venv; nothing outside this folder is touched.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
TORCH := 2.13.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# On two cores a second thread per process costs more than it brings.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

# An installation that fills the disk leaves a broken environment, and pip then asks every other index first.
room = $(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage(".").free / 2**30; sys.exit(0 if free >= $(1) else f"An environment needs $(1) GiB, but {free:.1f} GiB are free here. Free some space.")'

# GiB: that of the CPU build of torch, or of the one with CUDA's libraries.
ROOM := $(shell command -v nvidia-smi >/dev/null && echo 8 || echo 3)

.DEFAULT_GOAL := help
.PHONY: help quickstart tensorboard test test-other test-slow test-cuda test-browser test-vllm coverage gpu-check lint docs wheel policy policies clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, but this is {v[0]}.{v[1]}. Run: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { $(call room,$(ROOM)) && $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@# Without an NVIDIA driver take the CPU build of torch: from the configured indexes, else from PyTorch's own.
	@if [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	    $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(PIP) --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)" || $(PIP) "torch==$(TORCH)"; \
	 else $(PIP) "torch==$(TORCH)"; fi
	@$(PIP) --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

quickstart: $(VENV)/installed  ## Train the packaged policy with GRAIL on this machine's CPU (minutes; ARGS="--trainer.max_steps=4")
	$(BIN)/grail-lightning fit --config configs/quickstart.yaml $(ARGS)

tensorboard: $(VENV)/installed  ## Look at the runs in a browser
	$(BIN)/tensorboard --logdir runs

# Files stay together: their policies and runs are then made once, not by each process.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

test: $(VENV)/installed  ## Lint, types, the site, and the tests that take minutes
	@$(MAKE) --no-print-directory --jobs=2 lint docs
	$(PYTEST)

# Other kernels round otherwise; these tests compare numbers that went through whole models. Servers that fail do not.
test-other: $(VENV)/installed  ## The tests that rounding could touch, with other kernels
	ATEN_CPU_CAPABILITY=default $(PYTEST) tests/core/engines --ignore=tests/core/engines/test_vllm_server.py tests/core/functional \
	    tests/core/credit/test_architectures.py tests/core/credit/test_fused.py tests/test_update.py tests/test_packing.py tests/test_trees.py

coverage: $(VENV)/installed  ## Which lines no test runs
	$(PYTEST) --cov --cov-report=term:skip-covered -m "not slow and not gpu and not browser and not vllm and not no_cover"

test-slow: $(VENV)/installed  ## The slow tests alone
	$(BIN)/python -m pytest -m slow

test-cuda: $(VENV)/installed  ## Every method, control and world on a CUDA device that is none (needs g++, no GPU)
	$(BIN)/python -m pytest -m "slow or not slow" tests/test_fake_cuda.py

# Chromium comes from the system: apt-get install chromium chromium-driver (Debian), or chromium-browser (Ubuntu).
test-browser: $(VENV)/installed  ## HTML pages in a real Chromium, which must be there with its driver (apt: chromium chromium-driver)
	@$(PIP) --constraint constraints.txt --editable ".[dev,docs,browser]"
	$(BIN)/python -m pytest -m browser tests/app/views

# vLLM pins much that the rest need not share, so it has an environment of its own; nothing is resolved, all is pinned.
$(VLLM_VENV)/installed: requirements-vllm.txt
	@test -x $(VLLM_VENV)/bin/python || { $(call room,5) && $(PYTHON) -m venv $(VLLM_VENV); }
	@echo "Installing into $(VLLM_VENV) (a few minutes the first time) ..."
	@$(VLLM_PIP) "torch==$(TORCH)+cpu" 2>/dev/null || $(VLLM_PIP) --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"
	@$(VLLM_PIP) --no-deps --requirement requirements-vllm.txt
	@touch $@

test-vllm: $(VLLM_VENV)/installed  ## The engines that sample with vLLM, with its CPU build (Linux; about 10 minutes)
	PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

gpu-check: $(VENV)/installed  ## On a CUDA machine: the tests that need one, speed and memory, in tables (30 minutes; PARTS="step trl")
	$(BIN)/python benchmarks/gpu_check.py $(PARTS)

lint: $(VENV)/installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Warnings are errors, and so are links and anchors that lead nowhere (not with --quiet, which leaves them uncounted). Nothing is fetched.
docs: $(VENV)/installed  ## Build the documentation into site/ (open site/index.html)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Setuptools would pack files that were deleted since the last build.
wheel: $(VENV)/installed  ## Build the wheel into dist/
	rm -rf build/lib
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

policy: $(VENV)/installed  ## Make the quickstart's packaged policy anew (about 5 minutes)
	$(BIN)/python scripts/make_arithmetic_policy.py

policies: policy  ## Make all packaged policies anew (two hours and a half)
	$(BIN)/python scripts/make_numbers_policy.py
	$(BIN)/python scripts/make_words_policy.py
	$(BIN)/python scripts/make_code_policy.py
	$(BIN)/python scripts/make_search_policy.py
	$(BIN)/python scripts/make_charts_policy.py --output build/begun_charts
	$(BIN)/python scripts/make_charts_policy.py --start build/begun_charts --seed 1 --num-reading 0 --num-batches 400 \
	  --learning-rate 0.001 --slip 0.12 --misconception 0.7
	$(BIN)/python scripts/make_arithmetic_policy.py --terms 5 10 --start arithmetic --batch-size 32 --num-batches 1500 \
	  --learning-rate 0.001 --slip-rate 0.08 --misconception-rate 0.4 --output grail_lightning/worlds/assets/chains
	$(BIN)/python scripts/make_arithmetic_policy.py --terms 10 20 --start chains --batch-size 24 --num-batches 1000 \
	  --learning-rate 0.001 --slip-rate 0.06 --misconception-rate 0.3 --output build/begun
	$(BIN)/python scripts/make_arithmetic_policy.py --terms 15 20 --start build/begun --batch-size 24 --num-batches 1100 --seed 1 \
	  --learning-rate 0.001 --slip-rate 0.06 --misconception-rate 0.3 --output grail_lightning/worlds/assets/long_chains

clean:  ## Remove the virtual environment and what was built; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage*
