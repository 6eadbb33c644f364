"""A pattern of training code, with the result expected in every cell: launch x plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from benchmarks.training import TOLERANCE, Outcome, Script, Verdict

__all__ = ["BEYOND", "CELLS", "LAUNCHES", "PLANS", "SECOND_DERIVATIVES", "Pattern", "Section", "first_match"]

LAUNCHES = ("one", "ranks")  # two logical devices in one process; two processes under torchrun
PLANS = ("replicas", "shards", "mixed", "slices", "solver")
BEYOND = ("replays", "stages")  # plans that the page leaves out: they refuse what replicas refuse, and micro-batches
CELLS = tuple(f"{launch}/{plan}" for launch in LAUNCHES for plan in (*PLANS, *BEYOND))

SECOND_DERIVATIVES = dict.fromkeys(
    ("one/*", "ranks/shards", "ranks/mixed", "ranks/slices", "ranks/replays"), "econd derivative"
)
"""The refusals of a pattern that needs them: wherever no process has the whole model in the caller's autograd."""


@dataclass(frozen=True)
class Pattern:
    """One pattern.

    Attributes:
        name: of its script; its tests are called so.
        title: what users do, for the page.
        refused: words of the refusal, by cells ("ranks/shards", "ranks/*"); the other cells are right, and
            those with no words.
        why: the refusal's reason and what to do instead, for the page.
        free: modules that plans leave to the solver, as they cannot be cut, or are not called.
        tolerance: relative; above rounding of float64 where the pattern computes in less.
    """

    name: str
    title: str
    section: str
    script: Script
    refused: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    free: tuple[str, ...] = ()
    tolerance: float = TOLERANCE

    def words(self, cell: str) -> str | None:
        """Words of the refusal that is expected; None where the numbers have to be right."""
        return first_match(self.refused, cell) or None

    def trouble(self, cell: str, outcome: Outcome) -> str | None:
        """Why an outcome is not what is expected; None where it is."""
        if cell.endswith("/stages") and outcome.verdict is Verdict.REFUSED:
            known = ("micro-batch", *filter(None, self.refused.values()))
            if any(words in outcome.text for words in known):
                return None
        words = self.words(cell)
        wanted = Verdict.RIGHT if words is None else Verdict.REFUSED
        if outcome.verdict is wanted and (words or "") in outcome.text:
            return None
        expected = wanted.value if words is None else f"refused: {words}"
        return f"{self.name} {cell}: {outcome.verdict.value}, expected {expected}\n{outcome.text}"


def first_match(by_cells: Mapping[str, str], cell: str) -> str | None:
    """The text of the first entry whose cells ("ranks/*") include `cell`; slices and replays are refused where replicas
    are, stages where they say so."""
    if cell.endswith("/stages"):
        return by_cells.get(cell)
    cells = (cell, cell.replace("/slices", "/replicas").replace("/replays", "/replicas"))
    return next((text for one in cells for known, text in by_cells.items() if fnmatchcase(one, known)), None)


class Section:
    """Patterns under one heading; used as a decorator of their scripts."""

    def __init__(self, heading: str) -> None:
        self.heading = heading
        self._patterns: list[Pattern] = []

    def __iter__(self) -> Iterator[Pattern]:
        """The patterns in the order they were written."""
        return iter(self._patterns)

    def __call__(
        self,
        title: str,
        *,
        refused: Mapping[str, str] | None = None,
        why: str = "",
        free: tuple[str, ...] = (),
        tolerance: float = TOLERANCE,
    ) -> Callable[[Script], Script]:
        """Add a script."""

        def add(script: Script) -> Script:
            name = getattr(script, "__name__", "")
            self._patterns.append(Pattern(name, title, self.heading, script, refused or {}, why, free, tolerance))
            return script

        return add
