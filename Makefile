# make demo    a tiny TokenFormer on Shakespeare that grows on the way; some minutes on two CPU cores; runs/demo/report.html
# make docs    all pages as a site: build/site/index.html
# make test    linter, type checker, tests: about 15 minutes on two cores
# make lint    linter and type checker alone, of the files that git knows
# make setup   an environment in .venv with everything the tests need
# make test-slow    soaks and the fuzzer, a quarter of an hour on two cores
# make test-serve   the server under load, and all pages in a browser (Debian's chromium), some minutes
# make test-pages   the tutorial with all its steps, a quarter of an hour
# For those who change the code for clusters: make test-hosts, two hosts on this machine (a real Slurm, network namespaces; Debian, as root)
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup test test-slow test-pages test-serve test-hosts browser hosts lint demo docs clean

setup: .venv/.tests

.venv/.base: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenformer needs Python 3.11 or newer: make PYTHON=python3.12 setup")'
	@echo 'downloading PyTorch and what the package needs into .venv'
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e '.[data,vision,plot]'
	touch $@

.venv/.tests: .venv/.base
	@echo 'downloading what the tests need: transformers, lm_eval, matplotlib, tensorboard, wandb, … (.venv then has about 3 GB, with a CUDA build of PyTorch more)'
	$(PIP) -e '.[test]'
	$(PIP) --no-deps timm open_clip_torch  # their torchvision is a CUDA build, beside which transformers' image processors do not import
	touch $@

.venv/.docs: .venv/.base
	$(PIP) -e '.[docs]'
	touch $@

lint: setup
	git ls-files -z '*.py' | xargs -0 $(BIN)/ruff check --force-exclude
	git ls-files -z '*.py' | xargs -0 $(BIN)/ruff format --check --force-exclude
	$(BIN)/pyrefly check

test: lint
	@echo 'running the tests: about 15 minutes on two cores'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'not slow and not gpu and not hosts' -rs

test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m 'slow and not gpu and not hosts' --ignore tests/test_pages.py --ignore tests/serve --durations=0 -rs

test-pages: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/test_pages.py

test-serve: setup browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'slow or browser' -rs tests/serve tests/inside tests/test_gallery.py

browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null; } || \
	echo "NOT RUN: the page in a browser: it needs Debian's chromium and chromium-driver, and root to install them"

test-hosts: setup hosts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m hosts tests/parallel

hosts:
	@test "$$(id -u)" = 0 || { echo 'tests of two hosts need root: sudo make test-hosts'; exit 1; }
	@for tool in slurmctld slurmd munged unshare ip; do command -v $$tool >/dev/null || missing=1; done; test -z "$$missing" || \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq slurm-wlm munge iproute2 >/dev/null; }

demo: .venv/.base
	OMP_WAIT_POLICY=passive $(BIN)/python examples/demo/demo.py

docs: .venv/.docs
	$(BIN)/python docs/site_pages.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
