# make demo         the main job on the embedded default: no broker, no service
# make demo-kafka   running totals from topic to topic, on a broker that it starts by itself
# make test         everything: lint, types, unit, simulation, contract, faults, integration, crash, cluster, object stores, kafka
# make soak         random faults under load: MINUTES=10, and SEED= to repeat one
# make bench        speed, against Spark's own state and Quix Streams, in one run

PYTHON = .venv/bin/python
PYTEST = $(PYTHON) -m pytest

.PHONY: demo demo-kafka test lint fast slow soak bench clean

demo: .venv/base
	@$(PYTHON) examples/demo.py

demo-kafka: .venv/kafka
	@scripts/maven
	@$(PYTHON) tests/kafka/broker.py examples/kafka_totals.py

test: lint fast slow

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

fast: .venv/dev
	$(PYTEST) --doctest-modules holdfast tests/unit
	@scripts/versitygw
	$(PYTEST) -n 2 --dist worksteal tests/simulation tests/contract

slow: .venv/dev
	$(PYTEST) -n 3 --dist loadfile tests/integration
	$(PYTEST) tests/cluster
	$(PYTEST) -n 3 --dist worksteal tests/crash
	$(PYTEST) -n 3 --dist worksteal tests/faults
	@scripts/versitygw
	$(PYTEST) -n 3 --dist worksteal tests/objects
	@scripts/maven
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
