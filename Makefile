# Two commands do all the set-up:  make demo  and  make test.  `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet

SERVERS := redis-server postgresql mariadb-server etcd-server zookeeper default-jre-headless chromium spin tcc
HEADERS := gcc pkg-config libmariadb-dev python3-dev

# Containers often forbid it; then each of the processes that run side by side compiles every test once more, in ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test check lint types layers model format bench bench-stores load servers clean interrupts faults soak sabotage mutants

help: ## This list
	@sed -n 's/^\([a-z-]*\):.*## /make \1	/p' Makefile

demo: $(VENV)/demo.stamp ## The race on SQLite and an embedded Redis: what goes wrong without locks, and what each strategy prevents
	cd example_project && ../$(BIN)/python manage.py race --orders 200 --workers 8

test: $(VENV)/test.stamp servers $(VENV)/mariadb.stamp ## All tests; as root on Debian, servers that are missing are installed first
	$(BIN)/python -m pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder

QUICK := core contract/test_memory.py scenarios/test_tie.py sqla_dlock/test_locks.py \
	$(foreach part,locks transactions fencing versions,django_dlock/test_$(part).py)
quick: $(VENV)/test.stamp ## The tests that need no server: core, memory store, and on SQLite the heart of both integrations; a minute on two cores
	DLOCK_TEST_QUICK=1 $(BIN)/python -m pytest --quiet --numprocesses 3 $(addprefix tests/,$(QUICK))

interrupts: $(VENV)/test.stamp servers ## 50,000 signal handlers that raise, at random moments; twenty minutes
	DLOCK_TEST_INTERRUPTS=25000 $(BIN)/python -m pytest -s tests/faults/test_interrupts.py

MINUTES ?= 10
SEED ?=
RESTART ?= 0
faults: $(VENV)/test.stamp servers $(VENV)/mariadb.stamp ## Random faults under a checker, for ten minutes: make faults MINUTES=10 SEED=7
	$(BIN)/python -m tests.random_faults --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

soak: MINUTES = 60
soak: $(VENV)/test.stamp servers $(VENV)/mariadb.stamp ## An hour of constant load: does anything grow? make soak MINUTES=60 RESTART=60 restarts a server every minute
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --restart-every $(RESTART)

sabotage: $(VENV)/test.stamp servers $(VENV)/mariadb.stamp ## Does the checker of the faults find what is broken on purpose? A quarter of an hour
	DLOCK_TEST_SABOTAGE=1 $(BIN)/python -m pytest tests/random_faults/test_sabotage.py

PART ?=
SAMPLE ?= 0
mutants: SEED = 1
mutants: $(VENV)/test.stamp servers $(VENV)/mariadb.stamp ## Which faults in the code do the tests notice? make mutants PART=lua SAMPLE=100 SEED=1
	$(BIN)/python -m tests.mutants $(PART) --sample $(SAMPLE) --seed $(SEED)

check: MINUTES = 2
check: SEED = 1
check: lint types layers test faults ## What the continuous integration runs

lint: $(VENV)/lint.stamp ## Style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.stamp $(VENV)/lint.stamp ## Types, strict
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

layers: $(VENV)/lint.stamp ## Who may import whom
	$(BIN)/lint-imports --no-logo

model: $(VENV)/test.stamp ## The models of fence, lease and listener, every interleaving: with spin and a C compiler, a minute
	$(BIN)/python -m pytest tests/test_model.py

format: $(VENV)/lint.stamp ## Repair what style can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/bench.stamp servers ## What dlock costs, compared with its peers and the wire: docs/benchmarks.md with its charts; twenty minutes
	$(BIN)/python -m benchmarks.run; status=$$?; $(BIN)/python -m benchmarks.report && exit $$status

load: $(VENV)/bench.stamp servers ## The shop under load on gunicorn and uvicorn, also while Redis is slow or dead: are the promises kept? Five minutes
	$(BIN)/python -m benchmarks.load

bench-stores: $(VENV)/bench.stamp servers ## Each store compared with its own peers, as tables; half an hour
	for one in etcd zookeeper redlock replicated table listing contended_replicated contended_advisory; do $(BIN)/python -m benchmarks.$$one || exit 1; done

clean: ## Remove the virtualenv and every cache
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis .nox
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Without these servers their tests are skipped, and say why; under CI=true they fail.
servers:
	@.ci/debian $(SERVERS) || test "$(CI)" != true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("dlock needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/debian python3-venv
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade 'pip>=25.1'

$(VENV)/demo.stamp $(VENV)/test.stamp $(VENV)/lint.stamp $(VENV)/bench.stamp: $(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	$(PIP) --editable . --group $*
	@touch $@

$(VENV)/mariadb.stamp: pyproject.toml | $(BIN)/python
	@.ci/debian $(HEADERS) || true
	@$(PIP) --group mariadb && touch $@ || { echo "no mysqlclient: the tests on MariaDB cannot run" >&2; test "$(CI)" != true; }
