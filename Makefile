# The two commands: `make lab` opens the course, `make test` runs everything. `make help` lists the rest.
SHELL := /bin/bash
PYTHON3 := $(or $(shell command -v python3),python3)
BIN := .venv/bin
# Tests wait for time limits and virtual clusters: three processes keep two cores busy.
JOBS ?= 3

.PHONY: help lab test test-fast test-newest kernels compat combinations proofs slurm-faults slurm-stranger hub gpu lint docs course grade labs bench machines format setup setup-dev python

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

lab: setup ## set everything up and open JupyterLab on the labs
	@exec $(BIN)/dlo lab $(ARGS)

test: setup-dev ## set everything up and pass the whole suite
	@$(PYTHON3) deploy/system_packages.py
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -n $(JOBS) --record-slow $(ARGS) || { \
	  status=$$?; [ $$status -eq 1 ] || exit $$status; \
	  echo; echo "Tests failed, see above. They run once more now, one after another:"; \
	  echo "one that fails again is broken, one that passes depends on the other load of this machine."; \
	  exec $(BIN)/python -m pytest --last-failed $(ARGS) --cpu-file=/dev/null; }

test-fast: setup-dev ## the suite without what is slow
	@exec $(BIN)/python -m pytest -n $(JOBS) -m "not slow" --record-slow $(ARGS)

test-newest: setup-dev ## test-fast on the newest supported Python that is installed, with Triton (3.1 GB)
	@exec $(BIN)/python deploy/newest_python.py $(ARGS)

kernels: setup-dev ## the fused kernels in Triton's interpreter, and compiled for GPUs (286 MB, 1 GB on disk)
	@exec $(BIN)/python deploy/kernels.py $(ARGS)

lint: setup-dev ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

compat: setup-dev ## all labs and the parallel forms on each promised PyTorch and Python; writes COMPATIBILITY.md (ARGS=2.8: one)
	@exec $(BIN)/python deploy/compat.py $(ARGS)

course: setup-dev ## every reference lab at full size, through nbval; ARGS="-k 15_fsdp": one
	@exec $(BIN)/python -m pytest --nbval-lax --continue-on-collection-errors solutions $(ARGS)

combinations: setup-dev ## every tested combination of tensor, pipeline, data, context and expert parallelism
	@exec $(BIN)/python -m pytest -n 0 -s --every-combination --full-size tests/parallel/test_combinations.py tests/profiling/test_measure_mesh.py tests/train/test_other_plan.py $(ARGS)

proofs: setup-dev ## the proofs of every lab in full: each mutant by all checks, every hostile and odd answer
	@exec $(BIN)/python -m pytest -n $(JOBS) --every-check tests/labs/test_every_lab.py tests/labs/test_undrawn.py tests/labs/test_notebooks_run.py tests/grading/notebook/test_same_points.py tests/grading/answers $(ARGS)

slurm-faults: setup-dev ## each command of SLURM fails in each way, on private SLURM clusters (root)
	@exec $(BIN)/python -m pytest -n 6 --dist worksteal --every-fault tests/cluster/slurm/test_faults.py $(ARGS)

slurm-stranger: setup-dev ## a training, a sweep, a chain, graders and a cancelled job at a centre unlike ours (root)
	@exec $(BIN)/python -m pytest -n 0 tests/cluster/strangers_centre.py $(ARGS)

hub: setup-dev ## a class on a real JupyterHub, with Unix users and SLURM (root)
	@exec $(BIN)/python deploy/hub_tests.py $(ARGS)

gpu: ## on a machine with a GPU, with the PyTorch installed there: tests, the table of the kernels, training (8 min)
	@exec $(or $(wildcard $(BIN)/python),$(PYTHON3)) deploy/gpu.py $(ARGS)

LAB ?= 13_dp_limit
grade: setup ## a classroom in a box: three made-up students through the whole grading of LAB
	@exec $(BIN)/dlo classroom $(LAB) $(ARGS)

labs: setup ## build the notebooks in labs/ from the texts in solutions/
	@exec $(BIN)/dlo build

NAME ?= launch
bench: setup-dev ## one comparison with a peer: make bench NAME=ddp
	@exec $(BIN)/python -m benchmarks $(NAME) $(ARGS)

docs: setup-dev ## the documentation in build/docs, which opens without a network (LANGUAGE=fr: in French)
	@exec $(BIN)/python deploy/docs.py $(if $(filter command,$(firstword $(origin LANGUAGE))),--language $(LANGUAGE)) $(ARGS)

machines: ## the README's commands on machines that lack things (root, mmdebstrap): make machines ARGS="offline full-disk"
	@exec $(PYTHON3) -B tests/machines $(ARGS)

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: python
	@$(PYTHON3) deploy/setup_env.py --extras labs

setup-dev: python
	@$(PYTHON3) deploy/setup_env.py --extras labs,dev

python:
	@command -v $(PYTHON3) > /dev/null || { echo "setup: no python3 here: apt-get install python3 python3-venv" >&2; exit 2; }
