# make help lists the targets. Everything happens inside .venv and runs/; SEED and OUT choose the demo's seed and folder.
SEED ?= 0
OUT ?= runs/demo-$(SEED)
PY := .venv/bin/python

.PHONY: help setup demo test test-slow test-gpu pictures base experiments table forks

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: .venv/ready ## virtual environment, packages and a browser
.venv/ready: requirements.txt
	python3 -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	.ci/browser $(PY)
	touch $@

demo: ## demonstrations, behavior cloning, M-GRPO and held-out evaluation on the sandbox; two CPU cores will do
	@.ci/demo $(PY) $(OUT) $(SEED)

# Three processes, since browsers wait more than they compute: pages and the judge, episodes, all else.
PYTEST := $(PY) -m pytest -q -m "not slow"
PAGES := $(patsubst %,tests/test_%.py,browser evaluate infinity page page_seen report serve worlds)
EPISODES := $(patsubst %,tests/test_%.py,forks_webrl long one_task plan readme rollout run sandbox)
OTHERS := $(filter-out $(PAGES) $(EPISODES),$(wildcard tests/test_*.py))
test: setup ## the tests, a two-rank run included; the slow ones: make test-slow
	@logs=$$(mktemp -d); \
	$(PYTEST) $(PAGES) > $$logs/pages & pages=$$!; \
	$(PYTEST) $(EPISODES) > $$logs/episodes & episodes=$$!; \
	$(PYTEST) $(OTHERS); status=$$?; \
	wait $$pages || status=1; \
	wait $$episodes || status=1; \
	cat $$logs/pages $$logs/episodes; rm -r $$logs; exit $$status

test-slow: setup ## the checks that take long
	$(PY) -m pytest -q -m slow tests

test-gpu: setup ## what only a GPU can show; all other tests run on the CPU
	CUDA_VISIBLE_DEVICES=0 $(PY) -m pytest -q tests/test_gpu.py

pictures: setup ## redraw the README's pictures, the figures and the walk, from a finished demo
	$(PY) tests/tools/packing.py
	$(PY) tests/tools/losses_figure.py
	$(PY) tests/tools/differences.py
	$(PY) tests/tools/curves.py assets/results/experiments/seed3?/r1-metrics.jsonl --out assets/training.svg
	$(PY) tests/tools/pictures.py $(OUT)/r1
	$(PY) tests/tools/figures.py
	$(PY) tests/tools/walk.py --model $(OUT)/bc

BASE ?= runs/base
base: setup $(BASE)/model.safetensors ## pre-train worlds/base again from random weights, three hours on one core (computed), into $(BASE); resumable
EXERCISES := $(PY) -m worlds.sandbox.exercises
# One thread; the allocator keeps its memory, which saves a fifth of the time.
PRETRAIN := OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=4000000000 $(PY)
LEARN := --max-tokens 4096 --max-context 4096 --epochs 1 --save-every 100
pretrain = $(EXERCISES) $(2) > $(@D).jsonl && $(PRETRAIN) $(1) $(LEARN) --model $(<D) --data $(@D).jsonl --out $(@D) $(3) && rm $(@D).jsonl
$(BASE)-0/model.safetensors:
	rm -rf $(@D) && $(EXERCISES) --tokenizer $(@D)
$(BASE)-1/model.safetensors: $(BASE)-0/model.safetensors # four names of one token: here the look-up forms
	$(call pretrain,bc.py,--rows 60000 --words 1 --size 4 --visits 0 --seed 1,--batch 48 --lr 2e-3 --warmup 0.1)
$(BASE)-2/model.safetensors: $(BASE)-1/model.safetensors # up to fourteen
	$(call pretrain,forks/muon.py,--rows 16000 --words 1 --size 14 --visits 0 --seed 2,--batch 48 --lr 4e-3 --warmup 0.03)
$(BASE)-3/model.safetensors: $(BASE)-2/model.safetensors # small pages with names of two words
	$(call pretrain,forks/muon.py,--rows 24000 --size 7 --visits 0 --seed 3,--batch 48 --lr 4e-3 --warmup 0.03)
$(BASE)-4/model.safetensors: $(BASE)-3/model.safetensors # larger ones, and visits to little websites
	$(call pretrain,forks/muon.py,--rows 26000 --visits 0.45 --seed 4,--batch 40 --lr 4e-3 --warmup 0.03)
$(BASE)-5/model.safetensors: $(BASE)-4/model.safetensors # more of these
	$(call pretrain,forks/muon.py,--rows 22000 --visits 0.65 --seed 5,--batch 40 --lr 3e-3 --warmup 0.03)
$(BASE)/model.safetensors: $(BASE)-5/model.safetensors # and more: reading.py sees no gain, clones do (decisions.md)
	$(call pretrain,forks/muon.py,--rows 12000 --visits 0.85 --seed 6,--batch 40 --lr 3e-3 --warmup 0.03)

.NOTPARALLEL:

# ---- experiments and the table. Finished runs are kept, interrupted ones resume. Figures go to $(FIGURES).
RUNS := runs/experiments/seed$(SEED)
FIGURES := assets/results/experiments/seed$(SEED)
NORMS := norm-paper norm-constant
ABLATIONS := base bc r1 zero nothink-bc nothink cot-bc cot whole-bc whole filtered $(NORMS)
FORKS := awr digirl webrl tsr
LOSSES := dr_grpo maxrl raft dapo gspo cispo masked
LATER := checklist critic feedback overlap
figures = $(1:%=$(FIGURES)/%.json)
# As many steps as the demo: every method plays 1,728 episodes.
MGRPO = $(PY) mgrpo.py --model $(<D) --out $(@D) --seed $(SEED)
# An interrupted command goes on when it is repeated: each part adds a line, which table.py sums.
timed = mkdir -p $(@D); begin=$$(date +%s); $(1); status=$$?; echo $$(($$(date +%s) - begin)) >> $(@D)/seconds; [ $$status = 0 ] && touch $@

experiments: setup $(call figures,$(ABLATIONS)) $(RUNS)/turns/done ## the paper's ablations on the small tier, hours a seed: make experiments SEED=1
	$(PY) tests/tools/table.py

table: setup $(call figures,bc filtered $(FORKS) r1 credit) ## the paper's methods from one clone, hours a seed: make table SEED=1
	$(PY) tests/tools/table.py

forks: setup $(call figures,r1 $(LOSSES) $(LATER)) ## later losses and ideas from one clone, hours a seed: make forks SEED=1
	$(PY) tests/tools/table.py

$(FIGURES)/%.json: $(RUNS)/%/done
	$(PY) evaluate.py --model $(<D) --out $(RUNS)/tests/$* --tasks sandbox:test,sandbox:test-unseen,sandbox:dev,sandbox:test/28:100
	mkdir -p $(@D) && $(PY) tests/tools/table.py --cost $(<D) > $(@D)/$*-cost.json
	if [ -f $(<D)/metrics.jsonl ]; then cp $(<D)/metrics.jsonl $(@D)/$*-metrics.jsonl; fi
	cp $(RUNS)/tests/$*/summary.json $@

$(RUNS)/base/done:
	mkdir -p $(@D) && cp worlds/base/* $(@D) && touch $@
# Three manners that the base has learned as well; agent.json picks one.
$(RUNS)/nothink-base/done: # a response is an action and nothing else
	mkdir -p $(@D) && cp worlds/base/* $(@D) && $(EXERCISES) --agent none > $(@D)/agent.json && touch $@
$(RUNS)/cot-base/done: # long chains of thought
	mkdir -p $(@D) && cp worlds/base/* $(@D) && $(EXERCISES) --agent long > $(@D)/agent.json && touch $@
$(RUNS)/whole-base/done: # compression off: every page stays in the history
	mkdir -p $(@D) && cp worlds/base/* $(@D) && $(EXERCISES) --agent short --whole > $(@D)/agent.json && touch $@

$(RUNS)/bc/done:
	$(call timed,$(PY) bc.py --out $(@D) --seed $(SEED))
$(RUNS)/nothink-bc/done: $(RUNS)/nothink-base/done
	$(call timed,$(PY) bc.py --model $(<D) --out $(@D) --seed $(SEED))
$(RUNS)/cot-bc/done: $(RUNS)/cot-base/done # long chains of thought: 60 to 140 tokens, and then the action
	$(call timed,$(PY) bc.py --cot --model $(<D) --out $(@D) --seed $(SEED) --max-new-tokens 224 --max-context 4096)
$(RUNS)/whole-bc/done: $(RUNS)/whole-base/done
	$(call timed,$(PY) bc.py --model $(<D) --out $(@D) --seed $(SEED) --max-context 4096)

$(RUNS)/r1/done: $(RUNS)/bc/done
	$(MGRPO) --held-out sandbox:dev --held-out-every 3 && touch $@
$(RUNS)/credit/done: $(RUNS)/bc/done # advantages of turns
	$(PY) forks/gigpo.py --model $(<D) --out $(@D) --seed $(SEED) && touch $@
$(RUNS)/zero/done: $(RUNS)/base/done # R1-Zero: from the base, no demonstrations
	$(MGRPO) && touch $@
$(RUNS)/nothink/done: $(RUNS)/nothink-bc/done
	$(MGRPO) && touch $@
$(RUNS)/cot/done: $(RUNS)/cot-bc/done
	$(MGRPO) --max-new-tokens 224 --max-context 4096 && touch $@
$(RUNS)/whole/done: $(RUNS)/whole-bc/done
	$(MGRPO) --max-context 4096 && touch $@
$(NORMS:%=$(RUNS)/%/done): $(RUNS)/norm-%/done: $(RUNS)/bc/done # other weights of the tokens; r1 has `token`
	$(MGRPO) --loss-norm $* && touch $@
fork_runs = $(1:%=$(RUNS)/%/done): $(RUNS)/%/done: $(RUNS)/bc/done
$(call fork_runs,$(FORKS) $(LATER))
	$(PY) forks/$*.py --model $(<D) --out $(@D) --seed $(SEED) && touch $@
$(call fork_runs,$(LOSSES))
	$(PY) forks/losses.py --loss $* --model $(<D) --out $(@D) --seed $(SEED) && touch $@
$(RUNS)/filtered/sampled/done: $(RUNS)/bc/done # as many episodes as M-GRPO plays, all by the clone
	$(call timed,$(PY) evaluate.py --model $(<D) --out $(@D) --seed $(SEED) --tasks sandbox:train:216 --runs 8 --temperature 0.7)
$(RUNS)/filtered/done: $(RUNS)/bc/done $(RUNS)/filtered/sampled/done # filtered cloning (rejection sampling): its successes once more
	$(call timed,$(PY) bc.py --model $(<D) --data $(@D)/sampled/trajectories.jsonl --data-split sandbox:train:216 --epochs 1 --out $(@D) --seed $(SEED))

$(RUNS)/turns/done: $(RUNS)/base/done $(RUNS)/bc/done $(RUNS)/r1/done # success over the number of turns allowed
	mkdir -p $(@D) $(FIGURES)
	for name in base bc r1; do \
		$(PY) evaluate.py --model $(RUNS)/$$name --out $(@D)/$$name --max-turns 2,4,6,8,12 && \
		cp $(@D)/$$name/summary.json $(FIGURES)/$$name-turns.json || exit 1; \
	done
	touch $@
