"""Gradients of terms of the loss that use a parameter directly, averaged over processes as the model's own are.

A program's gradients are those of the mean of all processes' losses. A term beside it (a penalty, a call of the plain
module) is computed by each process for itself, so that its gradient is the process's own. Programs take parameters as
aliases, whose backward marks the sum of the programs' gradients; a hook on the parameter lets marked gradients pass and
averages all others. A step without such terms sends nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from parplan.errors import RuntimeFailure
from parplan.runtime.compat import writes
from parplan.runtime.sharded_state.block_placement import Placement, TaggedCollectives
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor

__all__ = ["OutsideGradients", "ParameterAliases", "averaged"]


class _Aliases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        for gradient in gradients:
            if gradient is not None:
                # Autograd may add another term in place, to this very tensor.
                gradient.writes_when_marked = writes(gradient)
        return gradients


class ParameterAliases:
    """Parameters as programs take them; sharded ones as they are, for their gradients are the same on all processes.

    Attributes:
        tensors: in the order of the parameters.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        plain = [parameter for parameter in parameters if not isinstance(parameter, ShardedTensor)]
        made = iter(_Aliases.apply(*plain) if plain else ())  # type: ignore[no-untyped-call]
        self.tensors = [p if isinstance(p, ShardedTensor) else next(made) for p in parameters]

    @staticmethod
    def shared(parameters: Sequence[Tensor]) -> ParameterAliases:
        """Those of calls whose backward may still come, whatever program they ran, else new ones.

        One backward of several calls adds up their gradients, and the mark is of the sum: of calls with programs of
        their own, as for another number of samples, which other processes need not have.
        """
        key = tuple(map(id, parameters))  # of tensors that aliases keep alive
        known = _ALIVE.get(key)
        if known is None:
            known = _ALIVE[key] = ParameterAliases(parameters)
        return known


_ALIVE: WeakValueDictionary[tuple[int, ...], ParameterAliases] = WeakValueDictionary()


def averaged(tag: str, gradient: Tensor, collectives: TaggedCollectives) -> Tensor:
    """The mean over processes of a gradient; itself, with its graph, where it is to be differentiated again.

    Raises:
        RuntimeFailure: it is, and differs between processes.
    """
    mean = collectives.mean(tag, gradient.detach())
    if not gradient.requires_grad:
        return mean
    same = torch.allclose(mean, gradient, rtol=16 * torch.finfo(mean.dtype).eps, atol=0, equal_nan=True)
    if not bool(collectives.exchange(f"comparing {tag}", [float(same)]).all()):
        raise RuntimeFailure(
            f"{tag} differs between processes and is to be differentiated again (create_graph=True), which their mean "
            "cannot be; make the term the same on all processes"
        )
    return gradient


@dataclass(frozen=True)
class OutsideGradients:
    """A gradient hook that averages whatever was not computed by programs alone, and cuts it as the parameter is.

    Args:
        name: the parameter's dotted name.
        collectives: over the processes that train it.
        placement: of a parameter that is cut over processes.
    """

    name: str
    collectives: TaggedCollectives
    placement: Placement | None

    @staticmethod
    def watch(name: str, parameter: nn.Parameter, collectives: TaggedCollectives) -> None:
        """Hook a parameter, once, in front of the user's own hooks; anew when it has been cut since."""
        hooks: Any = parameter._backward_hooks
        placement = parameter.placement if isinstance(parameter, ShardedTensor) else None
        watching = OutsideGradients(name, collectives, placement)
        for key, hook in (hooks or {}).items():
            if isinstance(hook, OutsideGradients):
                if hook.placement is not placement:
                    hooks[key] = watching
                return
        trained = parameter.requires_grad
        trainable = parameter.is_floating_point() or parameter.is_complex()
        if not trainable or parameter.is_inference():
            return
        handle = parameter.requires_grad_().register_hook(watching)
        parameter.requires_grad_(trained)
        hooks = parameter._backward_hooks
        hooks.move_to_end(handle.id, last=False)

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or getattr(gradient, "writes_when_marked", None) == writes(gradient):
            return None  # nothing to change
        if isinstance(gradient, ShardedTensor):
            if self.placement is not None and gradient.placement.same(self.placement):
                return None  # each term was averaged where it met the blocks (ops.py)
            gradient = gradient.whole()
        tag = f"the gradient of {self.name} from outside the compiled model"
        mean = averaged(tag, gradient.to_dense(), self.collectives)
        if self.placement is None:
            return mean
        if gradient.requires_grad:
            raise RuntimeFailure(
                f"{tag} is to be differentiated again (create_graph=True), and the parameter is cut over processes; "
                "pin its layer to replicas, or compute that term with a plain model"
            )
        return ShardedTensor.cut(mean, self.placement)
