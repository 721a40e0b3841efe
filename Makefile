python := .venv/bin/python

# What a version of torch can break: its pipelines, and the laws that every layout keeps.
torch_tests := $(addprefix tests/test_, $(addsuffix .py, schedules graph graph_laws graph_pipeline exactness reducer \
    planted_bugs recompute memory halves live resume))

.PHONY: setup test test-full test-torch mutants lint clean

setup:
	@sh setup.sh

test: setup
	@$(python) -m pytest -q

test-full: setup
	@$(python) -m pytest -q -m ""

test-torch:
	@test -n "$(VERSION)" || { echo "error: VERSION is missing; give make test-torch VERSION=2.11, or newest" >&2; exit 2; }
	@sh setup.sh $(VERSION)
	@.venv-torch-$(VERSION)/bin/python -c 'import torch; print("torch", torch.__version__)'
	@.venv-torch-$(VERSION)/bin/python -m pytest -q $(torch_tests)

SEED ?= 0
mutants: setup
	@$(python) tests/mutants.py --seed $(SEED)

lint: setup
	@$(python) -m ruff check .
	@$(python) -m ruff format --check --quiet .
	@$(python) -m mypy

clean:
	rm -rf .venv .venv-torch-* build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
