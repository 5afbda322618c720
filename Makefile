# `make demo` and `make test` are all that a newcomer needs; each makes the environment first if it is not there.
#   VENV=/some/where   puts the environment elsewhere
#   PYTHON=python3.12  names the interpreter to make it with
#   ARGS="seed=2"      goes to the command: overrides of the recipe, or pytest arguments
#   WORKERS=4          at a time of tests that start processes, each with up to 3 GB of memory

VENV ?= .venv
ARGS ?=
# Two for each of two cores: such tests wait half of the time. Those of `make test-fast` never do.
WORKERS ?= 4
override VENV := $(abspath $(VENV))
export PATH := $(VENV)/bin:$(PATH)
# A run has many processes: each would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-fast test-long test-hosts test-release lint format docs setup lock clean

help:
	@echo "make demo     train the demo: a tiny Qwen3-MoE learns arithmetic under Megatron-Core, SGLang and Ray"
	@echo "make test     all tests, fast ones first"
	@echo "make test-fast  those that start no processes and take no seconds"
	@echo "make test-long  further layouts, families and algorithms, and runs of half a minute and more: killed, resumed and the like"
	@echo "make test-release  what these check too, on more ranks or in further combinations: before a release"
	@echo "make test-hosts  those on several hosts, made of network namespaces: root on Linux"
	@echo "make lint     ruff and mypy            make format  ruff, in place"
	@echo "make docs     the site of docs/, into site/, its links checked"
	@echo "make setup    only the environment     make lock    resolve requirements.txt into requirements.lock"
	@echo "make clean    remove caches and the environment, keep runs/"

demo: setup
	@hybridflow train launch/recipes/demo.yaml overwrite=true $(ARGS)

# Threads of the libraries would only take turns.
test test-fast test-long test-hosts test-release: export OMP_NUM_THREADS := 1

test: setup
	@python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not hosts and not long and not release" $(ARGS)

test-fast: setup
	@python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not processes and not slow and not gpu and not hosts and not long and not release" $(ARGS)

test-long: setup
	@python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "long and not release" $(ARGS)

# Two at a time: those of one have no network, processes and temporary files in common with those of the other.
test-hosts: setup
	@python -m pytest -n 2 --dist loadfile -m "hosts and not release" tests/integration/hosts $(ARGS)

# Some of them start clusters too.
test-release: setup
	@python -m pytest -m release $(ARGS)

lint: setup
	ruff check .
	ruff format --check .
	mypy

format: setup
	ruff check --fix .
	ruff format .

docs: setup
	@mkdocs build --strict --quiet
	@echo "site/index.html"

setup:
	@launch/setup.sh $(VENV)

# Only pins that requirements*.txt no longer allow move; delete requirements.lock first to renew everything. Every file
# that a pin may be installed from has its hash there: an index that serves another one is refused.
lock: setup
	uv pip compile --quiet --python $(VENV)/bin/python requirements.txt requirements-dev.txt --no-header \
	    --no-emit-index-url --no-emit-find-links --generate-hashes --output-file requirements.lock
	uv pip compile --quiet --python $(VENV)/bin/python requirements-kubernetes.txt --constraint requirements.lock \
	    --no-header --no-emit-index-url --no-emit-find-links --generate-hashes --output-file requirements-kubernetes.lock

clean:
	rm -rf $(VENV) site *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
