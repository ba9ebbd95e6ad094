# Two commands on a fresh machine: `make run` and `make test`. Everything else is below.
SHELL := /bin/sh
PYTHON ?= python3
SECONDS ?= 600
VENV := .venv
WORKERS := -n 4
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
SITE := build/docs
INSTALL := GOAL="$(firstword $(MAKECMDGOALS))" $(PYTHON) requirements/install.py $(VENV)
# The rooms as they lie when installed, for the type checker.
HOUSE := rm -rf .house && mkdir -p .house/fedmuon && ln -s ../tests ../benchmarks ../examples ../docs .house \
	&& ln -s ../../clients ../../server ../../analysis ../../experiments .house/fedmuon \
	&& for one in fedmuon/*; do ln -s ../../$$one .house/fedmuon; done \
	&& ln -s ../pyrightconfig.json .house
export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: run test test-all test-slow coverage fresh check bench docs results chaos fuzz soak packages audit stats deploy-demo reference format clean help install
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(STAMP) ## set up, then run the main job on bundled data
	$(BIN)/fedmuon run

test: $(STAMP) ## set up, then run the tests: every module and formula, in about ten minutes on two cores
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(STAMP) ## all tests, with the slow ones and those that need a browser
	$(BIN)/python -m pytest $(WORKERS) -m ""

test-slow: $(STAMP) ## what `make test` leaves out: slow tests, and those that need a browser or Fashion-MNIST
	$(BIN)/python -m pytest $(WORKERS) -m "slow or needs_browser or needs_fashion_mnist"

coverage: $(STAMP) ## lines and branches that `make test` reaches; ALL=1: those of `make test-all`
	$(BIN)/python -m tests.measure_coverage $(if $(ALL),-m "")

fresh: ## the two commands in a fresh clone, which sees nothing of this machine but Python and make
	$(PYTHON) tests/fresh.py

check: $(STAMP) ## format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(HOUSE)
	$(BIN)/pyright -p .house
	$(BIN)/python -m pytest -q tests/architecture/test_imports.py

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BENCH_STAMP) ## side by side with Flower, pfl-research, BlazeFL, torch, Opacus: one page in bench/
	$(BIN)/python -m benchmarks

docs: $(DOCS_STAMP) ## the site in build/docs, which reads without a network: links, requests, widths checked
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet docs $(SITE)
	$(BIN)/python -m docs.making.check $(SITE)

results: $(STAMP) ## all suites at full scale, kept in docs/results: ONLY="A1 dp-bias", BUDGET=seconds, JOBS=16; Ctrl-C, then go on
	$(BIN)/python -m docs.making.regenerate $(if $(ONLY),--only $(ONLY)) $(if $(BUDGET),--budget $(BUDGET)) $(if $(JOBS),--jobs $(JOBS))

chaos: $(STAMP) ## kill, fill, flip, interrupt at random: the same bytes or a refusal, as a table
	$(BIN)/python -m tests.chaos

fuzz: $(STAMP) ## configs, commands, folders, data, messages at random, for SECONDS=600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)

soak: $(STAMP) ## 10,000 rounds here, 1,000 on Ray, 50 deployed: nothing may grow
	$(BIN)/python -m tests.soak

deploy-demo: $(STAMP) ## SuperLink and SuperNodes as processes: with TLS and keys, then without
	$(BIN)/fedmuon deploy-demo
	$(BIN)/fedmuon deploy-demo --insecure

reference: $(STAMP) ## make docs/config.md from the descriptions in fedmuon/config, and the table of coefficients
	$(BIN)/python -m docs.making.config_page docs/config.md
	$(BIN)/python -m docs.making.coefficients docs/reference/coefficients.md

packages: $(STAMP) ## licences; wheel and sdist, tried in every Python from 3.11 that is here
	PYTHONPATH=tests $(BIN)/python -m packages.licences
	PYTHONPATH=tests $(BIN)/python -m packages.environments

audit: $(STAMP) ## ask whether a pinned version is known to be vulnerable
	PYTHONPATH=tests $(BIN)/python -m packages.audit

stats: $(STAMP) ## how large the code is and how far a run goes through it: counts and their targets
	$(BIN)/python -m tests.architecture.stats $(if $(DETAILS),--details)

install: $(STAMP) ## set up only

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) runs dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# requirements/install.py verifies every file by its hash, and says what it is doing.
$(STAMP): pyproject.toml constraints.txt requirements/install.py $(wildcard requirements/*.txt)
	@$(INSTALL)
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(INSTALL) bench
	@touch $@

$(DOCS_STAMP): $(STAMP)
	@$(INSTALL) docs
	@touch $@
