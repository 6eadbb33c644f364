"""Optimizers of sharded parameters: their state is cut with the parameters, and saved and loaded whole.

State that an optimizer makes of a sharded parameter is sharded by itself (`zeros_like`). What was made before the
parameters were cut, or loaded from a file of whole tensors, is cut before the next step. `optimizer.state_dict()`
gathers, so that a saved state fits a plain model and any number of processes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from parplan.compat import pytree
from parplan.errors import RuntimeFailure
from parplan.lowering.program import shape_of
from parplan.runtime.compat import state_by_block
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor

__all__ = ["watch_optimizers"]

_WATCHED = "_parplan_gathers_state"


@cache
def watch_optimizers() -> None:
    """From here on, look at every optimizer with sharded parameters before its step."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardedTensor)]
    if not found:
        return
    if _WATCHED not in vars(optimizer):
        vars(optimizer)[_WATCHED] = optimizer.register_state_dict_post_hook(_gathered_state)
    for parameter in found:
        if parameter.dim():
            _cut_state(optimizer, parameter)


def _cut_state(optimizer: Optimizer, parameter: ShardedTensor) -> None:
    state = optimizer.state.get(parameter)
    if not state:
        return
    plain = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.dim() and not isinstance(v, ShardedTensor)}
    if not plain:
        return
    whole, shapes = tuple(parameter.shape), {tuple(value.shape) for value in plain.values()}
    blocks = {shape_of(block) for block in parameter.placement.blocks.values()} - {whole}
    if shapes <= blocks:
        raise RuntimeFailure(
            f"the state of {type(optimizer).__name__} for {parameter.placement.name} has shape {sorted(shapes)[0]}, "
            f"which one process holds of the parameter, whose shape is {whole}: it was saved in blocks. Load a state "
            "of whole tensors, as optimizer.state_dict() gives it (on all processes: it gathers)"
        )
    with torch.no_grad():
        state.update(
            {k: ShardedTensor.cut(v, parameter.placement) for k, v in plain.items() if tuple(v.shape) == whole}
        )


def _gathered_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state with whole tensors; every rank has to ask for it. torch.distributed.checkpoint gets them sharded."""
    if state_by_block():
        return state_dict

    def whole(tensor: Tensor) -> Tensor:
        return tensor.whole() if isinstance(tensor, ShardedTensor) else tensor

    state: dict[str, Any] = pytree.tree_map_only(Tensor, whole, state_dict["state"])
    return {**state_dict, "state": state}
