# Every target does its own set-up: a virtual environment in .venv with the pinned requirements, for a wheel a small one
# in .venv-build with its builder alone.
#
#   make quickstart   fine-tune the embedded default on the device mps (simulated where there is no Metal); installs only
#                     what a training needs, and `make test` installs the development tools on top
#   make test         lint, type-check and run the suite, but for what the marker `nightly` leaves to each night
#   make test-fast    the suite without what takes over four seconds or starts a Python of its own
#   make nightly      the whole suite, which CI runs each night: all of PyTorch's samples, every architecture, every kill
#   make check        lint, type-check and look at the pages' links only
#   make ready        set up .venv with the development tools and do nothing else
#   make format       let ruff put the sources in form
#   make docs         build the pages into site/
#   make wheel        build the wheel into dist/
#   make dist         the same, and the sources' archive
#   make clean        remove what these made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARTS := layer finetune others runs kernels samples
tests-finetune := tests/finetune --ignore tests/finetune/run
tests-runs := tests/finetune/run tests/tools/dryrun/memory tests/scripts
tests-samples := tests/metal/kernels/conformance tests/metal/kernels/test_opinfo.py
tests-kernels := tests/metal/kernels $(tests-samples:%=--ignore %)
tests-layer := tests/layer
tests-others := tests --ignore tests/layer --ignore tests/finetune $(tests-runs:%=--ignore %) --ignore tests/metal/kernels
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
BUILDER := .venv-build
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hf_mps needs Python 3.10 or newer: make PYTHON=python3.12")'
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# A link that leads nowhere is an error. mkdocs needs no hf_mps, and is quicker where `import torch` does nothing.
BUILD_DOCS = HF_MPS=0 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A Mac has the device itself; elsewhere it is simulated.
ifeq ($(shell uname -s),Darwin)
CONSTRAINTS := constraints-darwin.txt
else
CONSTRAINTS := constraints.txt
export HF_MPS_SIMULATE ?= 1
endif

# Where the variable is set, every process compiles what it imports anew: `from transformers import Trainer` takes three
# times as long. Empty, it is off.
export PYTHONDONTWRITEBYTECODE :=

CHOSEN ?= -m "not nightly"
# Parts of the suite at a time, with a thread each: most of a test's time is one core's. A part takes up to 2.5 GiB.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
JOBS ?= $(shell n=$(CORES); test $$n -gt 4 && n=4; test $$n -lt 2 && n=2; echo $$n)

.PHONY: ready quickstart test test-fast nightly $(PARTS:%=part-%) check format docs wheel dist clean

ready: $(READY)

quickstart: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m hf_mps.finetune quickstart

# The long parts begin. What failed is told once more at the end, as parts print between each other's lines.
test: export TEST_LAST_WORDS := $(CURDIR)/.pytest_cache/last_words
test: $(READY)
	@rm -rf $(TEST_LAST_WORDS)
	$(MAKE) --jobs $(JOBS) --keep-going part-layer part-finetune part-others check part-runs part-kernels part-samples \
	  || { cat $(TEST_LAST_WORDS)/*.txt; exit 1; }

test-fast: $(READY)
	$(MAKE) --jobs $(JOBS) --keep-going $(PARTS:%=part-%) CHOSEN='-m "not slow and not process and not nightly"'

nightly: $(READY)
	TEST_SHARE=all $(MAKE) --jobs $(JOBS) --keep-going $(PARTS:%=part-%) CHOSEN=

$(PARTS:%=part-%): part-%: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(CHOSEN) --durations=25 $(tests-$*)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/tools/mac_types.py
	$(BUILD_DOCS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/python scripts/tools/docs.py --check
	$(BUILD_DOCS)

# --no-isolation: the builder is here already, so the pinned one builds and nothing is fetched a second time.
wheel: $(BUILDER)/.ready
	$(BUILDER)/bin/python -m build --wheel --no-isolation --outdir dist .

dist: $(BUILDER)/.ready
	$(BUILDER)/bin/python -m build --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) $(BUILDER) dist build site .pytest_cache .mypy_cache .ruff_cache

# --no-compile: Python compiles what the training imports, which is a tenth of what is installed.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --no-compile --editable .
	touch $@

$(READY): $(INSTALLED)
	$(BIN)/python $(PIP_INSTALL) --editable '.[dev]'
	touch $@

$(BUILDER)/.ready: pyproject.toml $(CONSTRAINTS)
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(BUILDER)
	$(BUILDER)/bin/python $(PIP_INSTALL) build hatchling
	touch $@
