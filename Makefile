# Everything runs in .venv, which the targets make and keep up to date by themselves.
# Needs: make and Python >= 3.11 (another one than python3: make demo PYTHON=python3.12).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt
PINS := pyproject.toml constraints.txt
SEEDS ?= 20000
MINUTES ?= 8

.NOTPARALLEL:
.PHONY: help demo install install-dev test test-slow fuzz lint bench calibrate-gpu clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: $(VENV)/installed ## run the main job and the batching comparison, say what was written
	@echo; echo "1. A chat service with Llama-3.1-8B on one H100 (seconds):"
	$(BIN)/servesim run scenarios/quickstart.yaml --out out/quickstart
	@echo; echo "2. The same kind of traffic under static and under continuous batching (some 10 s):"
	$(BIN)/servesim compare scenarios/static_vs_continuous.yaml --out out/static_vs_continuous
	@echo; echo "Next: change a copy of scenarios/quickstart.yaml, or see $(BIN)/servesim --help and README.md."

install: $(VENV)/installed ## make .venv with servesim in it

install-dev: $(VENV)/installed-dev ## the same with what tests and linters need

test: $(VENV)/installed-dev ## all tests but the slow ones
	$(BIN)/python -m pytest -m "not slow" -n 2

test-slow: $(VENV)/installed-calibration $(VENV)/installed-cluster ## tests that need a browser, a cluster, torch or minutes
	@$(BIN)/python -m pytest -m slow || { status=$$?; [ $$status -eq 5 ] || exit $$status; } # 5: there are none

fuzz: $(VENV)/installed-dev ## compare the two vLLM V1 planners on many random lives (SEEDS=20000)
	$(BIN)/python -m tests.differential.fuzz $(SEEDS)

lint: $(VENV)/installed-dev ## formatting, lint, types and the import ladder
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

bench: $(VENV)/installed ## time per iteration, beside a bare SimPy loop
	$(BIN)/python benchmarks/bench.py

calibrate-gpu: ## profile, fit and verify Llama-3.1-8B on this machine's GPU with PYTHON's own torch (MINUTES=8)
	PYTHONPATH=. $(PYTHON) -m calibration.device_artifact --device cuda --minutes $(MINUTES) --name llama31_8b

clean: ## remove .venv, caches and everything that was written
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python without ensurepip (Debian without python3-venv) still has a pip that can install into the new .venv.
$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) > /dev/null || \
	  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; } || \
	  { echo "$(PYTHON) cannot make a virtual environment; install its venv module (Debian: apt install python3-venv)" >&2; exit 1; }
	@touch $@

$(VENV)/installed: $(VENV)/made $(PINS)
	@echo "Installing servesim into $(VENV) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/made $(PINS)
	@echo "Installing servesim and what its tests need into $(VENV) ..."
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/installed $@

$(VENV)/installed-cluster: $(VENV)/installed-dev
	@echo "Installing what sweeps on a cluster need into $(VENV) ..."
	@$(PIP) --editable '.[cluster]'
	@touch $@

$(VENV)/installed-calibration: $(VENV)/installed-dev
	@echo "Installing torch into $(VENV) ..."
	@$(PIP) --editable '.[calibration]'
	@touch $@
