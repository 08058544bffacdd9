# make help lists the targets. Everything happens inside .venv and runs/; SEED and OUT choose the demo's seed and folder.
SEED ?= 0
OUT ?= runs/demo-$(SEED)
PY := .venv/bin/python

.PHONY: help setup demo test test-slow base

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: .venv/ready ## virtual environment, packages and a browser
.venv/ready: requirements.txt
	python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.ci/browser $(PY)
	touch $@

demo: setup ## demonstrations, behavior cloning, M-GRPO and held-out evaluation on the sandbox; a laptop will do
	.ci/demo $(PY) $(OUT) $(SEED)

test: setup ## the whole test suite, a two-rank run included
	$(PY) -m pytest -q -m "not slow" tests

test-slow: setup ## the checks that take long
	$(PY) -m pytest -q -m slow tests

base: setup ## pre-train sandbox/base again from random weights, about 20 minutes on one core, into runs/base
	mkdir -p runs
	$(PY) -m sandbox.exercises --rows 14000 --size 7 --seed 1 > runs/exercises-small.jsonl
	$(PY) bc.py --fresh --data runs/exercises-small.jsonl --lr 2e-3 --epochs 1 --batch 48 --max-tokens 4096 --out runs/base-small
	$(PY) -m sandbox.exercises --rows 24000 > runs/exercises-large.jsonl
	$(PY) bc.py --model runs/base-small --data runs/exercises-large.jsonl --lr 2e-3 --warmup 0.03 --epochs 1 --max-tokens 4096 --out runs/base
