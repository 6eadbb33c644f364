"""Run a plan: lowering to a program, the executor, and two ways of moving tensors between devices."""

from parplan.runtime.module.compiled import Compiled
from parplan.runtime.module.functional import broadcast, gather, parallel_apply, reduce, scatter

__all__ = ["Compiled", "broadcast", "gather", "parallel_apply", "reduce", "scatter"]
