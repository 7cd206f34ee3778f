# make look, demo, real, test, test-all, lessons: each sets up what it needs in .venv. An active
# virtual environment, or PYTHON=..., is used as it is, but tools that it lacks are installed there.

ifdef PYTHON
  SETUP :=
else ifdef VIRTUAL_ENV
  PYTHON := python
  SETUP :=
else
  PYTHON := .venv/bin/python
  SETUP := .venv/ready
endif
# $(call need,MODULE,EXTRA): where the module is missing, install the project and this extra
need = @$(PYTHON) -c 'import matplotlib, tiktoken, $(1)' 2> /dev/null || $(PYTHON) -m pip install -q '.$(2)'

.PHONY: look demo real test test-all lessons
look: $(SETUP)
	$(call need,torch)
	$(PYTHON) demo.py config/look.py

demo: $(SETUP)
	$(call need,torch)
	PYTHON=$(PYTHON) bash results/past_L/demo.sh

real: $(SETUP)
	$(call need,gguf,[gguf])
	PYTHON=$(PYTHON) sh extras/real.sh

test: $(SETUP)
	$(call need,xdist,[dev])
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -n 2 --dist loadfile

test-all: $(SETUP)
	$(call need,xdist,[dev])
	$(PYTHON) -m ruff check .
	$(PYTHON) -m pytest -n 2 --dist loadfile -m ''

lessons: $(SETUP)
	$(call need,jupyterlab; import pytest,[lessons])
	$(PYTHON) -m pytest --tb=short lessons/test_exercises.py

.venv/ready: pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'python3 must be 3.11 or newer. With a newer one, for example: python3.12 -m venv .venv; . .venv/bin/activate; pip install ".[dev]"'; exit 1; }
	python3 -m venv .venv
	.venv/bin/python -m pip install -q .
	touch $@
