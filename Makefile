# check: style, types and import directions.  test: the test suite.  bench: every benchmark, figures in build/bench/.
PYTHON ?= python
CODE := parplan tests benchmarks examples

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
	set -e; for file in benchmarks/*.py; do \
		[ -e "$$file" ] || continue; \
		echo "== $$file"; \
		$(PYTHON) "$$file" --json "build/bench/$$(basename "$$file" .py).json"; \
	done
