# check: style, types and import directions.  test: the default tier of the tests.  test-all: every test.
# bench: every benchmark, figures in build/bench/.
PYTHON ?= python
CODE := parplan tests benchmarks examples
BENCHMARKS := solver plans verification ddp memory published prediction towers schemes checkpoints attributes fuzz # iopddl needs the public instances: python -m benchmarks.iopddl PATH

.PHONY: check test test-all bench

check:
	ruff check $(CODE)
	ruff format --check $(CODE)
	mypy
	lint-imports

test:
	$(PYTHON) -m pytest

test-all:
	$(PYTHON) -m pytest -m ""

bench:
	mkdir -p build/bench
	set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(PYTHON) -m benchmarks.$$name --json "build/bench/$$name.json"; \
	done
