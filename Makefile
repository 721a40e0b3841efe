python := .venv/bin/python

.PHONY: setup test test-full lint clean

setup:
	@sh setup.sh

test: setup
	@$(python) -m pytest -q

test-full: setup
	@$(python) -m pytest -q -m ""

lint: setup
	@$(python) -m ruff check .
	@$(python) -m mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
