"""Watches a plain forward for code that a captured graph may not hold, to give an error its likely reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from parplan.compat import pytree
from parplan.graph.attributes.surroundings import random_states
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.user_line import calling_line

__all__ = ["Suspects", "suspects"]


class Suspects(TorchFunctionMode):
    """Notes on code of a forward that a graph of ops may lack.

    Attributes:
        found: sentences, in the order of the forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call of torch's."""
        if func is Tensor.register_hook:
            self._note("registers a tensor hook (register_hook)")
        elif func == Tensor.data.__get__:  # type: ignore[attr-defined]
            self._note("goes around autograd through .data")
        return func(*args, **(kwargs or {}))

    def _note(self, what: str) -> None:
        if line := calling_line():
            self.found.setdefault(f"the forward {what} at {line}")

    def functions(self, results: Any) -> None:
        """Note custom autograd Functions in the graph of what a forward returned."""
        open_nodes = [t.grad_fn for t in pytree.tree_leaves(results) if isinstance(t, Tensor) and t.grad_fn is not None]
        seen: set[Any] = set()
        while open_nodes:
            node = open_nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if issubclass(type(node), BackwardCFunction):
                name = type(node).__name__.removesuffix("Backward")
                what = (
                    "a checkpoint with use_reentrant=True"
                    if name == "CheckpointFunction"
                    else (f"the custom autograd.Function {name}, whose backward need not be its forward's derivative")
                )
                self.found.setdefault(f"the forward contains {what}")
            open_nodes += [parent for parent, _ in node.next_functions if parent is not None]

    def text(self) -> tuple[str, ...]:
        """Sentences for an error."""
        if not self.found:
            return ()
        return ("likely reasons in the model's code:", *(f"  {sentence}" for sentence in self.found))


@contextmanager
def suspects(module: nn.Module, graph: LayerGraph) -> Iterator[Suspects]:
    """Watch one forward of `module`."""
    seen = Suspects()
    before = {id(part): dict(vars(part)) for part in module.modules()}
    states = random_states()
    with module.register_forward_hook(lambda part, args, result: seen.functions(result)), seen:
        yield seen
    for path, part in module.named_modules():
        old = before[id(part)]
        for name, value in vars(part).items():
            if name not in ("_parameters", "_buffers", "_modules") and old.get(name) is not value and name in old:
                seen.found.setdefault(f"the forward sets the attribute {name!r} of {path or type(part).__name__}")
    drawn = random_states()
    for name, whose in (("random", "Python's"), ("numpy.random", "NumPy's")):
        if name in states and drawn[name] != states[name]:
            seen.found.setdefault(f"the forward draws from {whose} random, which a captured graph holds as one number")
    written = [graph.buffers[name] for name in (*graph.counters, *graph.buffer_updates) if name in graph.buffers]
    read = {graph.buffers.get(name) for layer in graph.layers.values() for name in layer.buffers}
    for name in written:
        if name in read:
            seen.found.setdefault(f"the forward writes the buffer {name} and uses its value")
