# make demo         the main job on the embedded default: no broker, no service
# make demo-kafka   running totals from topic to topic, on a broker that it starts by itself
# make test         everything: lint, types, unit, simulation, contract, faults, integration, crash, cluster, object stores, kafka
# make soak         random faults under load: MINUTES=10, and SEED= to repeat one
# make bench        speed, against Spark's own state and Quix Streams, in one run

PYTHON = .venv/bin/python
PYTEST = $(PYTHON) -m pytest
SUITES = @$(MAKE) --no-print-directory

.PHONY: demo demo-kafka test lint servers unit simulation integration crash cluster faults objects kafka soak bench clean

demo: .venv/base
	@$(PYTHON) examples/demo.py

demo-kafka: .venv/kafka
	@scripts/maven
	@$(PYTHON) tests/kafka/broker.py examples/kafka_totals.py

# What leaves a core idle runs beside something else that does.
test: .venv/dev
	$(SUITES) -j 2 --output-sync=target servers lint unit
	$(SUITES) simulation integration crash cluster faults objects kafka

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# What object stores and Kafka are tested with.
servers: .venv/dev
	@scripts/versitygw
	@scripts/maven
	@$(PYTHON) tests/kafka/broker.py fetch

unit: .venv/dev
	$(PYTEST) --doctest-modules holdfast tests/unit

simulation: servers
	$(PYTEST) -n 2 --dist worksteal tests/simulation tests/contract

integration: .venv/dev
	$(PYTEST) -n 3 --dist loadfile tests/integration

crash: .venv/dev
	$(PYTEST) -n 3 --dist worksteal tests/crash

cluster: .venv/dev
	$(PYTEST) tests/cluster

faults: .venv/dev
	$(PYTEST) -n 3 --dist worksteal tests/faults

objects: servers
	$(PYTEST) -n 3 --dist worksteal tests/objects

kafka: servers
	$(PYTEST) -n 3 --dist loadfile tests/kafka --ignore=tests/kafka/crash
	$(PYTEST) -n 3 --dist worksteal tests/kafka/crash

MINUTES = 10

soak: .venv/dev
	@$(PYTHON) tests/faults/soak.py $(MINUTES) $(SEED)

bench: .venv/bench .venv-quix/quix
	@scripts/maven
	$(PYTHON) bench/run.py

.venv/%: requirements/%.txt requirements/base.txt pyproject.toml
	@scripts/java
	@scripts/venv $*

.venv-quix/quix: requirements/quix.txt | .venv/bench
	@echo "installing the packages of $<"
	@python3 -m venv .venv-quix
	@.venv-quix/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

clean:
	rm -rf .venv .venv-quix build state
