# The only commands a newcomer needs: `make quickstart` and `make test`. Every recipe may be repeated at any time; each
# builds for the Python of the active environment (tools/common.sh says which one that is) and installs what is missing.
SHELL := /bin/bash
.DEFAULT_GOAL := build
.PHONY: help build quickstart install test test-all test-unit test-torch2 test-gpu test-cluster test-cpu bench bench-gpu lint docs wheel asan tsan clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

build: ## build the extension module for the active Python (the default)
	@tools/build.sh native

quickstart: ## install, build and train a small GPT on two processes; again: resume
	@tools/quickstart.sh $(ARGS)

install: ## build and install editable into the active environment (.venv if none)
	@tools/install.sh

test: ## build, then the C++ and Python tests, with a sample of each large matrix
	@tools/test.sh all

test-all: ## as `test`, with every case of every matrix
	@tools/test.sh every

test-unit: ## the fast part of the tests, under a minute
	@tools/test.sh unit

test-torch2: ## the suite against torch 2.x from PyPI; TORCH=2.15.0 or newest; SECOND=1: after `test`; BRIEF=1: a minute
	@env=$$(tools/torch2_env.sh) && export PYTHON=$(CURDIR)/$$env/bin/python && tools/install.sh && tools/test.sh $(if $(BRIEF),brief,$(if $(SECOND),second,all))

test-gpu: ## a checklist on a GPU: kernels, NCCL, training, times (tests/device/checklist.py); DEVICE=name: another device
	@tools/test.sh gpu

test-cluster: ## the launcher over real ssh, pdsh, Slurm and MPI, between namespaces of this machine (root; else skipped)
	@tools/test.sh cluster

test-cpu: ## tests on another processor: CPU=Haswell, SandyBridge, EPYC, aarch64 (emulated) or avx2; SAMPLE=1: a part
	@tools/test_cpu.sh "$(CPU)" $(if $(SAMPLE),sample)

bench: ## all CPU benchmarks; results in benchmarks/results/
	@tools/bench.sh cpu

bench-gpu: ## the benchmarks that need a GPU
	@tools/bench.sh gpu

lint: ## clang-format, clang-tidy and ruff on what changed (ALL=1: on everything)
	@tools/lint.sh

docs: ## regenerate docs/config.md and docs/files.md
	@tools/docs.sh

wheel: ## build dist/deepspeed-*.whl and try it in a fresh virtual environment
	@tools/wheel.sh

asan: ## C++ tests under the address and undefined-behaviour sanitizers
	@tools/sanitize.sh address,undefined

tsan: ## C++ tests under the thread sanitizer
	@tools/sanitize.sh thread

clean: ## remove what was built (virtual environments stay)
	rm -rf build dist python/deepspeed/_lib python/*.egg-info .pytest_cache .ruff_cache
	find python tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
