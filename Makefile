# make setup   an environment in .venv with everything the tests need
# make test    linter, type checker, tests
# make lint    linter and type checker alone
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test lint clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenformer needs Python 3.11 or newer: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

test: lint
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu'

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
