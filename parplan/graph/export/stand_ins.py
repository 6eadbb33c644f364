"""Stand-ins for a model's parameters while it is captured.

torch.export keeps weak references to the parameters that it saw, and a parameter with weak references can no longer be
turned into a sharded one in place. So it sees others: aliases that share the memory of ordinary parameters, and empty
ones of the whole shape for parameters that are cut over processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["stand_ins"]


@contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Put other parameters into `model`, tied as its own are; its own are back afterwards."""
    made: dict[int, nn.Parameter] = {}
    places = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    try:
        for parameters, name, parameter in places:
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = _stand_in(parameter)
                parameters[name] = made[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is nn.Parameter:
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    if hasattr(parameter, "stand_in"):
        made: nn.Parameter = parameter.stand_in()
        return made
    return parameter  # a class of somebody else's, which may be more than its values
