# The README's two commands are `make demo` and `make test`; both set up what they need in .venv first.
#
#   make demo       the training simulator on 2 local ranks: without a balancer, with one, and steps planned whole
#   make core       the core alone, without torch: build/core and its C++ tests
#   make test       every test but those of `make nightly`, C++ and Python
#   make sanitize   the C++ tests under the address and undefined-behaviour sanitizers; SANITIZE_TORCH=OFF: the core's
#   make sanitize-threads  C++ tests of the torch layer, whose ranks are threads, under the thread sanitizer
#   make coverage   lines of the torch layer and of Python that no test runs
#   make headers    every header, compiled by itself
#   make fuzz       fuzzers of the core and of the commands, FUZZ_SECONDS (600) each
#   make nightly    what takes longer than a change should wait: tests on more than 2 ranks, every fault, fuzzers, plans of
#                   other compilers, the kernels for GPUs
#   make faults     what other ranks see when one fails: every fault in every call
#   make exactness  gradients of whole steps against one process: every way, number of ranks and of micro-batches
#   make same-plans g++ and clang make the same plans, bit for bit; OPTIONS=all: -O2, -O3 and -march=native as well
#   make soak       SOAK_STEPS (100000) steps on SOAK_RANKS (2) ranks, and what each process holds on the way
#   make lint       formatters, linters and the order of includes
#   make tidy       clang-tidy over the core, by the checks of .clang-tidy
#   make format     runs the formatters on all sources
#   make bench      the benchmarks behind docs/benchmarks.md; results in build/bench
#   make nvrtc      the kernels, compiled for GPUs by NVRTC from the package index; needs no GPU
#   make gpu        on a machine with a GPU: are results right, how fast? ITEMS="packing step", DEVICE=cpu (docs/gpu.md)
#   make versions   the tests with other versions: COMBINATIONS="python3.12:2.13.0 python3.13:none"
#   make docs       the site, in build/site: pages, README, references; every link is checked
#   make wheels     an sdist and manylinux wheels in dist/, checked in fresh environments: PYTHONS, TORCHES
#   make installs   what README.md and docs/cpp.md tell a user to run, in fresh clones and environments
#   make dev        builds the extension modules in place, for PYTHONPATH=python
PYTHON ?= python3
# Any torch from 2.11 on serves. On Linux the package index's plain `torch` brings CUDA with it (gigabytes).
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)

.DEFAULT_GOAL := help
.PHONY: help nvrtc nvrtc-library demo core test test-cpp test-python sanitize sanitize-threads headers nightly test-nightly fuzz faults exactness soak coverage lint tidy format bench gpu docs wheels installs versions same-plans dev clean
.NOTPARALLEL:

help:
	@sed -n 's/^#   make/make/p' Makefile

# Looks for the system packages that a target needs, and installs missing ones where it may.
NEED := @PYTHON=$(PYTHON) sh tests/system_packages.sh

$(VENV)/.pip:
	$(NEED) compiler python
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

# The packages that building and running need; `make demo` downloads no others.
$(VENV)/.tools: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --group build --group run
	touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --group test
	touch $@

# One build folder serves the wheel, the C++ tests and `make dev`, so that no source is compiled twice. Several sources
# are compiled as one, in less than half the time; UNITY=OFF suits repeated changes to a few sources.
BUILD := build/release
UNITY ?= ON
# Without it ccache keeps nothing that has a precompiled header.
export CCACHE_SLOPPINESS ?= pch_defines,time_macros
CMAKE := $(BIN)/cmake
CONFIGURE = $(CMAKE) -G Ninja -S . -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
    -DCMAKE_UNITY_BUILD=$(UNITY) -DCMAKE_COMPILE_WARNING_AS_ERROR=ON \
    $(if $(shell command -v ccache),-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
MODULES := _core _torch

SOURCES := CMakeLists.txt $(shell find cmake knapformer python -type f ! -name '*.so' ! -name '*.pyc')

# pip packs the modules that are built already.
$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	$(CONFIGURE) -B $(BUILD)
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target $(MODULES)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall . \
	    -C build-dir=$(BUILD) -C cmake.define.CMAKE_UNITY_BUILD=$(UNITY) $(MODULES:%=-C build.targets=%)
	touch $@

# Builds the extension modules beside the Python sources: PYTHONPATH=python runs without installing.
dev: $(VENV)/.tools $(VENV)/.test
	$(CONFIGURE) -B $(BUILD)
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target $(MODULES)
	$(CMAKE) --install $(BUILD) --prefix python

# Two ranks that draw images of different resolutions, scaled down to what a CPU core trains in a minute.
# For these data g1n2 is the best flat topology.
DEMO ?= --ranks 2 --data g1b5i512f1s0,g1b5i1024f1s0 --scale 2 --topology g1n2 --micro-batches 2 --steps 4 --warmup 1

demo: $(VENV)/.installed
	$(BIN)/knapformer simulate $(DEMO)

core: | $(VENV)/.pip
	$(NEED) gtest
	$(BIN)/python -m pip install --quiet --group build
	$(CONFIGURE) -B build/core -DKNAPFORMER_TORCH=OFF -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build build/core -j $(JOBS) --target core_tests
	$(BIN)/ctest --test-dir build/core --output-on-failure -j $(JOBS)

test: test-cpp test-python

test-cpp: $(VENV)/.tools
	$(NEED) gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target core_tests torch_tests
	$(BIN)/ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

# Tests mostly wait for ranks to start, so test files run side by side: four at most, since some start eight ranks.
PYTEST_JOBS ?= -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The simulated accelerator of tests/python/accelerator is built here.
test-python: $(VENV)/.installed $(VENV)/.test
	$(NEED) gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target _simulated_device
	$(BIN)/python -m pytest --durations=10 $(PYTEST_JOBS) $(PYTEST_OPTIONS)

# Torch itself is not instrumented: tests/sanitizers lists the false reports that this causes.
SANITIZE_TORCH ?= ON
sanitize: $(VENV)/.tools
	$(NEED) gtest
	$(CONFIGURE) -B build/sanitize -DKNAPFORMER_TESTS=ON -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=$(SANITIZE_TORCH) \
	    -DKNAPFORMER_SANITIZE=address,undefined -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(CMAKE) --build build/sanitize -j $(JOBS) --target core_tests $(if $(filter ON,$(SANITIZE_TORCH)),torch_tests)
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure -j $(JOBS)

sanitize-threads: $(VENV)/.tools
	$(NEED) gtest
	$(CONFIGURE) -B build/sanitize-threads -DKNAPFORMER_TESTS=ON -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=ON \
	    -DKNAPFORMER_SANITIZE=thread -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(CMAKE) --build build/sanitize-threads -j $(JOBS) --target torch_tests
	$(BIN)/ctest --test-dir build/sanitize-threads --output-on-failure -R torch_tests

# NVRTC is 90 MB and is unpacked into build/nvrtc: a machine without a GPU needs it for `make nvrtc` alone.
NVRTC ?= nvidia-cuda-nvrtc-cu12==12.9.86
NVRTC_FOLDER := build/nvrtc/$(NVRTC)
nvrtc-library: $(NVRTC_FOLDER)/.installed
$(NVRTC_FOLDER)/.installed: | $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) $(NVRTC)
	touch $@

nvrtc: nvrtc-library
	$(NEED) gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target torch_tests
	library=$$(find $(CURDIR)/$(NVRTC_FOLDER) -name 'libnvrtc.so.1?') && \
	    KNAPFORMER_NVRTC=$$library LD_LIBRARY_PATH=$$(dirname $$library) $(BUILD)/tests/torch/torch_tests \
	    --gtest_filter='CudaKernel*'

$(VENV)/.coverage: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group coverage
	touch $@

# The C++ tests of the torch layer, and the Python tests that drive it and the commands on devices; the whole suite
# takes longer and adds little.
COVERAGE := $(abspath build/coverage)
COVERAGE_TESTS ?= tests/python/accelerator tests/python/models tests/python/test_losses.py tests/python/test_checkpointing.py \
    $(addprefix tests/python/distributed/test_,balancer.py planning.py compile.py derivatives.py groups.py loader.py sample_loader.py) \
    $(addprefix tests/python/tools/test_,calibrate.py calibrate_fit.py simulate.py simulate_variants.py replay.py)
coverage: $(VENV)/.test $(VENV)/.coverage
	$(NEED) gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target _simulated_device
	$(CONFIGURE) -B $(COVERAGE) -DKNAPFORMER_TESTS=ON -DKNAPFORMER_COVERAGE=ON -DCMAKE_UNITY_BUILD=OFF
	$(CMAKE) --build $(COVERAGE) -j $(JOBS) --target $(MODULES) torch_tests
	rm -rf $(COVERAGE)/package $(COVERAGE)/python
	find $(COVERAGE) -name '*.gcda' -delete
	mkdir -p $(COVERAGE)/package $(COVERAGE)/python
	cp -r python/knapformer $(COVERAGE)/package
	$(CMAKE) --install $(COVERAGE) --prefix $(COVERAGE)/package
	OMP_NUM_THREADS=1 $(COVERAGE)/tests/torch/torch_tests --gtest_brief=1
	KNAPFORMER_COVERAGE=$(COVERAGE) COVERAGE_PROCESS_START=$(CURDIR)/tests/coverage/coverage.ini \
	    PYTHONPATH=$(CURDIR)/tests/coverage:$(COVERAGE)/package $(BIN)/python -m pytest -q $(COVERAGE_TESTS)
	cd $(COVERAGE) && export KNAPFORMER_COVERAGE=$(COVERAGE) && for command in "combine -q" "report -m"; do \
	    $(abspath $(BIN))/coverage $$command --rcfile=$(CURDIR)/tests/coverage/coverage.ini || exit 1; done
	$(BIN)/gcovr -r . --object-directory $(COVERAGE) --filter knapformer/torch

headers: $(VENV)/.tools
	$(NEED) gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CMAKE) --build $(BUILD) -j $(JOBS) --target all_verify_interface_header_sets

# libFuzzer on the core, with the sanitizers of `make sanitize`; then generated command lines. Inputs that reach new
# code are kept in build/fuzz/found.
FUZZ_SECONDS ?= 600
CLANG_SANITIZED := -DKNAPFORMER_FUZZ=ON -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=OFF -DCMAKE_CXX_COMPILER=clang++ \
    -DKNAPFORMER_SANITIZE=address,undefined,fuzzer-no-link -DCMAKE_BUILD_TYPE=RelWithDebInfo
fuzz: $(VENV)/.installed $(VENV)/.test
	$(NEED) clang
	$(CONFIGURE) -B build/fuzz $(CLANG_SANITIZED)
	$(CMAKE) --build build/fuzz -j $(JOBS) --target fuzz_core
	sh tests/fuzz/run.sh build/fuzz $(FUZZ_SECONDS)
	KNAPFORMER_FUZZ_SECONDS=$(FUZZ_SECONDS) $(BIN)/python -m pytest -q --timeout=0 tests/python/tools/test_command_lines.py -k longer

# Compares the core as it is released (g++, -O3) and as it is fuzzed (clang, -O2, sanitizers); OPTIONS=all adds options.
OPTIONS ?=
same-plans: $(VENV)/.tools
	$(NEED) clang gtest
	$(CONFIGURE) -B $(BUILD) -DKNAPFORMER_TESTS=ON
	$(CONFIGURE) -B build/fuzz $(CLANG_SANITIZED)
	for build in $(BUILD) build/fuzz; do $(CMAKE) --build $$build -j $(JOBS) --target plan_hashes || exit 1; done
ifeq ($(OPTIONS),all)
	for flags in g++_-O2 g++_-O3_-march=native clang++_-O3 clang++_-O3_-march=native; do \
	    $(CONFIGURE) -B build/same/$$flags -DKNAPFORMER_FUZZ=ON -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=OFF \
	        -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=$${flags%%_*} -DCMAKE_CXX_FLAGS="$$(echo $${flags#*_} | tr _ ' ')" && \
	    $(CMAKE) --build build/same/$$flags -j $(JOBS) --target plan_hashes || exit 1; done
endif
	sh tests/same_plans/run.sh $(BUILD) build/fuzz $(if $(filter all,$(OPTIONS)),build/same/*)

nightly: test-nightly exactness fuzz same-plans nvrtc
test-nightly: PYTEST_OPTIONS := -m nightly
test-nightly: test-python

faults: $(VENV)/.installed $(VENV)/.test
	$(BIN)/python -m pytest -m "nightly or not nightly" tests/python/distributed/test_faults.py

exactness: $(VENV)/.installed $(VENV)/.test
	KNAPFORMER_EXACTNESS=1 $(BIN)/python -m pytest -q -s --timeout=0 -m "nightly or not nightly" tests/python/test_whole_step.py

SOAK_STEPS ?= 100000
SOAK_RANKS ?= 2
soak: $(VENV)/.installed $(VENV)/.test
	PYTHONPATH=tests/python:tests/python/distributed $(BIN)/python tests/python/distributed/soak.py \
	    --steps $(SOAK_STEPS) --ranks $(SOAK_RANKS)

# Formatters and linters; warnings are errors.
CXX_FILES := $(shell find knapformer tests bench examples -name '*.cpp' -o -name '*.h')
PY_FILES := python tests bench docs examples

$(VENV)/.lint: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

lint: $(VENV)/.installed $(VENV)/.test $(VENV)/.lint
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/ruff format --check $(PY_FILES)
	$(BIN)/ruff check $(PY_FILES)
	$(BIN)/python tests/include_order.py
	$(BIN)/mypy --python-executable $(BIN)/python

tidy: $(VENV)/.tools
	$(BIN)/python -m pip install --quiet clang-tidy==23.1.4
	$(CONFIGURE) -B build/tidy -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=OFF \
	    -DCMAKE_UNITY_BUILD=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	find knapformer/core -name '*.cpp' | xargs -P $(JOBS) -n 1 $(BIN)/clang-tidy -p build/tidy --quiet

format: $(VENV)/.lint
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff format $(PY_FILES)
	$(BIN)/ruff check --fix $(PY_FILES)

$(VENV)/.bench: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group bench
	touch $@

# Needs an idle machine; results, with hardware and commit, go to build/bench.
bench: $(VENV)/.installed $(VENV)/.test $(VENV)/.bench
	$(NEED) benchmark
	$(CONFIGURE) -B build/benchmarks -DKNAPFORMER_BENCH=ON -DKNAPFORMER_PYTHON=OFF -DKNAPFORMER_TORCH=OFF
	$(CMAKE) --build build/benchmarks -j $(JOBS)
	mkdir -p build/bench
	build/benchmarks/bench/bench_planner --benchmark_out=build/bench/planner.json --benchmark_out_format=json
	$(BIN)/python bench/bench_exchange.py --json build/bench/exchange.json
	$(BIN)/python bench/bench_memory.py --json build/bench/memory.json
	$(BIN)/python bench/bench_reality.py --folder build/bench/reality --json build/bench/reality.json
	$(BIN)/python bench/bench_hosts.py --json build/bench/hosts.json
	$(BIN)/python bench/bench_solvers.py --json build/bench/solvers.json
	$(BIN)/python bench/bench_others.py --json build/bench/others.json
	$(BIN)/python bench/bench_micro_batches.py --json build/bench/micro_batches.json
	$(BIN)/python bench/bench_sampler.py --json build/bench/sampler.json
	$(BIN)/python bench/bench_adapters.py --json build/bench/adapters.json

# With the torch of PYTHON where that is set, else that of .venv where there is one: nothing is downloaded.
GPU_PYTHON = $(if $(and $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(abspath $(BIN))/python,$(PYTHON))
DEVICE ?= cuda
gpu:
	cmake -G Ninja -S . -B build/gpu -DPython_EXECUTABLE=$$($(GPU_PYTHON) -c 'import sys; print(sys.executable)')
	cmake --build build/gpu --target _core _torch
	cmake --install build/gpu --prefix python
	PYTHONPATH=python:$$PYTHONPATH $(GPU_PYTHON) bench/gpu.py --out build/gpu-results --device $(DEVICE) $(ITEMS)

$(VENV)/.docs: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group docs
	touch $@

# Python's reference is made from the installed package, which has the modules.
docs: $(VENV)/.installed $(VENV)/.test $(VENV)/.docs
	KNAPFORMER_PACKAGE=$$(echo $(abspath $(VENV))/lib/python3*/site-packages) NO_MKDOCS_2_WARNING=1 \
	    $(BIN)/mkdocs build --strict --quiet

$(VENV)/.package: pyproject.toml | $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --group package
	touch $@

# PYTHONS: interpreters to build planner wheels for. TORCHES: site-packages with a torch to build the other wheels for.
PYTHONS ?= $(PYTHON)
TORCHES ?= $(wildcard $(abspath $(VENV))/lib/python3*/site-packages)
wheels: $(VENV)/.tools $(VENV)/.package
	$(BIN)/python tests/package/wheels.py --python $(PYTHONS) --torch $(TORCHES)

installs: $(BIN)/python
	$(NEED) git
	$(BIN)/python tests/package/installs.py $(TORCH)

COMBINATIONS ?= $(PYTHON):2.13.0 $(PYTHON):none
versions: $(VENV)/.tools
	$(BIN)/python tests/package/versions.py $(COMBINATIONS)

clean:
	rm -rf build
