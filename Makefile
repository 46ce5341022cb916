# Needs only Python >= 3.11 and git: every target makes .venv with what it uses.
PYTHON ?= python3
BIN := .venv/bin
SIZE ?= 3
SEEDS ?= 500
JOBS ?= 2
RUNTIME := .venv/.runtime
VENV := .venv/.installed
CLIENTS := .venv/foreign/.clients
FOREIGN := .venv/foreign/.installed

# On one line, and in words that every Python can read.
OLD := raftkv needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit("$(OLD)" % sys.version_info[:2])

# Tests start Python a thousand times: where this is set (in images for containers), each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: cluster foreign test test-all verify fix proto sim sim-training bench clean

cluster: $(RUNTIME)  ## three members on loopback with a live status table
	$(BIN)/raftkv cluster --size $(SIZE)

foreign: $(FOREIGN)  ## other people's clients, for the tests: each in an environment of its own, exact versions

test: $(VENV) $(CLIENTS)  ## the tests, on two cores, without those that take long
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-all: $(VENV) $(FOREIGN)  ## the tests that `make test` leaves out: long storms, all seeds, every foreign client
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

verify: $(VENV)  ## format, lint, types, generated code current; writes nothing
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy && $(BIN)/python proto/compile.py --check

fix: $(VENV)  ## format and repair what can be repaired
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

proto: $(VENV)  ## compile proto/ into raftkv/pb
	$(BIN)/python proto/compile.py

sim: $(VENV)  ## SEED=n replays one seed of the simulator, SEEDS=n runs many
	$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS) --jobs $(JOBS))

sim-training: $(VENV)  ## the rendezvous in its simulator: SEED=n replays one, SEEDS=n runs many
	$(BIN)/python -m tests.training.sim $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS) --jobs $(JOBS))

bench: $(VENV)  ## raftkv beside real etcd in one run: bench/results.json, plot, table in docs/performance.md
	$(BIN)/pip install -q -e '.[bench]' && $(BIN)/python -m bench.compare

clean:  ## everything that can be made again
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis cluster-data bench/data jepsen/runs
	find . -name __pycache__ -prune -exec rm -rf {} +

# What raftkv itself needs. An environment that an older Python or a failure has left is made anew. The machine's own pip
# fills it, if there is one: to install a pip first takes as long as all the rest.
$(RUNTIME): setup.py
	@$(PYTHON) -c '$(CHECK)'
	@$(BIN)/python -c '$(CHECK)' 2>/dev/null \
	  || { rm -rf .venv && $(PYTHON) -m venv --without-pip .venv; } || { rm -rf .venv; exit 1; }
	@$(PYTHON) -c 'import pip' 2>/dev/null || $(BIN)/python -m ensurepip >/dev/null || { rm -rf .venv; exit 1; }
	@if $(PYTHON) -c 'import pip' 2>/dev/null; then pip="$(PYTHON) -m pip --python .venv"; else pip=$(BIN)/pip3; fi; \
	  set -x; $$pip install -q -e . && touch $@

$(VENV): $(RUNTIME) pyproject.toml  # and what its development needs
	$(BIN)/python -m ensurepip --default-pip >/dev/null && $(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[dev,dev-torch]'
	$(BIN)/pip install -q --no-deps --target .venv/protobuf-4.25 'protobuf==4.25.*' && touch $@  # oldest runtime supported

$(CLIENTS): tests/foreign/environments.py $(wildcard tests/foreign/packages/*) | $(VENV)
	$(BIN)/python -m tests.foreign.environments clients && touch $@

$(FOREIGN): tests/foreign/environments.py $(wildcard tests/foreign/packages/*) | $(VENV)
	$(BIN)/python -m tests.foreign.environments && touch $@
