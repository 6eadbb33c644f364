"""Runs a plan: captured graphs and their programs, the executor, transports, measurement and the self-check."""

from parplan.runtime.module.compiled import Compiled
from parplan.runtime.module.functional import broadcast, gather, parallel_apply, reduce, scatter

__all__ = ["Compiled", "broadcast", "gather", "parallel_apply", "reduce", "scatter"]
