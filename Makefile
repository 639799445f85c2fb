# make lab     set up, then open lab 00 in JupyterLab
# make test    set up, then run everything that CI runs
# make course  regenerate labs/ and solutions/ from course/
# make site    the course as web pages, in build/site/html
# make test-oldest  what depends on torch's insides, with the oldest torch
# make test-wheel   build the wheel, install it by itself, and use it
# Another interpreter than python3: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
# One more than CI has cores: tests that wait for a process leave one idle.
WORKERS ?= 3
PYTEST := $(BIN)/python -m pytest
LAB_FLAGS ?=

# Nothing was compiled when it was installed: where nobody keeps what Python compiles,
# each process of `make test` compiles torch again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

# Test workers share the cores: one thread for each keeps them from fighting.
test test-%: export OMP_NUM_THREADS := 1
test test-%: export MPLBACKEND := agg
test test-%: export PYTHONHASHSEED := 0

.PHONY: help lab test test-static test-lint test-types test-arrows test-unit test-drift \
	test-notebooks test-unsolved test-browser test-oldest test-wheel course site clean \
	setup
.NOTPARALLEL:

help:
	@sed -n '/^$$/q; s/^# //p' Makefile

setup: $(STAMP)

# The stamp comes last: an install that was interrupted starts again, and one that
# is older than the versions that it depends on is brought up to date.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "overlaplab needs Python 3.11 or later; '$(PYTHON)' is not one or is" \
	    "missing. Name another: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "'$(PYTHON)' lacks the standard modules venv and ensurepip. Install them" \
	    "(Debian and Ubuntu: apt install python3-venv) or name another" \
	    "interpreter: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV): with torch this takes minutes, and says nothing."
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
	  --editable '.[course,dev]'
	@touch $@

lab: setup
	cd labs && exec ../$(BIN)/python -m jupyterlab \
	  --LabApp.default_url=/lab/tree/00_start.ipynb $(LAB_FLAGS) \
	  $$(test "$$(id -u)" != 0 || echo --allow-root)

test: test-static test-unit test-notebooks test-unsolved test-browser
	@echo "All checks passed."

# mypy takes as long as all the others, and one core: beside them. What it says comes
# after what they say; both are done before either fails.
test-static: setup
	@said=$$(mktemp) && { \
	$(MAKE) --no-print-directory test-types > $$said 2>&1 & types=$$!; \
	trap 'kill $$types 2> /dev/null; rm -f $$said' EXIT; trap 'exit 130' INT TERM; \
	$(MAKE) --no-print-directory test-lint test-arrows test-drift site; others=$$?; \
	wait $$types; failed=$$?; cat $$said; test $$others = 0 -a $$failed = 0; }

test-lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test-types: setup
	$(BIN)/mypy

test-arrows: setup
	$(BIN)/lint-imports --no-cache

test-drift: setup
	$(BIN)/python course/build.py --check

# Warnings are errors, and every link within the pages is followed.
site: setup
	$(BIN)/python course/site/make_site.py

test-unit: setup
	$(PYTEST) -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  --durations 15 --ignore=tests/browser

test-notebooks: setup
	$(PYTEST) -q -p tests.strict_notebooks -n $(WORKERS) \
	  --dist loadfile --nbval-lax --nbval-cell-timeout 900 \
	  --nbval-kernel-startup-timeout 900 --timeout 1800 solutions

test-unsolved: setup
	$(BIN)/python course/build.py --prove-unsolved

# Alone, since it starts JupyterLab and Chromium, and looks at how fast a page draws.
# Where no Chromium is, it says so and passes; in CI (the variable CI is set) it fails.
test-browser: setup
	$(PYTEST) -q -rs --durations 5 --timeout 1800 tests/browser

# torch brings its own CUDA packages and asks for an older setuptools; all else is as CI
# has it. Where pip's index has a CPU build, PIP_EXTRA_INDEX_URL names it.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile \
	  tests/cluster tests/techniques tests/program tests/hazards tests/profiling \
	  tests/capture

$(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	sed -E '/^(torch|triton|nvidia|cuda|setuptools)/d' constraints.txt \
	  > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile \
	  --constraint $(OLDEST)/constraints.txt --editable . \
	  "torch==$$(sed -n 's/.*"torch>=\(.*\)".*/\1/p' pyproject.toml).*" \
	  attrs pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# The build's own requirements come from pip's index.
test-wheel: setup
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	OVERLAPLAB_WHEEL="$$(ls "$(CURDIR)"/dist/*.whl)" $(PYTEST) -q tests/repo/test_wheel.py

course: setup
	$(BIN)/python course/build.py

clean:
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
