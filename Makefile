# make demo, make test: each sets up what it needs. An active virtual environment, or PYTHON=..., is used as it is.
ifdef PYTHON
  SETUP :=
else ifdef VIRTUAL_ENV
  PYTHON := python
  SETUP :=
else
  PYTHON := .venv/bin/python
  SETUP := .venv/ready
endif
# on Linux without an NVIDIA GPU, PyTorch's CPU build: a tenth of the download
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)
ifeq ($(shell uname -s)$(shell command -v nvidia-smi),Linux)
  CPU_TORCH := .venv/bin/python -m pip install -q torch==$(TORCH) --index-url https://download.pytorch.org/whl/cpu ||
endif

.PHONY: demo test
demo: $(SETUP)
	$(PYTHON) demo.py

test: $(if $(SETUP),.venv/ready-dev)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest

.venv/ready: requirements.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -q -r requirements.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	.venv/bin/python -m pip install -q -r requirements-dev.txt
	touch $@
