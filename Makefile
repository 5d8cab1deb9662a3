# Two commands do all the set-up, in a local venv: `make serve` and `make test`.
# Where pip should find torch is said once, if at all: make serve TORCH_INDEX=https://...

PYTHON      ?= python3
VENV        ?= .venv
TORCH_INDEX ?=
MODEL       ?= smollm2-135m-instruct
HOST        ?= 127.0.0.1
PORT        ?= 8000
PYTEST_ARGS ?=
WORKERS     ?= 2

LIGHT  := .venv-light
OLDEST := .venv-oldest
BUILD  := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
PIP     = bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
          $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: serve test check test-slow bench style types floors house light check-native clean
.DELETE_ON_ERROR:

serve: $(VENV)/.stamp-serve  ## install, fetch the default model, serve it
	$(VENV)/bin/kvist pull $(MODEL)
	$(VENV)/bin/kvist serve $(MODEL) --host $(HOST) --port $(PORT)

# A worker a core, a thread a worker: tiny matrices gain nothing from more, and spinning costs.
test: $(VENV)/.stamp-dev  ## all but the slow tests
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

check: style types floors house light  ## everything a change must pass besides the tests

test-slow: $(VENV)/.stamp-dev $(OLDEST)/.stamp-dev  ## slow tests; the engine on the oldest transformers
	$(VENV)/bin/python -m pytest -m slow $(PYTEST_ARGS)
	$(OLDEST)/bin/python -m pytest -m "not slow" tests/engine $(PYTEST_ARGS)

bench: $(VENV)/.stamp-serve
	$(VENV)/bin/kvist bench paging --json

style: $(VENV)/.stamp-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.stamp-dev
	$(VENV)/bin/mypy

floors: $(VENV)/.stamp-dev
	$(VENV)/bin/lint-imports

house: $(VENV)/.stamp-dev
	$(VENV)/bin/python tools/house.py

check-native: $(VENV)/.stamp-dev  ## kernel tests over C++ with AddressSanitizer and UBSan
	$(VENV)/bin/python tools/check_native.py $(PYTEST_ARGS)

light: $(LIGHT)/.stamp-test  ## books, scheduler, simulator and planner where torch is not installed
	$(LIGHT)/bin/python -m pytest -m "not slow" -q $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) $(LIGHT) $(OLDEST) build

# ---- environments: a stamp lies in its venv, so that a second call installs nothing

$(VENV)/.stamp-serve: $(BUILD) | $(VENV)/bin/python
	$(VENV)/$(PIP) -e '.[engine,server,tiers]'
	touch $@

$(VENV)/.stamp-dev: $(BUILD) | $(VENV)/bin/python
	$(VENV)/$(PIP) -e '.[dev]'
	touch $@

$(OLDEST)/.stamp-dev: $(BUILD) | $(OLDEST)/bin/python
	$(OLDEST)/$(PIP) -e '.[dev]' transformers==5.16.0
	touch $@

# No C++ either: what runs here is the pure wheel.
$(LIGHT)/.stamp-test: $(BUILD) | $(LIGHT)/bin/python
	$(LIGHT)/$(PIP) -C wheel.cmake=false -e '.[test]'
	touch $@

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "kvist needs Python 3.11 or newer; '$(PYTHON)' is" \
	       "$$($(PYTHON) --version 2>/dev/null || echo 'not to be found')." \
	       "Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $*
