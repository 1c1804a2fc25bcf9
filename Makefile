# make demo    install into .venv, print the plan of a 32 B model on 8 H800, train a small model with GRPO on this CPU
# make test    install into .venv, run every check and every test
# Both need python3 (3.11 to 3.13) and make, nothing else. To choose another interpreter: make demo PYTHON=python3.12
# On Linux, TORCH_INDEX=https://download.pytorch.org/whl/cpu makes torch a CPU build: a much smaller download.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA := examples/data/shapes
RUN ?= runs/shapes
export TORCH_INDEX

.PHONY: help demo test check venv clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo:
	@$(PYTHON) tools/venv.py $(VENV) host
	@$(BIN)/python tools/demo.py $(DATA) $(RUN)

test:
	@$(PYTHON) tools/venv.py $(VENV) dev
	@$(BIN)/python tools/check.py

check:
	@$(PYTHON) tools/venv.py $(VENV) dev
	@$(BIN)/python tools/check.py --static

clean:
	rm -rf $(VENV) examples/data runs build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
