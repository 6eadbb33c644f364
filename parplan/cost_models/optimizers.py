"""Memory of torch's optimizers: state beside every parameter, and temporaries of its update.

On the CPU they update one parameter after the other, on CUDA all at once (`foreach`), where every temporary is as large
as all parameters together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.errors import ParplanError

__all__ = ["OPTIMIZER_MEMORY", "OptimizerMemory", "optimizer_memory"]


@dataclass(frozen=True)
class OptimizerMemory:
    """In tensors of a parameter's size and type.

    Args:
        states: kept between steps.
        one_by_one: temporaries of the update where parameters follow each other.
        together: temporaries of the update where all are updated at once.
    """

    states: int
    one_by_one: int = 0
    together: int = 0


# Counted in torch/optim (2.13): `_single_tensor_*` and `_multi_tensor_*`, without weight decay.
OPTIMIZER_MEMORY: Mapping[str, OptimizerMemory] = {
    "sgd": OptimizerMemory(0),
    "momentum": OptimizerMemory(1),
    "rmsprop": OptimizerMemory(1, 1, 1),
    "adagrad": OptimizerMemory(1, 1, 2),
    "adam": OptimizerMemory(2, 2, 1),
    "adamw": OptimizerMemory(2, 2, 1),
}


def optimizer_memory(optimizer: str) -> OptimizerMemory:
    """State and temporaries of `optimizer`: a name, or the number of tensors it keeps per parameter ("3").

    Of an optimizer given by number the update is taken to need what Adam's does.

    Raises:
        ParplanError: unknown optimizer; the text lists those known.
    """
    if optimizer.isdecimal():
        adam = OPTIMIZER_MEMORY["adam"]
        return OptimizerMemory(int(optimizer), adam.one_by_one, adam.together)
    if optimizer not in OPTIMIZER_MEMORY:
        known = ", ".join(OPTIMIZER_MEMORY)
        raise ParplanError(
            f"the state of optimizer {optimizer!r} is not known; use the closest of {known}, "
            "or the number of tensors it keeps per parameter"
        )
    return OPTIMIZER_MEMORY[optimizer]
