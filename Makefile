# "make demo" and "make test" do all their own set-up: a virtual environment in .venv, and apt-get only where that
# cannot be done without it. Needs Python 3.11 or newer; another one than python3: make PYTHON=python3.12 demo
PYTHON ?= python3
BIN := .venv/bin
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
tested = { $(BIN)/pytest --collect-only -qq $(1) >/dev/null & $(3) $(MAKE) static && wait; } && $(BIN)/pytest $(2) $(1)
NODE := $(patsubst %/package.json,%/node_modules/.ready,$(wildcard tests/foreign/package.json tests/browser/package.json))
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL .DELETE_ON_ERROR:
.PHONY: help setup demo cluster test node check static conformance chaos spark bench docs clean distclean

help: # print this list
	@sed -n 's/^\([a-z]*\):[^#]*# /  make \1  /p' Makefile | expand -t 20
setup: .venv/.dev $(NODE) .venv/.suites # everything below once; the others call it themselves
demo: .venv/.demo; $(BIN)/flintmq demo # real data through broker, consumers and Spark, with a kill -9 in the middle
cluster: .venv/.dev; $(BIN)/flintmq demo cluster # 3 nsqd, 2 nsqlookupd and etcd under load, and a leader that is killed
test: setup # all checks, while tests and classes of Spark are made ready, and all tests: four processes, as most of them wait
	$(call tested,,-n 4 --dist loadfile --no-loadscope-reorder -m 'not long',XDG_CACHE_HOME=$(CURDIR)/.venv/cache $(BIN)/flintmq pipeline warm &)
node: setup; $(BIN)/pytest --one-node -n 4 --dist loadfile --no-loadscope-reorder -m 'not long and not spark' # the tests without those of cluster, pipeline and page
check: .venv/.dev # what to run before every commit: style, types, layers, unit tests
	$(call tested,tests/unit tests/scripts tests/test_tidy.py,-q -n 2 --dist loadfile -m 'not slow')
static: .venv/.dev # style, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
conformance: setup # the protocol, rule by rule, and other people's clients
	$(BIN)/pytest $(wildcard tests/conformance tests/foreign)
chaos: .venv/.dev # simulated and real crashes, then half an hour of a cluster under faults; CHAOS_SECONDS, _SEED, _ETCD
	FLINTMQ_SIM_ALL=1 $(BIN)/pytest tests/sim tests/power tests/integration/test_kill.py && $(BIN)/python -m tests.chaos.run .chaos
spark: .venv/.dev # the Spark source and sink, and what takes too long for make test
	$(BIN)/pytest -m spark
bench: setup # speed and memory, side by side with others
	$(BIN)/python -m benchmarks
docs: .venv/.dev # write docs/reference and contrib from the tables in the code
	$(BIN)/python docs/generate.py
clean: # remove caches and build output
	rm -rf .chaos build dist .coverage* .*_cache .hypothesis && find . -path ./.venv -prune -o -name __pycache__ -prune -exec rm -rf {} +
distclean: clean; rm -rf .venv tests/foreign/node_modules tests/browser/node_modules # and what setup made
apt = { echo "==> $(1) is missing: running $(strip $(SUDO) apt-get install $(2))"; $(SUDO) apt-get -qq update && \
	$(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends install $(2); }
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "==> FlintMQ needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt,Python's venv,python3-venv)
	$(PYTHON) -m venv .venv
.venv/.demo: pyproject.toml | $(BIN)/python
	@echo "==> installing FlintMQ and Spark into .venv (once, about 1 GB)"
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[fast,spark,demo]' && touch $@
.venv/.dev: pyproject.toml | .venv/.demo
	@type ip curl mkfs.ext4 &>/dev/null || [ -n "$(SUDO)" ] || $(call apt,one of ip curl mkfs.ext4,curl e2fsprogs iproute2)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[fast,spark,demo,dev]' && touch $@
.venv/.suites: tests/foreign/suites/requirements.txt | .venv/.dev
	@$(BIN)/python -m pip -q download --no-deps -r $< -d .venv/suites && touch $@ || echo "==> no suites: skipped"
tests/%/node_modules/.ready: tests/%/package.json
	@command -v npm >/dev/null || { [ -n "$(SUDO)" ] && echo "==> no npm and not root: tests/$* will be skipped"; } || $(call apt,npm (for tests/$*),nodejs npm)
	@[ $* != browser ] || command -v chromium-headless-shell >/dev/null || [ -n "$(SUDO)" ] || $(call apt,Chromium's shell,chromium-headless-shell) || \
	command -v chromium chromium-browser google-chrome >/dev/null || echo "==> no Chromium: tests/browser will be skipped"
	@! command -v npm >/dev/null || { cd tests/$* && npm ci --no-audit --no-fund && touch node_modules/.ready; }
