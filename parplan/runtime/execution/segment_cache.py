"""Generated code of compute steps, made once for devices with equal work, and compiled if a backend is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from parplan.errors import BackendWarning
from parplan.graph import batch_norm
from parplan.graph.kinds import writes_statistics
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, Marks, local_module
from parplan.lowering.program import Code, Compute, Program
from parplan.runtime.execution.module_hooks import HookCalls
from parplan.runtime.execution.random_state import SeededOps
from parplan.runtime.preserve_state import preserved_generators

__all__ = ["EAGER", "INDUCTOR", "Function", "SegmentCache", "written_buffers"]

Function = Callable[..., tuple[Tensor, ...]]

EAGER, INDUCTOR = "eager", "inductor"
"""Backends: ops one by one, or torch.compile's inductor for the layers that a device runs at a stretch."""


class SegmentCache:
    """The code of one program's compute steps.

    Args:
        graph: that the program was lowered from.
        program: the steps.
        seeded: ops that draw random numbers on several devices at once.
        dropout: whether dropout drops anything.
        places: where each device of this process lives.
        hooks: the hooks of the user's modules.
        marks: called where a layer begins and where it ends.
        backend: that compiles the code.
    """

    def __init__(
        self,
        graph: LayerGraph,
        program: Program,
        seeded: SeededOps,
        dropout: bool,
        places: Mapping[int, torch.device],
        hooks: HookCalls,
        marks: Marks | None = None,
        backend: str = EAGER,
    ) -> None:
        self._graph = graph
        self._strategies = program.strategies
        self._slots = program.slots
        self._seeded = seeded
        self._dropout = dropout
        self._places = places
        self._hooks = hooks
        self._marks = marks
        self._backend = backend
        self._made: dict[_Key, Function] = {}

    def get(self, step: Compute, device: int) -> Function:
        """The code that `device` runs in `step`; its arguments are the step's operands, then its states."""
        row, column = step.grid.position(device)
        own_row, own_column = row if self._seeded.any or self._graph.sites else 0, column if step.grid.shards > 1 else 0
        key = _Key(id(step), own_row, own_column, step.batch(device), self._places[device])
        if key not in self._made:
            self._made[key] = self._make(step, key)
        return self._made[key]

    def _make(self, step: Compute, key: _Key) -> Function:
        if step.code is Code.STATISTICS:
            dtype = self._slots[step.results[0].slot].dtype
            return self._marked(step, lambda x: (batch_norm.statistics(x, dtype),))
        if step.code is Code.NORMALISE:
            normalise = batch_norm.normaliser(self._graph.layers[step.layers[0]])
            names = [state.name for state in step.states]
            return self._marked(step, lambda x, parts, *own: normalise(x, parts, dict(zip(names, own, strict=True))))
        parts = [LocalLayer(self._graph.layers[n], self._strategies[n], key.column, key.batch) for n in step.layers]
        inputs = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]
        results = [result.name for result in step.results]
        made = local_module(self._graph, parts, inputs, results, self._dropout, self._marks, key.place)
        targets = [node.target for node in made.graph.nodes]
        for part in parts if self._dropout else ():
            self._seeded.apply(made, part, key.row)
        self._hooks.apply(made, key.row, step.pass_number)
        code: Function = made.forward
        if self._backend == INDUCTOR:
            own = targets == [node.target for node in made.graph.nodes]  # what draws for itself, and hooks, are Python
            written = {inputs.index(name) for name in written_buffers(self._graph, step)}
            code = _CompiledCode(step.layers, code, written) if own else _left(step.layers, code, "hooks or seeded ops")
        # Numbers, as the code knows them, lie in slots that have one entry per replica.
        taken = [self._slots[operand.slot].per_replica for operand in step.operands] + [False] * len(step.states)
        given = [self._slots[result.slot].per_replica for result in step.results]
        if not any(taken) and not any(given):
            return code

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            results = code(*(t.squeeze(0) if entry else t for t, entry in zip(tensors, taken, strict=True)))
            return tuple(t.unsqueeze(0) if entry else t for t, entry in zip(results, given, strict=True))

        return run

    def _marked(self, step: Compute, code: Function) -> Function:
        """The code of half a layer, with the layer's marks around it."""
        if self._marks is None:
            return code
        (layer,) = step.layers
        before, after = self._marks.before(layer), self._marks.after(layer)

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            before()
            results = code(*tensors)
            after(results)
            return results

        return run


class _CompiledCode:
    """Code that inductor compiles at its first call, where its results and gradients are compared with the code's own.

    Args:
        layers: for messages.
        code: as it is, which runs where it cannot be compiled.
        written: arguments, by number, that it writes to.
    """

    def __init__(self, layers: Sequence[str], code: Function, written: Set[int]) -> None:
        self._layers, self._code, self._written = layers, code, written
        # Random numbers as torch's own ops draw them; sizes are those of the program, which is made for them.
        self._compiled: Function = torch.compile(
            code, fullgraph=True, dynamic=False, backend=INDUCTOR, options={"fallback_random": True}
        )
        self._compared: set[bool] = set()  # with gradients, and without

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        recording = torch.is_grad_enabled()
        if recording not in self._compared:
            self._compared.add(recording)
            self._compare(tensors)
        return self._compiled(*tensors)

    def _compare(self, tensors: Sequence[Tensor]) -> None:
        step = partial(_step, tensors=tensors, written=self._written)
        expected = step(self._code)  # its errors are the model's own
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a compiler's, about itself
                found = step(self._compiled)
            reason = next((off for pair in zip(found, expected, strict=True) if (off := _difference(*pair))), "")
        except Exception as error:  # whatever a compiler may raise
            reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:2]])  # a kind, and a cause
        if reason:
            self._compiled = _left(self._layers, self._code, reason)


def _left(layers: Sequence[str], code: Function, reason: str) -> Function:
    """Code that stays as it is, which a warning says."""
    names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
    warnings.warn(f"{names} is not compiled by {INDUCTOR} and runs as it is: {reason}", BackendWarning, stacklevel=2)
    return code


def _step(code: Function, tensors: Sequence[Tensor], written: Set[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Results of code, and the gradients of half the sum of their squares; of which no trace is left."""
    own = [tensor.detach().clone() if n in written else tensor.detach() for n, tensor in enumerate(tensors)]
    for copied, tensor in zip(own, tensors, strict=True):
        copied.requires_grad_(tensor.requires_grad)
    given: Sequence[Tensor | None] = ()
    # A checkpoint around must not see this step.
    with preserved_generators(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        results = code(*own)
        ends, leaves = ([t for t in group if t.requires_grad] for group in (results, own))
        if torch.is_grad_enabled() and ends and leaves:
            given = torch.autograd.grad(ends, leaves, [end.detach() for end in ends], allow_unused=True)
    return [result.detach() for result in results], [one for one in given if one is not None]


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """How far tensors are off, where that is more than another order of the same sums explains; else empty."""
    largest = max((_largest(tensor) for tensor in expected), default=0.0)
    for own, tensor in zip(found, expected, strict=True):
        # Half of the digits, as long sums lose three or four; and noise of the largest, where terms cancel out.
        eps = torch.finfo(tensor.dtype).eps if _has_digits(tensor) else 0.0
        limit = eps**0.5 * _largest(tensor) + 16 * eps * largest
        if not torch.allclose(own, tensor, rtol=0, atol=limit, equal_nan=eps > 0):
            shape = tuple(tensor.shape)
            return (
                f"a result or gradient of shape {shape} is off by {_largest(own - tensor):.1e}, more than {limit:.1e}"
            )
    return ""


def _largest(tensor: Tensor) -> float:
    """The largest absolute value that is a number."""
    known = _has_digits(tensor) and tensor.numel() > 0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max()) if known else 0.0


def _has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True)
class _Key:
    """The facts that devices which share code have in common; `row` counts only where random numbers or hooks do."""

    step: int
    row: int
    column: int
    batch: int
    place: torch.device


def written_buffers(graph: LayerGraph, step: Compute) -> frozenset[str]:
    """Buffers that a step writes: the running statistics of batch and instance norm in training."""
    nodes = [node for name in step.layers for node in graph.layers[name].nodes]
    norms = filter(writes_statistics, nodes)
    return frozenset(a.name for node in norms for a in node.args[3:5] if isinstance(a, fx.Node))
