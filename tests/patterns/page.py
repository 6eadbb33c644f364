"""Writes docs/training-patterns.md from the patterns: python -m tests.patterns.page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from tests.patterns.cells import PATTERNS
from tests.patterns.known_wrong import KNOWN_WRONG
from tests.patterns.pattern import PLANS, Pattern, first_match

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training-patterns.md"

HEAD = """\
# Training code that works, and what is refused

Each line is a pattern of training code that runs in the tests, plain and compiled, for three steps or more in float64:
in one process on two logical devices, and under torchrun with two processes; with every layer that has weights in two
replicas, in two shards, half of them each, and under the solver's own plan. "Right" means that losses, parameters and
buffers are the plain run's to 1e-9 relative. "Refused" means an error of parplan's that says what to do.

Two more plans are run and not listed: replicas with every unit replayed, which are right and refused where replicas
are, and two pipeline stages with two micro-batches, which are right or refused: where this page says so of some plan,
or as one micro-batch cannot stand for the batch ([micro-batches.md](micro-batches.md)). Without a loss in the model,
stages run the whole batch at once.

The patterns are in `tests/patterns/`, which writes this page: `python -m tests.patterns.page`. All cells are run by
`python -m tests.patterns`; the tests run one plan of each per launch, and one in float32, where losses are compared to
1e-3 and states to 0.2 (`--float32`: an optimizer takes whole steps along gradients that are nothing but rounding).
"""

PROGRAMS = "Public training programs"  # the heading of the section that comes first
PROGRAMS_HEAD = """\
Programs that many people start from, written anew at small sizes with what is in them: their models, loaders, rates,
clipping, accumulation, evaluation, checkpoints, generation. Dropout is off, and what a program draws by itself in the
forward is an input here, so that numbers can be compared.
"""
WITH_TRAINERS = (
    "accelerate (`nlp_example`, `cv_example`): accumulation, clipping, `gather_for_metrics`, checkpoints",
    "Lightning: a `LightningModule` and a `Trainer` with parplan's strategy",
    "transformers `Trainer`: `train()` and `evaluate()`",
)


def page() -> str:
    """The page's text."""
    return "\n".join([HEAD, *_tables()]).rstrip() + "\n"


def _tables() -> Iterator[str]:
    for heading, patterns in groupby(PATTERNS.values(), lambda pattern: pattern.section):
        yield f"## {heading}\n"
        if heading == PROGRAMS:
            yield from _programs(patterns)
            continue
        yield "| pattern | one process | torchrun |"
        yield "| --- | --- | --- |"
        reasons = []
        for pattern in patterns:
            yield f"| {pattern.title} | {_launch(pattern, 'one')} | {_launch(pattern, 'ranks')} |"
            if pattern.why:
                reasons.append(f"- {pattern.title}: {pattern.why}")
        yield "\n" + "\n".join(reasons) + "\n" if reasons else ""


def _programs(patterns: Iterable[Pattern]) -> Iterator[str]:
    """The table of public programs; reasons are in the rows, of which some are other pages' programs."""
    yield PROGRAMS_HEAD
    yield "| program | one process | torchrun | cause and remedy |"
    yield "| --- | --- | --- | --- |"
    for pattern in patterns:
        yield f"| {pattern.title} | {_launch(pattern, 'one')} | {_launch(pattern, 'ranks')} | {pattern.why} |"
    for title in WITH_TRAINERS:
        yield f"| {title} | | right | [trainers.md](trainers.md) |"
    yield ""


def _launch(pattern: Pattern, launch: str) -> str:
    """What happens under each plan, in few words."""
    told: dict[str, list[str]] = {}
    for plan in PLANS:
        told.setdefault(_told(pattern, f"{launch}/{plan}"), []).append(plan)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{text} ({', '.join(plans)})" for text, plans in told.items())


def _told(pattern: Pattern, cell: str) -> str:
    if first_match(KNOWN_WRONG.get(pattern.name, {}), cell) is not None:
        return "not yet"
    return "right" if pattern.words(cell) is None else "refused"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
