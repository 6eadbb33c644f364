"""T against simulated steps, and plans called OPTIMAL against all plans, on a few of the models of `benchmarks.proofs`.

The ranges are those that hold today; the benchmark prints them over hundreds of models.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.proof_cases import KINDS, drawn
from benchmarks.proof_plans import EveryPlan, is_legal, simulated_s
from benchmarks.proofs import beaten, chosen, compared
from parplan.plan import Scheme

FOLLOWING = ("chain", "conv", "lstm")
"""Kinds of models whose layers follow each other and read one value each."""
