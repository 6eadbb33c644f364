"""Checkpoints between plans: saved under one plan and number of processes, continued under another, in float64.

    python -m benchmarks.checkpoints [--json FILE] [--resume] [--route torch.save] [--optimizer sgd]

{plain, data parallel, hybrid, sharded, slices, stages} x {1, 2, 4 processes} save, each of them loads what each saved,
by `torch.save`, `parplan.save_checkpoint` and `torch.distributed.checkpoint`, with SGD with momentum and AdamW: 1944
cells. A cell passes where the next three losses, and the state after them, are those of plain training that never
stopped, within 1e-9. In every second cell the loading model has run a step before. With `--resume`, cells that passed
in FILE are not run again. Exit 1 on a difference.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from parplan.runtime.processes import in_processes
from tests.runtime.checkpoint_cells import OPTIMIZERS, PLANS, PROCESSES, ROUTES, Cell, Setup, read, write


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the largest relative difference, or the error's last line."""

    difference: float | None
    error: str = ""


def main() -> None:
    """Print one line per cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--resume", action="store_true", help="keep what passed in the file of --json")
    parser.add_argument("--route", choices=ROUTES)
    parser.add_argument("--optimizer", choices=OPTIMIZERS)
    arguments = parser.parse_args()
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.resume and arguments.json.exists():
        rows = {row["cell"]: row for row in json.loads(arguments.json.read_text(encoding="utf-8")) if row["passed"]}
    wanted = [
        cell
        for cell in cells()
        if arguments.route in (None, cell.route) and arguments.optimizer in (None, cell.optimizer)
    ]
    waiting = [cell for cell in wanted if str(cell) not in rows]
    with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
        for ranks in PROCESSES:
            sources = {cell.place(Path(folder)): cell for cell in waiting if cell.source.processes == ranks}
            in_processes(ranks, partial(_write, tuple(sources.values()), Path(folder)))
        for setup, route, optimizer in product(SETUPS, ROUTES, OPTIMIZERS):
            group = [c for c in waiting if (c.target, c.route, c.optimizer) == (setup, route, optimizer)]
            while group:
                ended = in_processes(setup.processes, partial(_read, tuple(group), Path(folder)))[0]
                for cell, outcome in zip(group, ended, strict=False):
                    rows[str(cell)] = {"cell": str(cell), "passed": not outcome.error, **vars(outcome)}
                    shown = outcome.error if outcome.difference is None else f"{outcome.difference:.1e}"
                    print(f"{cell!s:60} {shown}", flush=True)
                group = group[len(ended) :]
                if arguments.json:
                    arguments.json.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    passed = sum(rows[str(cell)]["passed"] for cell in wanted)
    print(f"{passed} of {len(wanted)} within the tolerance")
    sys.exit(0 if passed == len(wanted) else 1)


SETUPS = tuple(Setup(plan, ranks) for plan, ranks in product(PLANS, PROCESSES))


def cells() -> list[Cell]:
    """The matrix; among the cells of every route and optimizer, half run a step before they load."""
    every = enumerate(product(SETUPS, SETUPS, OPTIMIZERS, ROUTES))
    each = len(OPTIMIZERS) * len(ROUTES)
    return [Cell(a, b, name, route, bool((n + n // each) % 2)) for n, (a, b, name, route) in every]


def _write(cells: Sequence[Cell], folder: Path, rank: int, ranks: int) -> None:
    for cell in cells:
        write(cell, folder, rank, ranks)


def _read(cells: Sequence[Cell], folder: Path, rank: int, ranks: int) -> list[Outcome]:
    """The cells' outcomes, up to the first that fails: after an error ranks may be out of step."""
    ended: list[Outcome] = []
    for cell in cells:
        try:
            ended.append(Outcome(read(cell, folder, rank, ranks)))
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return [*ended, Outcome(None, f"{type(error).__name__}: {lines[-1]}")]
    return ended


if __name__ == "__main__":
    main()
