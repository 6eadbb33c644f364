"""Many cases of one check as one test: all of them run, and those that fail are named."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

__all__ = ["every_case", "run_all", "seed_all"]

SEED = 20140423
MOST_TOLD = 20
_FAILED = pytest.fail.Exception  # as pytest.raises ends, which is no Exception


def seed_all() -> None:
    """The random state that every test, and every case of one, starts from."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def run_all(checks: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Run checks by name, each from the same random state.

    Raises:
        AssertionError: some failed; their names and reasons.
    """
    failed, count = dict[str, BaseException](), 0
    for name, check in checks:
        count += 1
        seed_all()
        try:
            check()
        except (Exception, _FAILED) as error:
            failed[name] = error
    assert count, "no case to check"
    if failed:
        texts = [f"{name}: {type(error).__name__}: {error}" for name, error in failed.items()]
        more = f"\nand {len(texts) - MOST_TOLD} more" if len(texts) > MOST_TOLD else ""
        text = f"{len(failed)} of {count} cases failed\n" + "\n".join(texts[:MOST_TOLD]) + more
        raise AssertionError(text) from next(iter(failed.values()))


def every_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], object] | Sequence[object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test: a list of hundreds of entries is one line of a report.

    For checks of entries of a table, which share no state: what fixtures give is the same for all of them.
    """
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [(case,) if len(wanted) == 1 else tuple(case) for case in cases]
    assert all(len(row) == len(wanted) for row in rows), f"not every case has {names}"

    def told(number: int, row: Sequence[Any]) -> str:
        if ids is None:
            return ", ".join(f"{name}={value!r}"[:200] for name, value in zip(wanted, row, strict=True))
        return ", ".join(str(ids(value)) for value in row) if callable(ids) else str(ids[number])

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_all(
                (told(number, row), functools.partial(test, **fixtures, **dict(zip(wanted, row, strict=True))))
                for number, row in enumerate(rows)
            )

        own = inspect.signature(test)
        rest = [parameter for name, parameter in own.parameters.items() if name not in wanted]
        run.__signature__ = own.replace(parameters=rest)  # type: ignore[attr-defined]  # which fixtures pytest gives
        return run

    return decorate
