# Every target sets up .venv by itself; see .ci/setup.
BIN := .venv/bin

# Dependencies are compiled when first imported; without this each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-unit test-e2e lint clean setup

setup:
	@.ci/setup

demo: setup
	@$(BIN)/vllm-delta-sync demo --tp $(or $(TP),1) $(DEMO_ARGS)

test: lint test-unit test-e2e

test-unit: setup
	@$(BIN)/python -m pytest -q -m "not e2e" $(PYTEST_ARGS)

test-e2e: setup
	@$(BIN)/python -m pytest -q -m e2e $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/mypy

clean:
	rm -rf .venv .cache build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
