# make demo   set everything up, then fine-tune a small QLoRA model in eager, Inductor and qfuse
# make test   set everything up, then run the default test group (CPU), one worker a core
#
# Both build .venv here once and use it again until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# pytest's processes for the default group; more than eight wait for the slowest test anyway.
WORKERS ?= auto

BIN := $(VENV)/bin
# Named by content, not by time: a fresh clone or a branch switch does not reinstall for nothing.
STAMP := $(VENV)/.setup-$(shell cat pyproject.toml constraints.txt | cksum | tr -s ' ' '-')
# bitsandbytes traces to other graphs since 0.50: the tests run the passes on both, the older one
# from a folder of its own (tests/passes/test_passes.py; INDUCTOR_Q_BNB049 names another folder).
OLD_BNB := 0.49.2
OLD_BNB_STAMP := $(VENV)/bnb049/bitsandbytes-$(OLD_BNB).dist-info/METADATA

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all lint format bench docs clean

help:
	@echo "make demo    fine-tune a small QLoRA model: eager, stock Inductor, qfuse"
	@echo "make test    the default tests (CPU); pass more with ARGS='-m gpu -n 0'"
	@echo "make test-slow  the slow tests: whole models, several processes, sweeps"
	@echo "make lint    ruff, mypy, and the budget of lines"
	@echo "make format  apply ruff's fixes and format"
	@echo "make bench   the benchmarks, at the sizes this machine can take"
	@echo "make docs    write what the documents take from code and results"
	@echo "make setup   only build $(VENV)"
	@echo "make clean   remove $(VENV), builds and caches"

setup: $(STAMP)

# The stamp is written last: an interrupted setup is taken up again. setuptools comes first and
# without build isolation, so the build uses the pinned one too.
$(STAMP):
	@$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f'the pinned versions need Python 3.11 or newer, not {v[0]}.{v[1]}: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@rm -f $(VENV)/.setup-*
	@touch $@

$(OLD_BNB_STAMP): | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/bnb049 bitsandbytes==$(OLD_BNB)

demo: $(STAMP)
	$(BIN)/python -m examples.finetune $(ARGS)

test: $(STAMP) $(OLD_BNB_STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

# Two at most: these tests start processes of their own, and hold whole models.
test-slow: $(STAMP) $(OLD_BNB_STAMP)
	$(BIN)/python -m pytest -m slow -n $(WORKERS) --maxprocesses 2 --dist worksteal $(ARGS)

test-all: $(STAMP) $(OLD_BNB_STAMP)
	$(BIN)/python -m pytest -m '' $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/lines.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
