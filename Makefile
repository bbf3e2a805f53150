# make setup   an environment in .venv with everything the tests need
# make test    linter, type checker, tests
# make lint    linter and type checker alone
# make demo    a tiny TokenFormer on Shakespeare, about three minutes on two CPU cores; leaves runs/demo/report.html
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test lint demo clean

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

demo: setup
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo/demo.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
