"""A call that a device computed alone and the next one may repeat: then its program runs at once, and nothing is looked
up.

Most calls of a training have the same sizes and modes. All that a call is asked for (calls.py, programs/captures.py) is
compared with what is known of the one before; where anything differs it takes the way of every call.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from parplan.compat import in_functional_transform
from parplan.runtime.calls import ModelCall
from parplan.runtime.execution.executor import Executor
from parplan.runtime.programs.captures import Captures
from parplan.runtime.programs.program_cache import Captured

__all__ = ["RepeatedCall"]


@dataclass(frozen=True)
class RepeatedCall:
    """A call that ran.

    Args:
        call: without its tensors, which it would keep alive.
        names: of its keyword arguments.
        tensors: shape, type and whether it takes gradients, of each argument.
        modes: those in which it was captured.
    """

    call: ModelCall
    captured: Captured
    executor: Executor
    names: tuple[str, ...]
    tensors: Sequence[tuple[torch.Size, torch.dtype, bool]]
    modes: Hashable

    @staticmethod
    def of(
        call: ModelCall, names: tuple[str, ...], captured: Captured, executor: Executor, captures: Captures
    ) -> RepeatedCall | None:
        """A call to be compared with; None where every call has to be looked at: an argument is no tensor, or its
        values matter, random numbers are drawn for the call, processes tell each other of it, or devices exchange
        values."""
        graph, seeded, programs = captured.graph, captured.seeded, captures.programs
        cuts = programs.sharding is not None and programs.sharding.cuts
        if executor.transport.processes > 1 and (captured.exchanges or cuts or programs.sync is not None):
            return None
        tensors = all(type(leaf) is Tensor for leaf in call.leaves) and len(call.leaves) == len(graph.user_inputs)
        if not tensors or graph.checks or seeded.any or seeded.apart or executor.local_forward is None:
            return None
        known = [(leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in call.leaves]
        modes = captures.modes(graph.training)
        return RepeatedCall(replace(call, leaves=()), captured, executor, names, known, modes)

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], captures: Captures) -> dict[str, Tensor] | None:
        """The program's inputs in a call that repeats this one; None for another call."""
        given = (*args, *kwargs.values())
        if len(given) != len(self.tensors) or tuple(kwargs) != self.names or in_functional_transform():
            return None
        for tensor, (shape, dtype, requires_grad) in zip(given, self.tensors, strict=True):
            if type(tensor) is not Tensor or tensor.shape != shape or tensor.dtype is not dtype:
                return None
            if tensor.requires_grad is not requires_grad or tensor.layout is not torch.strided:
                return None
            if unpack_dual(tensor).tangent is not None:
                return None
        if not captures.still(self.captured.graph, self.modes):
            return None
        return {name: tensor for name, tensor in zip(self.captured.graph.user_inputs, given, strict=True) if name}
