# check: style, types and import directions.  test: the test suite.  bench: every benchmark, figures in build/bench/.
PYTHON ?= python
CODE := parplan tests benchmarks examples
BENCHMARKS := solver plans verification ddp memory published prediction towers schemes checkpoints attributes fuzz # iopddl needs the public instances: python -m benchmarks.iopddl PATH

.PHONY: check test bench

check:
	ruff check $(CODE)
	ruff format --check $(CODE)
	mypy
	lint-imports

test:
	$(PYTHON) -m pytest

bench:
	mkdir -p build/bench
	set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(PYTHON) -m benchmarks.$$name --json "build/bench/$$name.json"; \
	done
