"""Signatures list the multiplicities that rows can have together, and nothing beyond them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.instances import chain, random_problem
from benchmarks.steps import on_blocks
from parplan.planner.solver.problem import Problem
from parplan.planner.solver.reductions.normal import normalise
from parplan.planner.solver.reductions.signatures import Signatures
from parplan.planner.solver.rows import RowTable, row_table


def _all(table: RowTable, place: dict[int, int]) -> set[tuple[float, ...]]:
    """Every sum of one selection per maximum with a weight."""
    result = {(0.0,) * (1 + max(place.values()))}
    for top in table.tops:
        lines = set()
        for line in table.all_multiplicities(top):
            total = [0.0] * (1 + max(place.values()))
            for row, group in place.items():
                total[group] += line[row]
            lines.add(tuple(total))
        result = {tuple(a + b for a, b in zip(s, t, strict=True)) for s in result for t in lines}
    return result


def _compared(problem: Problem, rng: np.random.Generator) -> bool:
    table = row_table(problem)
    counts = table.selections()
    if not table.tops or np.prod([counts[top] for top in table.tops]) > 20_000:
        return False
    rows = sorted(rng.choice(len(table.owner), min(len(table.owner), 4), replace=False).tolist())
    place = {row: i // 2 if rng.random() < 0.3 else i for i, row in enumerate(rows)}
    groups = {group: i for i, group in enumerate(sorted(set(place.values())))}
    place = {row: groups[group] for row, group in place.items()}
    found = Signatures(table).of(place)
    if found is None:
        return False
    # Where a maximum is used twice each use may select for itself: all between selections, so none is larger.
    truth = _all(table, place)
    assert set(found) >= truth
    for direction in rng.normal(size=(10, len(groups))):
        assert (np.array(found) @ direction).max() == pytest.approx((np.array(list(truth)) @ direction).max())
    return True


@pytest.mark.full
def test_of_any_maxima() -> None:
    compared = 0
    for draw in range(300):
        rng = np.random.default_rng([41, draw])
        problem = random_problem(rng)
        compared += _compared(problem, rng) + _compared(normalise(problem).problem, rng)
    assert compared > 200


def test_of_chains_per_device() -> None:
    problem = normalise(on_blocks(chain(6, 1), 4, 1)).problem
    rng = np.random.default_rng(0)
    assert all(_compared(problem, rng) for _ in range(40))


def test_none_where_they_are_too_many() -> None:
    problem = on_blocks(chain(3, 1), 2, 1)
    maxima = tuple(replace(maximum, weight=1.0 + i) for i, maximum in enumerate(problem.maxima))
    many = replace(problem, maxima=maxima)
    table = row_table(many)
    assert Signatures(table).of({row: row for row in range(len(table.owner))}) is None
