# Two commands for a newcomer: `make demo` and `make test`. On a machine with a GPU also `make gpu`.
PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/quickstart.yaml
TRACE ?= tests/data/azure_conv_slice.csv
COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)

.PHONY: setup demo test lint gpu bench clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cuda,test,report]'
	# headers only: podgraph imports nothing of FlashInfer to compile or to serve
	$(BIN)/python -m pip install -q --no-deps --no-compile flashinfer-python==0.7.2.post1
	touch $@

# Builds a catalog, verifies it in a fresh process, replays a slice of a real trace through it, and reports on it.
demo: setup
	$(BIN)/podgraph build --config $(CONFIG) --output build/demo.podcat
	$(BIN)/podgraph inspect build/demo.podcat
	$(BIN)/podgraph verify build/demo.podcat
	$(BIN)/podgraph replay build/demo.podcat --trace $(TRACE) --rate 40 --limit 100
	$(BIN)/podgraph report build/demo.podcat --trace $(TRACE) --rate 40 --output build/demo.html

test: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Uses $(PYTHON) as it is where that has everything (a container with torch, say), else a virtual environment.
PICK_PYTHON = if $(PYTHON) -c 'import torch, cuda.bindings, flashinfer, click, pydantic, rich, safetensors, pytest' \
	2>/dev/null; then python=$(PYTHON); \
	else python=.venv-gpu/bin/python; \
	  test -x $$python || { $(PYTHON) -m venv .venv-gpu && $$python -m pip install -q -e '.[cuda,build,test]'; }; \
	fi; set -e;

# Tests, build, verification, replay and benchmark on a GPU; results go to benchmarks/results/.
gpu:
	@$(PICK_PYTHON) \
	$$python -m pytest tests/gpu -q -p no:cacheprovider; \
	$$python -m benchmarks.main_job --commit $(COMMIT)

# The other benchmarks: loading, kernels against FlashInfer, planning, what each choice of the kernel buys, what a step
# costs the host, what a model's step is made of, and ten minutes of stress.
bench:
	@$(PICK_PYTHON) \
	$$python -m benchmarks.bench_load --commit $(COMMIT); \
	$$python -m benchmarks.bench_kernels --commit $(COMMIT); \
	$$python -m benchmarks.bench_plan --commit $(COMMIT); \
	$$python -m benchmarks.bench_choices --commit $(COMMIT); \
	$$python -m benchmarks.bench_step --commit $(COMMIT); \
	$$python -m benchmarks.bench_device --commit $(COMMIT); \
	$$python -m benchmarks.stress --seconds 600

clean:
	rm -rf build .venv .venv-gpu
