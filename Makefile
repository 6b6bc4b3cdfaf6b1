# Plain `make` lists the targets. Needs Python 3.11 or newer with venv, and make; everything else goes into .venv.

VENV  := .venv
PY    := $(VENV)/bin/python
STAMP := $(VENV)/.installed
USABLE = import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
STUDIES = optimizers methods indexer balance qat expert_qat draft_loss recall distill rare_rows heads
.PHONY: help install train kernels proof rl-demo sft-demo lora-demo vision-demo dspark-demo distill-demo studies $(STUDIES:%=study-%) test slurm-check bench
.PHONY: interop interop-install bench-distributed bench-million lint docs docs-check coverage clean

help:
	@echo "make install      set up .venv; every other target does it first"
	@echo "make train        train the demo model on real text (minutes on 2 cores); again: continue it if it was stopped"
	@echo "make sft-demo | lora-demo | vision-demo   fine-tune on a small task: all weights, adapters, images (minutes each)"
	@echo "make rl-demo      fine-tune a small model to reason, then reinforcement learning at four efforts (minutes)"
	@echo "make dspark-demo  train a drafter for the demo model, and compare decoding with and without it (minutes)"
	@echo "make distill-demo  train a small student with the demo model as its teacher, and without (minutes)"
	@echo "make studies      compare methods, one table each: $(STUDIES:%=study-%)"
	@echo "make test         run the quick tests"
	@echo "make interop      install mlx-lm, lm-eval and nemo-automodel, and compare the model with what they compute"
	@echo "make slurm-check  run the job scripts against stand-ins for Slurm's commands, and shellcheck"
	@echo "make bench        print the benchmark tables; make bench-distributed: those of 1, 2 and 4 processes"
	@echo "make bench-million    train one step on a row of 1,048,576 tokens over 4 processes (half an hour, 15 GB)"
	@echo "make kernels      compile the GPU kernels without a GPU: registers, shared memory, spills, roofline estimates"
	@echo "make proof        run a training step at the released sizes without memory: shapes, and its memory beside task=plan"
	@echo "make lint         check the style and the types"
	@echo "make coverage     run all tests; fails below 90 % of the lines of model, optim, data and train"
	@echo "make docs         write the configuration page and the plots of docs/; make docs-check: run the pages' commands at tiny sizes"
	@echo "make clean        remove .venv and what tests and builds leave (runs/ and .cache/ stay)"
	@echo 'Settings:         make train ARGS="name=mine seed=1"     make test ARGS="tests/train -k resume"'
	@echo "Without make:     source .venv/bin/activate; python -m train --help"

train: install
	@$(PY) -m train task=pretrain experiment=demo $(ARGS)

# What they start from and learn is made if it is not there.
sft-demo lora-demo: runs/demo/export/config.json .cache/examples/modules/valid.jsonl
	@$(PY) -m train task=sft experiment=$(subst -,_,$@) $(ARGS)

vision-demo: runs/vision-base/export/config.json .cache/examples/digits/valid.jsonl
	@$(PY) -m train task=sft experiment=vision_demo $(ARGS)

runs/%/export/config.json: | $(STAMP)
	@$(PY) -m train task=pretrain experiment=$(subst -,_,$*)

.cache/examples/%/valid.jsonl: | $(STAMP)
	@$(PY) -m data.examples $* $(@D)

rl-demo: install
	@$(PY) -m train.rl.demo runs/rl-demo
	@$(PY) -m train task=sft experiment=rl_demo_sft init_from=runs/rl-demo/base data.paths=[runs/rl-demo/chats.jsonl] $(ARGS)
	@$(PY) -m train task=rl experiment=rl_demo init_from=runs/rl-demo-sft/export $(ARGS)

dspark-demo: runs/demo/export/config.json
	@$(PY) -m train task=dspark experiment=dspark_demo $(ARGS)
	@$(PY) -m train.studies.drafter runs/dspark-demo

distill-demo: study-distill

studies: $(STUDIES:%=study-%)

$(filter-out study-rare_rows,$(STUDIES:%=study-%)): study-%: install
	@$(PY) -m train.studies $* $(ARGS)

study-recall: .cache/examples/recall/train.jsonl

.cache/examples/recall/train.jsonl: | $(STAMP)
	@$(PY) -m data.recall $(@D)

study-rare_rows: install
	@$(PY) -m train.studies rare_rows $(ARGS)
	@$(PY) -m train.studies.rows rare_rows $(filter-out --%,$(foreach word,$(ARGS),$(if $(findstring =,$(word)),$(word))))

study-draft_loss: runs/study/backbone/export/config.json

study-distill: runs/demo-released/config.json

runs/demo-released/config.json: runs/demo/export/config.json
	@$(PY) -m train task=convert src=runs/demo/export dst=$(@D) format=released

runs/study/backbone/export/config.json: | $(STAMP)
	@$(PY) -m train task=pretrain experiment=study name=backbone output=runs/study checkpoint.export=plain

# Tests of one file stay together, as they share what its fixtures made.
PARALLEL = -n auto --dist loadfile

test: install
	@$(PY) -m pytest -m "not slow" $(PARALLEL) --durations=10 $(ARGS)

coverage: install
	@$(PY) -m pytest $(PARALLEL) --cov --cov-report=term:skip-covered $(ARGS)

interop: interop-install
	@$(PY) -m pytest tests/interop $(ARGS)

interop-install: $(VENV)/.interop

slurm-check: install
	@$(PY) -m pytest tests/slurm $(ARGS)

kernels: install
	@$(PY) -m model.kernels.table $(ARGS)

proof: install
	@$(PY) -m tests.train.planning.released_step $(ARGS)

bench: install
	@for file in $(filter-out %_distributed.py %_million.py,$(wildcard tests/bench/bench_*.py)); do echo "== $$file"; $(PY) $$file || exit 1; done

bench-distributed: install
	@$(PY) tests/bench/bench_distributed.py $(ARGS)

bench-million: install
	@$(PY) tests/bench/bench_million.py $(ARGS)

TYPED = model optim data train

lint: install
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(if $(TYPED),$(PY) -m mypy $(TYPED:%=-p %))

docs: install
	@$(PY) docs/generate.py
	@$(PY) docs/plot.py

docs-check: install
	@$(PY) -m pytest tests/docs $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache

install: $(STAMP)

# torch goes first: packages that look for it while they build or resolve then find the pinned one.
# editable_mode=compat: by plain path, so that a folder `data` where a command is started does not hide the package.
# DS_BUILD_OPS=0: DeepSpeed compiles no native operator, so no compiler is needed.
$(STAMP): pyproject.toml constraints.txt
	@set -e; python=""; \
	for candidate in $(or $(PYTHON),python3 python3.11 python3.12 python3.13 python); do \
	  if $$candidate -c "$(USABLE)" >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "error: Python 3.11 or newer is needed, $(or $(PYTHON),python3) is: $$($(or $(PYTHON),python3) --version 2>&1)" >&2; \
	  echo "       Install one and name it if it is not on the path: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; \
	fi; \
	if ! $$python -c "import ensurepip, venv" >/dev/null 2>&1; then \
	  echo "error: $$python has no venv module; install your system's venv package for it (for example python3-venv)." >&2; \
	  exit 1; \
	fi; \
	if [ ! -x $(PY) ] || ! $(PY) -c "$(USABLE)" >/dev/null 2>&1; then \
	  echo "Creating $(VENV) with $$($$python --version)"; $$python -m venv --clear $(VENV); \
	fi
	@echo "Installing into $(VENV) (a few minutes the first time, nothing afterwards)"
	@$(PY) -m pip install --quiet -c constraints.txt torch
	@DS_BUILD_OPS=0 $(PY) -m pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e ".[dev]"
	@touch $(STAMP)

# nemo-automodel pins another transformers and asks for CUDA packages; what is compared needs neither.
$(VENV)/.interop: $(STAMP)
	@echo "Installing the clients of tests/interop into $(VENV)"
	@$(PY) -m pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e ".[interop]"
	@$(PY) -m pip install --quiet -c constraints.txt --no-deps nemo-automodel
	@touch $@
