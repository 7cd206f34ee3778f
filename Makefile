# make demo, make test, make bench: each sets up what it needs. An active virtual environment, or PYTHON=..., is used as it is.
ifdef PYTHON
  SETUP :=
else ifdef VIRTUAL_ENV
  PYTHON := python
  SETUP :=
else
  PYTHON := .venv/bin/python
  SETUP := .venv/ready
endif

.PHONY: demo test bench
demo: $(SETUP)
	$(PYTHON) demo.py

bench: $(if $(SETUP),.venv/ready-dev)
	$(PYTHON) bench.py --peer=hf

test: $(if $(SETUP),.venv/ready-dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest

.venv/ready: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'python3 must be 3.11 or newer: make PYTHON=...'; exit 1; }
	python3 -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@
