"""Runs one pattern in one cell; the processes that do so import this module."""

from __future__ import annotations

import torch

from benchmarks.training import Outcome, Run, judge
from benchmarks.workers import Workers
from tests.patterns import (
    attributes,
    checkpoints,
    custom_autograd,
    data,
    loops,
    models,
    modules,
    optimizers,
    precision,
    programs_agents,
    programs_generation,
    programs_language,
    programs_loops,
    programs_same_inputs,
    programs_science,
    programs_sequences,
    programs_signals,
    programs_state,
    programs_vision,
    public_diffusion,
    public_generation,
    public_graphs,
    public_language,
    public_schemes,
    public_science,
    public_text,
    public_vision,
    second_round,
)  # fmt: skip
from tests.patterns.pattern import Pattern

__all__ = ["PATTERNS", "SECTIONS", "launched", "run_cell"]

SECTIONS = (
    public_language.SECTION, public_text.SECTION, public_vision.SECTION,
    public_generation.SECTION, public_diffusion.SECTION,
    public_science.SECTION, public_graphs.SECTION, public_schemes.SECTION,
    loops.SECTION, optimizers.SECTION, checkpoints.SECTION, models.SECTION, data.SECTION, modules.SECTION,
    attributes.SECTION, custom_autograd.SECTION, precision.SECTION, second_round.SECTION,
    programs_generation.SECTION, programs_vision.SECTION,
    programs_agents.SECTION, programs_loops.SECTION,
    programs_language.SECTION, programs_sequences.SECTION, programs_science.SECTION, programs_signals.SECTION,
    programs_state.SECTION, programs_same_inputs.SECTION,
)  # fmt: skip

PATTERNS: dict[str, Pattern] = {pattern.name: pattern for section in SECTIONS for pattern in section}


def launched(workers: Workers, name: str, cell: str, dtype: torch.dtype = torch.float64) -> Outcome:
    """Run one pattern in one cell, on workers of its launch."""
    return workers.run(run_cell, name, cell.split("/")[1], dtype)


def run_cell(rank: int, ranks: int, name: str, plan: str, dtype: torch.dtype) -> Outcome:
    """One pattern under one plan, in this process or as one rank of a group."""
    pattern = PATTERNS[name]
    run = Run(rank, ranks, compiled=True, plan=plan, free=pattern.free)
    return judge(pattern.script, run, pattern.tolerance, dtype)
