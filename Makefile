# check: style, types and import directions.  test: the default tier of the tests.  test-all: every test.
# test-torch VERSION=2.15.0: the default tier on that release of torch, in an environment under build/.
# bench: every benchmark, figures in build/bench/.
PYTHON ?= python
CODE := parplan tests benchmarks examples
BENCHMARKS := solver plans verification ddp pipelining memory published prediction towers schemes checkpoints large_start attributes fuzz soak # iopddl needs the public instances: python -m benchmarks.iopddl PATH

.PHONY: check style types imports test test-all test-torch bench

check: style types imports # `make -j2 check` runs mypy beside the others

style:
	ruff check $(CODE)
	ruff format --check $(CODE)

types:
	mypy

imports:
	lint-imports

test:
	$(PYTHON) -m pytest

test-all:
	$(PYTHON) -m pytest -m ""

test-torch: build/torch-$(VERSION)/installed
	build/torch-$(VERSION)/bin/python -m pytest

build/torch-%/installed: pyproject.toml
	$(PYTHON) -m venv build/torch-$*
	PIP_CONSTRAINT=/dev/null build/torch-$*/bin/python -m pip install --no-cache-dir -e '.[test]' 'torch==$*'
	touch $@

bench:
	mkdir -p build/bench
	set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(PYTHON) -m benchmarks.$$name --json "build/bench/$$name.json"; \
	done
