# make demo     the main job on the embedded default: no broker, no service
# make test     everything: lint, types, unit, simulation, contract, integration, crash, cluster, kafka
# make bench    speed, against Spark's own state, in one run

PYTHON = .venv/bin/python
PYTEST = $(PYTHON) -m pytest

.PHONY: demo test lint fast slow bench clean

demo: .venv/base
	@$(PYTHON) examples/demo.py

test: lint fast slow

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

fast: .venv/dev
	$(PYTEST) --doctest-modules holdfast tests/unit
	$(PYTEST) tests/simulation tests/contract

slow: .venv/dev
	$(PYTEST) tests/integration tests/crash
	$(PYTEST) tests/cluster
	@scripts/maven
	$(PYTEST) tests/kafka

bench: .venv/bench
	$(PYTHON) bench/run.py

.venv/%: requirements/%.txt requirements/base.txt pyproject.toml
	@scripts/java
	@scripts/venv $*

clean:
	rm -rf .venv build state
