# Every target does its own set-up: a virtual environment in .venv, and the package installed into
# it. Needs make and Python 3.11 or newer, nothing else. Another interpreter: make PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
# The frameworks bring a hundred packages; the guard and its own tests must do without them.
FRAMEWORKS := .venv-adapters
# The site's tools, which nothing else needs.
DOCS := .venv-docs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROJECT := pyproject.toml constraints.txt
# Python compiles a module when it is first used; compiling all of torch beforehand takes longer
# than the rest of the installation.
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt
# And keeps what it has compiled: each process of the tests would compile torch again.
export PYTHONDONTWRITEBYTECODE :=
# Test processes fill the cores, so each computes on one thread.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help test test-fast test-slow test-adapters test-matrix lint style types suite format docs demo \
  bench-digits bench-overhead bench-long bench-toy \
  bench-defaults bench-population bench-remedies bench-rollback gpu screenshots figures fuzz mutants clean

help:
	@echo "make test            format check, lint, types, all tests that take seconds, coverage"
	@echo "make test-fast       the tests that neither train, compile nor start processes: within a minute"
	@echo "make test-slow       the tests that train for minutes or build the wheel"
	@echo "make test-adapters   the adapters against the real frameworks, in .venv-adapters"
	@echo "make test-matrix     the suite under other instruction sets, threads, Pythons and versions: hours"
	@echo "make lint            format check, lint and types alone"
	@echo "make format          format the code and sort its imports"
	@echo "make docs            the site, in build/site: tutorials run, links checked"
	@echo "make demo            the same training run without and with the guard, one page"
	@echo "make bench-digits    seeds x beta_star on the digits: what diverges, and when"
	@echo "make bench-defaults  what guard() should do unasked: β* and finer steps, on 94 runs an arm and more"
	@echo "make bench-population  recorded runs of many families through the rules: what alerts find"
	@echo "make bench-remedies  the field's remedies and beta_star on the digits, at equal compute"
	@echo "make bench-rollback  runs that save themselves: each policy, 20 seeds"
	@echo "make bench-overhead  what the guard costs a training step"
	@echo "make bench-long      memory and file sizes of 200,000 steps; what reading a million rows takes"
	@echo "make mutants         300 changes of the core, each against the tests of its room: hours"
	@echo "make fuzz            10,000 damaged run folders through every command that reads them"
	@echo "make bench-toy       how fast an ensemble of toys trains, against a loop over single models"
	@echo "make gpu             the first hour on a GPU, part by part; PART=toys runs one, MINUTES=8 each has"
	@echo "make screenshots     pictures of TensorBoard and of a report for docs/, with a headless Chromium"
	@echo "make figures         the paper's toy figures, pictures and numbers: about an hour"
	@echo "make clean           remove .venv, caches and builds; results are kept"

# One stamp per set of extras; a re-run installs nothing unless the project's requirements changed.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) is not installed." \
	  "ebmguard needs Python 3.11 or newer; name one with make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: ebmguard needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version)." \
	  "Name a newer one with make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.dev: $(VENV)/.created $(PROJECT)
	$(INSTALL) -e ".[dev]"
	@touch $@ $(VENV)/.train

$(VENV)/.train: $(VENV)/.created $(PROJECT)
	$(INSTALL) -e ".[train]"
	@touch $@

lint: style types

style: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Types on one core beside the tests, which wait for each other now and then.
test: style
	@$(MAKE) --no-print-directory -j 2 types suite

suite: $(VENV)/.dev
	$(PYTEST) -m "not slow" --ignore=tests/frameworks --cov=ebmguard --cov-report=term-missing:skip-covered \
	  --cov-fail-under=95

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow" --fast

test-slow: $(VENV)/.dev
	$(PYTEST) -m slow --ignore=tests/frameworks

# The same set-up, from the same pins, with every framework; coverage is that of the adapters alone.
$(FRAMEWORKS)/.ready: $(VENV)/.created $(PROJECT)
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  -c constraints.txt -e ".[adapters]"
	@touch $@

test-adapters: $(FRAMEWORKS)/.ready
	OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest -n auto --dist worksteal tests/adapters tests/frameworks tests/test_examples.py \
	  --cov=./adapters --cov-config=tests/frameworks/coverage.ini \
	  --cov-report=term-missing:skip-covered --cov-fail-under=95

# MATRIX="--only aten-default torch-lowest" chooses; python -m tests.matrix --help lists.
test-matrix: $(VENV)/.dev
	$(BIN)/python -m tests.matrix $(MATRIX)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(DOCS)/.ready: $(VENV)/.created $(PROJECT)
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
	  -c constraints.txt -e ".[docs]"
	@touch $@

docs: $(DOCS)/.ready
	PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" NO_MKDOCS_2_WARNING=1 mkdocs build --strict
	@echo "to read it: python3 -m http.server -d build/site, then http://localhost:8000"

demo: $(VENV)/.train
	rm -rf demo
	$(BIN)/ebmguard demo --out demo

bench-digits: $(VENV)/.train
	$(BIN)/python -m benchmarks.digits

bench-defaults: $(VENV)/.train
	$(BIN)/python -m benchmarks.defaults

bench-population: $(VENV)/.train
	$(BIN)/python -m benchmarks.population judge

bench-remedies: $(VENV)/.train
	$(BIN)/python -m benchmarks.remedies

bench-rollback: $(VENV)/.train
	$(BIN)/python -m benchmarks.rollback

bench-overhead: $(VENV)/.train
	$(BIN)/python -m benchmarks.overhead

bench-long: $(VENV)/.train
	$(BIN)/python -m benchmarks.long_run
	$(BIN)/python -m benchmarks.long_run --read 50000 1000000

mutants: $(VENV)/.dev
	$(BIN)/python -m benchmarks.mutants

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.report.fuzz

bench-toy: $(VENV)/.train
	$(BIN)/python -m benchmarks.toy

# PART=tests, overhead, jem, shortrun, toys or train; each writes its lines of docs/results/gpu.md.
gpu: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu --part $(or $(PART),all) --minutes $(or $(MINUTES),8)

screenshots: $(VENV)/.dev
	$(BIN)/python -m benchmarks.screenshots
	$(BIN)/python -m benchmarks.gallery
	$(BIN)/python -m benchmarks.concept

figures: $(VENV)/.train
	set -e; for name in 2 5 6 7 8 9 10 11 1d; do $(BIN)/ebmguard figure $$name; done

clean:
	rm -rf $(VENV) $(FRAMEWORKS) $(DOCS) .venv-matrix build dist *.egg-info .coverage .coverage.* .pytest_cache .hypothesis \
	  .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
