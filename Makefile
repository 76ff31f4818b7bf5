# Every target that needs the environment makes it first; the second time that costs nothing.
PYTHON ?= python3
PIP_ARGS ?=
LAB ?= star:4@1gbit
MODEL ?= paced:resnet50@0.25
STRATEGIES ?= ddp allreduce dear
ITERATIONS ?= 30
TESTS ?=
ARGS ?= --help
PYTHONS ?=

BIN := .venv/bin
VENV := .venv/bin/activate
DEMO_READY := .venv/.demo-ready
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
FUZZ_READY := .venv/.fuzz-ready
NATIVE := $(wildcard native/CMakeLists.txt native/*.cpp native/*.h native/src/* native/src/*/*)
INSTALL := $(BIN)/python tools/install.py $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo simulate test test-slow test-gpu test-streams wheel-test sanitize hostile fuzz lint format bench figures docs docs-test clean distclean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make .venv and install wingbeat with the tested versions (once)
	@echo "ready: .venv"

$(READY): pyproject.toml constraints.txt $(NATIVE) | $(VENV)
	@echo "Installing into .venv what training, benches and tests need; PyTorch is large, so this takes a minute or more, once."
	$(INSTALL) -e '.[dev,bench]'
	@touch $@ $(DEMO_READY)

$(DEMO_READY): pyproject.toml constraints.txt $(NATIVE) | $(VENV)
	@echo "Installing into .venv; PyTorch is large, so this takes a minute or more, once."
	$(INSTALL) -e '.[bench]'
	@touch $@

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "wingbeat needs Python 3.10 or newer as $(PYTHON); choose one: make setup PYTHON=python3.12" >&2; exit 1; }
	@for compiler in "$${CXX:-c++}" g++ clang++; do command -v "$$compiler" >/dev/null && exit 0; done; \
	  echo "wingbeat's kernels need a C++20 compiler (GCC 11 or Clang 14 or newer); on Debian and Ubuntu: apt install g++" >&2; exit 1
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || \
	  { echo "$(PYTHON) has no headers (Python.h); on Debian and Ubuntu: apt install python3-dev" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

demo: $(DEMO_READY) ## Train on four emulated hosts: DDP, AllReduce, DeAR (3 to 4 minutes from nothing)
	$(BIN)/wingbeat demo

test: $(READY) ## Run the tests, those marked slow or gpu excepted
	$(BIN)/python tools/test.py "not slow and not gpu" $(TESTS)

test-slow: $(READY) ## Run the tests that take long or belong to a figure, and all examples of the others
	WINGBEAT_TEST_ALL_EXAMPLES=1 $(BIN)/python tools/test.py "(slow or hypothesis) and not gpu" $(TESTS)

test-gpu: $(READY) ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(TESTS)

simulate: $(READY) ## Simulate a machine with faults, ARGS="groups --seed 7", or play a scenario of a file again
	PYTHONPATH=tests $(BIN)/python -m simulation $(ARGS)

test-streams: $(READY) ## Run the contract of strategies with 2,000 orders of an accelerator's streams
	$(BIN)/python tools/streams.py --json out/streams.json

wheel-test: $(READY) ## Build the wheel, install it beside torch without a compiler, train a step there; PYTHONS= more
	$(BIN)/python tools/wheel_test.py --python $(BIN)/python $(PYTHONS) $(PIP_ARGS)

sanitize: $(READY) ## Run the C++ core and the fuzzer's corpus under the address and undefined behaviour sanitizers
	@$(BIN)/cmake --log-level=WARNING -S native -B build/sanitize -DWINGBEAT_SANITIZE=ON -DWINGBEAT_EXTENSION=OFF
	@$(BIN)/cmake --build build/sanitize --parallel 2
	build/sanitize/driver
	build/sanitize/replay tests/corpus

hostile: $(READY) ## Send FRAMES hostile frames to all ports of the extension, under the sanitizers
	@$(BIN)/cmake --log-level=WARNING -S native -B build/sanitize -DWINGBEAT_SANITIZE=ON -DWINGBEAT_EXTENSION=OFF
	@$(BIN)/cmake --build build/sanitize --target hostile --parallel 2
	build/sanitize/hostile $(or $(FRAMES),1000000) $(or $(SEED),1)

fuzz: $(FUZZ_READY) ## Find inputs by coverage for TARGET (all), SECONDS each (60); native ones need clang
	$(BIN)/python tools/fuzz.py $(TARGET) --seconds $(or $(SECONDS),60)

$(FUZZ_READY): $(READY)
	$(INSTALL) -q -e '.[fuzz]'
	@touch $@

lint: $(READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks $(BIN)/mypy benchmarks/*.py
	$(BIN)/lint-imports

format: $(READY) ## Put the code into the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY) ## Compare strategies; LAB=, MODEL=, STRATEGIES= and ITERATIONS= choose what
	@mkdir -p out
	$(BIN)/wingbeat bench --lab $(LAB) --model $(MODEL) --strategies $(STRATEGIES) \
	  --iterations $(ITERATIONS) --json out/bench.json --png out/bench.png --trace out/bench-trace.json

figures: $(READY) ## Write the measured figures of the docs anew from docs/results
	$(BIN)/python tools/figures.py pages

docs: $(DOCS_READY) ## Build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-test: $(DOCS_READY) ## Run the code of the pages, and the site in headless Chromium
	$(BIN)/python -m pytest tests/test_code_blocks.py tests/test_site.py tests/test_examples.py $(TESTS)

$(DOCS_READY): $(READY)
	$(INSTALL) -q -e '.[docs]'
	@touch $@

clean: ## Remove caches and built documentation
	rm -rf docs/_build build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment too
	rm -rf .venv
