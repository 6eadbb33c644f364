"""parplan plans any PyTorch model over several devices, proves the plan, explains it, and runs it.

parplan analyze model.py --gpus 4        # the report
model = parplan.compile(model)           # the running plan
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parplan.api import analyze, compile, verify
    from parplan.cluster import Cluster
    from parplan.errors import ParplanError
    from parplan.graph.user_code.module_hooks import whole
    from parplan.plan import Plan
    from parplan.runtime.data import PlanSampler, shard_dataset
    from parplan.runtime.module.checkpoints import load_checkpoint, save_checkpoint
    from parplan.runtime.module.data_parallel import data_parallel
    from parplan.runtime.module.save_on_signal import save_on_signal

__all__ = [
    "Cluster", "ParplanError", "Plan", "PlanSampler", "__version__", "analyze", "compile", "data_parallel",
    "load_checkpoint", "save_checkpoint", "save_on_signal", "shard_dataset", "verify", "whole",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "parplan.cluster",
    "ParplanError": "parplan.errors",
    "Plan": "parplan.plan",
    "PlanSampler": "parplan.runtime.data",
    "analyze": "parplan.api",
    "compile": "parplan.api",
    "data_parallel": "parplan.runtime.module.data_parallel",
    "load_checkpoint": "parplan.runtime.module.checkpoints",
    "save_checkpoint": "parplan.runtime.module.checkpoints",
    "save_on_signal": "parplan.runtime.module.save_on_signal",
    "shard_dataset": "parplan.runtime.data",
    "verify": "parplan.api",
    "whole": "parplan.graph.user_code.module_hooks",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that importing parplan costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'parplan' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
