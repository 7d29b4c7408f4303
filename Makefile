PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bundled clean

demo: $(STAMP)  ## install into .venv, then generate with and without speculation and compare
	$(BIN)/python examples/compare.py

test: $(STAMP) lint  ## lint, type-check and run the tests
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bundled: $(STAMP)  ## train the bundled models again (hours)
	$(BIN)/python scripts/train_bundled.py all --out forerun/bundled

$(STAMP): pyproject.toml setup.py $(wildcard forerun/kernels/native/*.cpp forerun/kernels/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
