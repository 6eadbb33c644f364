"""Parameters and optimizer state that a plan cuts over processes, as tensors of the whole shape."""

from parplan.runtime.sharded_state import ops  # gives `ShardedTensor` its rules

__all__ = ["ops"]
