# make look, demo, test, test-all, bench, lessons: each sets up what it needs. An active virtual
# environment, or PYTHON=..., is used as it is.

# How often a thread of PyTorch looks whether the others are done before it sleeps. By the default,
# 300000, one other busy process makes training on a CPU 20 times slower (results/bench/README.md).
export GOMP_SPINCOUNT ?= 10000

ifdef PYTHON
  SETUP :=
else ifdef VIRTUAL_ENV
  PYTHON := python
  SETUP :=
else
  PYTHON := .venv/bin/python
  SETUP := .venv/ready
endif
DEV := $(if $(SETUP),.venv/ready-dev)
LESSONS := $(if $(SETUP),.venv/ready-lessons)

.PHONY: look demo test test-all bench lessons
look: $(SETUP)
	$(PYTHON) demo.py config/look.py

demo: $(SETUP)
	$(PYTHON) demo.py

bench: $(DEV)
	$(PYTHON) bench.py --peer=hf

test: $(DEV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-all: $(DEV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -n 2 --dist loadfile -m ''

lessons: $(LESSONS)
	$(PYTHON) -m pytest --tb=short lessons/test_exercises.py

.venv/ready: pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'python3 must be 3.11 or newer. With a newer one, for example: python3.12 -m venv .venv; . .venv/bin/activate; pip install ".[dev]"'; exit 1; }
	python3 -m venv .venv
	.venv/bin/python -m pip install -q .
	touch $@

.venv/ready-%: .venv/ready
	.venv/bin/python -m pip install -q '.[$*]'
	touch $@
