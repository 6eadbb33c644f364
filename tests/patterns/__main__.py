"""All cells of the pattern suite: python -m tests.patterns [--only NAMES] [--cells CELLS] [--float32] [--json FILE]."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

import torch

from benchmarks.workers import Workers
from parplan.files import check_writable, write_files
from tests.patterns.cells import PATTERNS, launched
from tests.patterns.known_wrong import KNOWN_WRONG
from tests.patterns.pattern import BEYOND, LAUNCHES, PLANS, first_match


def main() -> int:
    """Run the cells and print those that are not as expected; the exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="patterns by name, with * and ?, separated by commas")
    parser.add_argument("--cells", default="*", help="cells such as one/* or ranks/shards, separated by commas")
    parser.add_argument("--json", help="write the outcomes here")
    parser.add_argument("--float32", action="store_true", help="in float32, where float64 is the rule")
    options = parser.parse_args()
    dtype = torch.float32 if options.float32 else torch.float64
    if options.json:
        check_writable(options.json, "--json")
    outcomes: dict[str, Any] = {}
    troubles = 0
    for launch in LAUNCHES:
        with Workers(2 if launch == "ranks" else 1) as workers:
            for name, cell in ((name, f"{launch}/{plan}") for name in PATTERNS for plan in (*PLANS, *BEYOND)):
                if not _among(name, options.only) or not _among(cell, options.cells):
                    continue
                outcome = launched(workers, name, cell, dtype)
                outcomes[f"{name} {cell}"] = {**asdict(outcome), "verdict": outcome.verdict.value}
                known = first_match(KNOWN_WRONG.get(name, {}), cell)
                trouble = PATTERNS[name].trouble(cell, outcome)
                if known is not None:
                    trouble = f"{name} {cell}: as expected, but listed as wrong" if trouble is None else None
                if trouble is not None:
                    troubles += 1
                    print(trouble, flush=True)
                if options.json:
                    write_files({options.json: json.dumps(outcomes, indent=1) + "\n"})
    seconds = sum(found["cpu_s"] for found in outcomes.values())
    print(f"{len(outcomes)} cells, {troubles} not as expected, {seconds:.0f} s of processor time")
    return int(troubles > 0)


def _among(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split(","))


if __name__ == "__main__":
    sys.exit(main())
