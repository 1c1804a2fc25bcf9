# make demo    install into .venv, print the plan of a 32 B model on 8 H800, train a small model with GRPO on this CPU
# make test    install into .venv, run every check and every test
# make check   the checks alone: lint, format, types, import directions
# make numbers   what was published beside what the compiler computes: models, Table 1, layout, Figure 8
# make faults    strike every kind of step of every process, fill disks, break checkpoints: a table of what comes of it
# make soak      300 steps of the shapes example, watched for leaks
# make clean   remove the environment, the example's data, runs and caches
#
# Needs python3 (3.11 to 3.13) and make, nothing else. To choose another interpreter: make demo PYTHON=python3.12
# On Linux, TORCH_INDEX=URL takes torch from an index of CPU builds, as pytorch.org names it: a much smaller download.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA := examples/data/shapes
export TORCH_INDEX
# A hundred processes import the same: what is compiled stays compiled, also where a container says otherwise.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo plan train test check numbers faults soak clean venv-host venv-dev

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: plan train

plan: venv-host
	$(BIN)/rollplex compile examples/grpo.py --job examples/jobs/qwen2_5_vl_32b_h800x8.yaml --plan-only

train: plan $(DATA)/model.made
	$(BIN)/rollplex run examples/grpo_video.py --job examples/jobs/shapes_host.yaml

$(DATA)/clips.made: examples/shapes/make.py | venv-host
	$(BIN)/python -m examples.shapes.make $(DATA)
	@touch $@

$(DATA)/model.made: examples/shapes/warm_start.py $(DATA)/clips.made | venv-host
	$(BIN)/python -m examples.shapes.warm_start $(DATA)/train.jsonl $(DATA)/model
	@touch $@

test: venv-dev
	@$(BIN)/python tools/check.py

check: venv-dev
	@$(BIN)/python tools/check.py --static

numbers: venv-host
	@$(BIN)/python tools/reproduce.py

faults: venv-dev
	@$(BIN)/python tools/faults.py

soak: venv-dev $(DATA)/model.made
	@$(BIN)/python tools/soak.py

clean:
	rm -rf $(VENV) examples/data runs build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

venv-host:
	@$(PYTHON) tools/venv.py $(VENV) host

venv-dev:
	@$(PYTHON) tools/venv.py $(VENV) dev
