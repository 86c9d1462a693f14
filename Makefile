# The README's two commands are `make demo` and `make test`; both set up what they need in .venv first.
#
#   make demo     the training simulator on 2 local ranks, without and with the balancer
#   make test     every test, C++ and Python
#   make sanitize the core's tests under the address and undefined-behaviour sanitizers
#   make lint     formatters and linters
#   make format   lets the formatters have their way
#   make bench    the benchmarks behind docs/benchmarks.md; results in build/bench
#   make dev      builds the extension modules in place, for PYTHONPATH=python
PYTHON ?= python3
# Any torch from 2.11 on serves. On Linux the package index's plain `torch` brings CUDA with it (gigabytes).
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help demo test test-cpp test-python sanitize lint format bench dev clean system-packages

help:
	@sed -n 's/^#   make/make/p' Makefile

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.dependencies: pyproject.toml | $(BIN)/python
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

SOURCES := $(shell find knapformer python cmake -name '*.cpp' -o -name '*.h' -o -name '*.py' -o -name '*.pyi' -o -name '*.cmake' -o -name CMakeLists.txt) CMakeLists.txt

$(VENV)/.installed: $(VENV)/.dependencies $(SOURCES)
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	touch $@

# Two ranks that draw images of different resolutions, scaled down to what a CPU core trains in a minute.
DEMO ?= --ranks 2 --data g1b5i512f1s0,g1b5i1024f1s0 --scale 2 --topology g1n2 --topology g2n1 --steps 5 --warmup 1

demo: $(VENV)/.installed
	$(BIN)/knapformer simulate $(DEMO)

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --group bench
	touch $@

# Wants an idle machine; results, with hardware and commit, in build/bench.
bench: $(VENV)/.installed $(VENV)/.bench system-packages
	$(CONFIGURE) -B build/benchmarks -DKNAPFORMER_BENCH=ON -DKNAPFORMER_TORCH=OFF
	$(CMAKE) --build build/benchmarks -j $(JOBS)
	mkdir -p build/bench
	build/benchmarks/bench/bench_planner --benchmark_out=build/bench/planner.json --benchmark_out_format=json
	$(BIN)/python bench/bench_exchange.py --json build/bench/exchange.json
	$(BIN)/python bench/bench_host.py --json build/bench/host.json
	$(BIN)/python bench/bench_checkpointing.py --json build/bench/checkpointing.json
	$(BIN)/python bench/bench_simulate.py --json build/bench/simulate.json
	$(BIN)/python bench/bench_solvers.py --json build/bench/solvers.json

system-packages:
	@sh tests/system_packages.sh

CMAKE := $(BIN)/cmake
CONFIGURE = $(CMAKE) -G Ninja -S . -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
    -DKNAPFORMER_PYTHON=OFF $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)

test-cpp: $(VENV)/.dependencies system-packages
	$(CONFIGURE) -B build/tests -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build build/tests -j $(JOBS)
	$(BIN)/ctest --test-dir build/tests --output-on-failure

test-python: $(VENV)/.installed
	$(BIN)/python -m pytest

test: test-cpp test-python

# The core under the address and undefined-behaviour sanitizers.
sanitize: $(VENV)/.dependencies system-packages
	$(CONFIGURE) -B build/sanitize -DKNAPFORMER_TESTS=ON -DKNAPFORMER_TORCH=OFF -DKNAPFORMER_SANITIZE=address,undefined \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(CMAKE) --build build/sanitize -j $(JOBS)
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

# Formatters and linters; warnings are errors.
CXX_FILES := $(shell git ls-files '*.cpp' '*.h')
PY_FILES := python tests bench docs examples

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

lint: $(VENV)/.dependencies $(VENV)/.lint
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/mypy --python-executable $(BIN)/python

format: $(VENV)/.lint
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/ruff check --fix $(PY_FILES)

# Builds the extension modules beside the Python sources: PYTHONPATH=python runs without installing.
dev: $(VENV)/.dependencies
	$(CONFIGURE) -B build/dev -DKNAPFORMER_PYTHON=ON
	$(CMAKE) --build build/dev -j $(JOBS)
	$(CMAKE) --install build/dev --prefix python

clean:
	rm -rf build
