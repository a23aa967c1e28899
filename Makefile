# `make serve`, `make demo` and `make test` set up .venv first, with python3 and pip alone.

PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2-135m
QUESTION ?= What is a relay race?
# flashinfer, the attention of nodes on GPUs (extra `cuda`), is installed where there is one.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
INSTALLED = .venv/installed $(if $(HAS_GPU),.venv/installed-cuda)
PIP_INSTALL = .venv/bin/python -m pip install -c constraints.txt

.PHONY: serve demo test conformance proofs pictures
.DELETE_ON_ERROR:

serve: $(INSTALLED)
	@.venv/bin/baton serve $(MODEL) --port $(PORT)

demo: $(INSTALLED)
	@.venv/bin/baton serve $(MODEL) --port 0 --log-level warning --ask "$(QUESTION)"

test: .venv/installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile

# The faults of others on servers of its own.
conformance: .venv/installed
	.venv/bin/baton conformance

# Each with its fault put back in, which it must notice: as many starts of servers.
proofs: .venv/installed-dev
	.venv/bin/python -m pytest -n auto --maxprocesses 4 -m conformance tests/conformance/test_proofs.py

# Of the page under load, for the docs; needs Chromium and a quiet machine.
pictures: .venv/installed-dev
	.venv/bin/python -m tests.web.screenshots

# The stamp is removed before anything is changed: a set-up that was interrupted starts over from nothing.
.venv/installed: pyproject.toml constraints.txt
	test -e $@ || $(PYTHON) -m venv --clear .venv
	rm -f $@
	$(PIP_INSTALL) -e .
	touch $@

.venv/installed-cuda: .venv/installed
	$(PIP_INSTALL) -e ".[cuda]"
	touch $@

.venv/installed-dev: $(INSTALLED)
	$(PIP_INSTALL) -e ".[dev]"
	touch $@
