"""Custom autograd Functions as ops of the captured graph, so that their own backward stays.

torch.export would record the ops of a Function's forward and lose its backward. While a model is captured, each call of
`Function.apply` leaves one op instead, and where that op runs the call is made again with the tensors of a device: the
user's own forward and backward, with all that autograd does around them. Shapes of the results come from running the
forward on tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from parplan.errors import RuntimeFailure
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op, unfilled
from parplan.graph.sites import site_of
from parplan.graph.user_code.function_axes import Followed
from parplan.graph.user_code.module_hooks import Template

__all__ = ["CUSTOM_FUNCTION", "FunctionSite", "function_of", "known_sites"]


def _call(tensors: Sequence[Tensor], site: str) -> list[Tensor]:
    """A call of an autograd Function; only a name, as `FunctionSite.run` runs in its place."""
    raise NotImplementedError(site)


CUSTOM_FUNCTION = own_op("custom_function", _call, lambda tensors, site: unfilled(_known[-1][site].results))


@dataclass
class FunctionSite:
    """One call of an autograd Function in a captured forward.

    Attributes:
        function: the user's class.
        line: where it is called.
        inputs: of (args, kwargs).
        outputs: of what it returns.
        results: the tensors among those, without values.
        aliases: whether results share memory with arguments.
        followed: how its forward and backward treat samples.
    """

    function: type[torch.autograd.Function]
    line: str
    inputs: Template
    outputs: Template = field(default_factory=lambda: Template({}, None))
    results: tuple[Tensor, ...] = ()
    aliases: bool = False
    followed: Followed = field(default_factory=Followed)

    @property
    def name(self) -> str:
        """The class's name."""
        return self.function.__name__

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the Function gives for these.

        Raises:
            RuntimeFailure: it returns other things than it did when the model was captured.
        """
        args, kwargs = self.inputs.filled(tensors)
        result = self.function.apply(*args, **kwargs)
        template, found = Template.of(result)
        if not template.matches(self.outputs) or [t.dtype for t in found] != [r.dtype for r in self.results]:
            raise RuntimeFailure(
                f"{self.name}.apply returned {_told(template, found)} where it returned "
                f"{_told(self.outputs, self.results)} when the model was captured; the types of its tensors and all "
                f"its other results must stay as they are\n  at {self.line}"
            )
        for tensor in found if self.followed.writes else ():
            if tensor.requires_grad:
                tensor.register_hook(torch.clone)  # the backward may write to it
        return found


def _told(template: Template, tensors: Sequence[Any]) -> str:
    kinds = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    others = "".join(f", {value!r}" for value in template.leaves.values())
    return f"({kinds}{others})"


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """The axes that its forward and its backward leave apart."""
    site = site_of(call.node)
    operands: Any = call.node.args[0]
    names = [operand.name for operand in operands]
    found = []
    for axis in site.followed.axes if isinstance(site, FunctionSite) else ():
        dims: dict[str, int] = {}
        places = [(names[i], dim) for i, dim in axis.inputs.items()]
        places += [(name, axis.outputs[i]) for i, name in call.results.items()]
        if all(dims.setdefault(name, dim) == dim for name, dim in places):
            found.append(OpAxis(dims, units=axis.units))
    return tuple(found)


OWN_ROWS[CUSTOM_FUNCTION] = _axes


def function_of(node: fx.Node) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The function to call in place of an op: the user's code."""
    site = site_of(node)
    assert isinstance(site, FunctionSite)
    run = site.run

    def custom_function(tensors: Sequence[Tensor]) -> list[Tensor]:
        return run(tensors)

    return custom_function


_known: list[Mapping[str, Any]] = []


@contextmanager
def known_sites(sites: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts, ops that are traced stand for these calls."""
    _known.append(sites)
    try:
        yield
    finally:
        _known.pop()
