# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv first.
PYTHON ?= python3
VENV ?= .venv
# Where a wheel index offers several builds of torch, this exact spelling picks the CPU one that CI uses.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint env clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,report,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m realvr demo --out runs/demo

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -q

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto -q -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
