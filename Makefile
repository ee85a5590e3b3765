# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv first. `make docs` builds the site.
PYTHON ?= python3
VENV ?= .venv
# Where a wheel index offers several builds of torch, this exact spelling picks the CPU one that CI uses.
TORCH ?= torch==2.13.0
# trackio asks for pillow < 13, for pictures that are not logged here; CI tests with pillow 13, so it comes without its
# dependencies, and those that logging needs are named.
TRACKIO := trackio gradio_client httpx httpcore orjson brotli python-multipart starlette uvicorn
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# lmms-eval pins other versions than ours: an environment of its own, over the packages of $(VENV).
LMMS := .venv-lmms

.PHONY: demo test test-slow speed lint docs docs-serve env browser lmms clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,deepspeed,diagnostics,dev,docs]"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(TRACKIO)
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m realvr demo --out runs/demo

# Chromium for the tests of the report, where it is missing and may be installed; without it they are skipped.
browser:
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; \
	then :; elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	{ apt-get install -qq -y --no-install-recommends chromium || { apt-get update -qq && \
	apt-get install -qq -y --no-install-recommends chromium; }; } >/dev/null 2>&1; then echo "installed chromium"; \
	else echo "no Chromium here: the tests of the report that need a browser are skipped"; fi

# lmms-eval for the test of its adapter, where it can be installed; without it that test is skipped.
lmms: $(STAMP)
	@$(MAKE) --no-print-directory $(LMMS)/.installed || echo "no lmms-eval here: the test of its adapter is skipped"

$(LMMS)/.installed: $(STAMP) tests/integrations/lmms_eval.txt
	$(BIN)/python -m venv --clear $(LMMS)
	$(LMMS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r tests/integrations/lmms_eval.txt
	$(LMMS)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	> $$($(LMMS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/packages-of-realvr.pth
	touch $@

test: $(STAMP) browser
	$(BIN)/python -m pytest -n auto -q

test-slow: $(STAMP) browser lmms
	$(BIN)/python -m pytest -n auto -q -m slow

# Time and memory at the 7B shape on one GPU; SPEED="--device cpu --preset tiny" tries the script out.
speed: $(STAMP)
	$(BIN)/python benchmarks/speed.py $(SPEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/docs. A broken link or a page that is not in the navigation is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/docs/index.html

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) $(LMMS) runs build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
