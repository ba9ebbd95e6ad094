# Two commands on a fresh machine: `make run` and `make test`. Everything else is below.
SHELL := /bin/sh
PYTHON ?= python3
SECONDS ?= 600
VENV := .venv
WORKERS := -n logical
WAITING := -n 4
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
SITE := build/docs
INSTALL := GOAL="$(firstword $(MAKECMDGOALS))" $(PYTHON) requirements/install.py $(VENV)
# The packages in the folders that they have when installed, for the type checker.
LAYOUT := rm -rf .layout && mkdir -p .layout/fedmuon && ln -s ../tests ../benchmarks ../examples ../docs .layout \
	&& ln -s ../../clients ../../server ../../analysis ../../experiments .layout/fedmuon \
	&& for one in fedmuon/*; do ln -s ../../$$one .layout/fedmuon; done \
	&& ln -s ../pyrightconfig.json .layout
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: run test test-all test-slow coverage fresh check bench docs results chaos fuzz soak packages audit stats deploy-demo reference format clean help install
.DEFAULT_GOAL := help

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## set up, then run FedMuon on 5,000 MNIST digits
	$(BIN)/fedmuon run

test: $(STAMP) ## set up, then run the quick tests
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(STAMP) ## run all tests, also the slow ones and those that need a browser
	$(BIN)/python -m pytest $(WAITING) -m ""

test-slow: $(STAMP) ## run the tests that `make test` leaves out
	$(BIN)/python -m pytest $(WAITING) -m "slow or needs_browser or needs_fashion_mnist"

coverage: $(STAMP) ## measure which lines and branches the quick tests reach; ALL=1 for all tests
	$(BIN)/python -m tests.measure_coverage $(if $(ALL),-m "")

fresh: ## run the README's two commands in a fresh clone with an empty HOME
	$(PYTHON) tests/fresh.py

check: $(STAMP) ## check format, lint, types and imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(LAYOUT)
	$(BIN)/pyright -p .layout
	$(BIN)/python -m pytest -q tests/architecture/test_imports.py

format: $(STAMP) ## format the code, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_STAMP) ## compare speed with Flower, pfl-research, BlazeFL, torch and Opacus; writes bench/page.html
	$(BIN)/python -m benchmarks

docs: $(DOCS_STAMP) ## build the documentation in build/docs, and check its links and page widths; CELLS=0 runs no cells
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs $(SITE)
	$(BIN)/python -m docs.making.check $(SITE)

results: $(STAMP) ## run all suites at full scale into docs/results; resumes (ONLY="A1 dp-bias", BUDGET=seconds, JOBS=16)
	$(BIN)/python -m docs.making.regenerate $(if $(ONLY),--only $(ONLY)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(JOBS),--jobs $(JOBS))

chaos: $(STAMP) ## kill runs, fill disks and damage files at random, and check the results
	$(BIN)/python -m tests.chaos

fuzz: $(STAMP) ## try random configs, commands, folders, data and messages for SECONDS=600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

soak: $(STAMP) ## check that memory and files do not grow in long runs, on all engines
	$(BIN)/python -m tests.soak

deploy-demo: $(STAMP) ## run a local Flower deployment with TLS and keys, then one without
	$(BIN)/fedmuon deploy-demo
	$(BIN)/fedmuon deploy-demo --insecure

reference: $(STAMP) ## rewrite docs/config.md, the pages of the methods and the table of coefficients
	$(BIN)/python -m docs.making.config_page docs/config.md
	$(BIN)/python -m docs.making.methods
	$(BIN)/python -m docs.making.coefficients docs/reference/coefficients.md
	$(BIN)/python -m docs.making.typed_config fedmuon/config/typed.py
	$(BIN)/ruff format -q fedmuon/config/typed.py

packages: $(STAMP) ## check licences, wheel and sdist; try the wheel in every installed Python from 3.11
	PYTHONPATH=tests $(BIN)/python -m packages.licences
	PYTHONPATH=tests $(BIN)/python -m packages.environments

audit: $(STAMP) ## look for known vulnerabilities of the pinned versions
	PYTHONPATH=tests $(BIN)/python -m packages.audit

stats: $(STAMP) ## compare counts of the code with their targets, and with a revision: AT=main
	$(BIN)/python -m tests.architecture.stats $(if $(DETAILS),--details) $(if $(AT),--at $(AT))

install: $(STAMP) ## only set up .venv

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) runs dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# requirements/install.py verifies the hash of every file.
$(STAMP): pyproject.toml constraints.txt requirements/install.py $(wildcard requirements/*.txt)
	@$(INSTALL)
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(INSTALL) bench
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(INSTALL) docs
	@touch $@
