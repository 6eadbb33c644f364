"""Follow a program on the devices this process owns, forward and backward.

Autograd is not asked to order anything across devices. Each compute step records its own small graph, with its inputs
cut off from what came before; one outer `autograd.Function` stands for the whole call, and its backward takes the
program's backward steps one by one. So every process meets every other one in the same order, whatever the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from parplan.errors import RuntimeFailure
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import LocalLayer, local_module
from parplan.plan import Strategy
from parplan.runtime import batch_norm
from parplan.runtime.compat import keeps_graph
from parplan.runtime.parameters import Gradients, Store
from parplan.runtime.program import Code, Compute, Program, Reduce, Slot, State, Transfer
from parplan.runtime.transport import Held, Pending, Transport

__all__ = ["Executor", "written_buffers"]

AGAIN = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time."
)

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Recorded:
    """What one compute step left on one device for its backward; `inputs` are leaves, or do not need gradients."""

    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


class Executor:
    """Runs one program.

    Args:
        graph, strategies: what the program was lowered from.
        program: the steps.
        store: parameters and buffers as the devices hold them.
        transport: moves tensors; says which devices are here.
        output: the device whose part of a result is handed back, where one process holds all.
        dropout: whether dropout drops anything.
    """

    def __init__(
        self,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        program: Program,
        store: Store,
        transport: Transport,
        output: int = 0,
        dropout: bool = True,
    ) -> None:
        self.graph = graph
        self.program = program
        self.store = store
        self.transport = transport
        self.deliver_from = output if transport.processes == 1 else transport.owned[0]
        self._strategies = strategies
        self._dropout = dropout
        self._codes: dict[tuple[int, int, int], Function] = {}
        self._indices = {id(step): index for index, step in enumerate(program.forward)}
        self._written = [written_buffers(graph, step) for step in program.forward]
        self._last_reads = _last_reads(program)
        for bucket in program.buckets:
            for group in bucket.groups:
                transport.group(group)

    def __call__(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Results for the user's input values (by name); differentiable in inputs and parameters."""
        trainable = self.store.trainable
        tensors = [*inputs.values(), *trainable.values()]
        run = _Run(self, tuple(inputs), tuple(trainable))
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return run.forward(list(inputs.values()), record=False)
        results = _Call.apply(run, *tensors)  # type: ignore[no-untyped-call]
        return list(results)

    def owned(self, devices: Iterable[int]) -> list[int]:
        """Those of `devices` that are in this process."""
        return [device for device in devices if device in self.transport.owned]

    def code(self, step: Compute, device: int) -> Function:
        """What `device` runs in a compute step; devices with equal work share it."""
        column = step.grid.position(device)[1] if step.grid.shards > 1 else 0
        key = (self._indices[id(step)], column, step.batch(device))
        if key not in self._codes:
            self._codes[key] = self._make(step, column, step.batch(device))
        return self._codes[key]

    def states(self, step: Compute, device: int) -> list[Tensor]:
        """Parameters and buffers for a compute step; only the first replica writes the module's buffers."""
        spare = self.transport.processes == 1 and step.grid.position(device)[0] > 0
        written = self._written[self._indices[id(step)]] if spare else ()
        found = [self.store.get(state, device) for state in step.states]
        return [t.clone() if s.name in written else t for s, t in zip(step.states, found, strict=True)]

    def write_back(self, step: Compute, device: int) -> None:
        """Bring home the buffers that a step wrote on its first replica."""
        if self.transport.processes == 1 and step.grid.position(device)[0] == 0:
            for state in step.states:
                if state.name in self._written[self._indices[id(step)]]:
                    self.store.write_back(state, device)

    def last_reads(self, step: Compute | Transfer) -> Sequence[str]:
        """Slots that nothing reads after this forward step."""
        return self._last_reads[self._indices[id(step)]]

    def _make(self, step: Compute, column: int, batch: int) -> Function:
        if step.code is Code.STATISTICS:
            dtype = self.program.slots[step.results[0].slot].dtype
            return lambda x: (batch_norm.statistics(x, dtype),)
        if step.code is Code.NORMALISE:
            return _normaliser(self.graph.layers[step.layers[0]], step)
        parts = [LocalLayer(self.graph.layers[n], self._strategies[n], column, batch) for n in step.layers]
        inputs = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]
        made = local_module(self.graph, parts, inputs, [result.name for result in step.results], self._dropout)
        return made.forward


def written_buffers(graph: LayerGraph, step: Compute | Transfer) -> frozenset[str]:
    """Buffers that a step writes: the running statistics of batch norm in training."""
    if isinstance(step, Transfer):
        return frozenset()
    nodes = [node for name in step.layers for node in graph.layers[name].nodes]
    norms = [node for node in nodes if node.target is torch.ops.aten.batch_norm.default and node.args[5]]
    return frozenset(a.name for node in norms for a in node.args[3:5] if isinstance(a, fx.Node))


def _normaliser(layer: Layer, step: Compute) -> Function:
    """The second half of a batch norm: its arguments are the step's operands and states, by name."""
    node = next(node for node in layer.nodes if node.target is torch.ops.aten.batch_norm.default)
    weight, bias, mean, variance = (getattr(argument, "name", "") for argument in node.args[1:5])
    momentum, eps = (float(str(argument)) for argument in node.args[6:8])
    names = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]

    def run(x: Tensor, parts: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        known = dict(zip(names[2:], states, strict=True))
        affine, running = (known.get(weight), known.get(bias)), (known.get(mean), known.get(variance))
        return (batch_norm.normalise(x, parts, *affine, *running, momentum, eps),)

    return run


def _last_reads(program: Program) -> list[list[str]]:
    """Per forward step, the slots that no later step and no caller reads."""
    kept = {*program.outputs, *program.updates.values()}
    last: dict[str, int] = {}
    for index, step in enumerate(program.forward):
        for slot in _reads(step):
            last[slot] = index
    found: list[list[str]] = [[] for _ in program.forward]
    for slot, index in last.items():
        if slot not in kept:
            found[index].append(slot)
    return found


def _reads(step: Compute | Transfer) -> list[str]:
    return [step.source] if isinstance(step, Transfer) else [operand.slot for operand in step.operands]


class _Parts:
    """The parts of every slot that are here, and what is on its way to it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._parts: dict[str, Held] = defaultdict(dict)
        self._coming: dict[str, list[Pending]] = defaultdict(list)

    def add(self, slot: str, device: int, tensor: Tensor) -> None:
        """Put a part, or add to it; never in place, as it may be shared."""
        known = self._parts[slot].get(device)
        with self._transport.on(device):
            self._parts[slot][device] = tensor if known is None else known + tensor

    def expect(self, slot: str, pending: Pending) -> None:
        """More for this slot is on its way."""
        self._coming[slot].append(pending)

    def get(self, slot: str) -> Held:
        """What is here of a slot, after what is on its way has arrived."""
        for pending in self._coming.pop(slot, ()):
            for device, tensor in pending.wait().items():
                self.add(slot, device, tensor)
        return self._parts[slot]

    def drop(self, slot: str) -> None:
        """Forget a slot."""
        self._parts.pop(slot, None)

    def settle(self) -> None:
        """Wait for everything that is on its way."""
        for slot in list(self._coming):
            self.get(slot)


class _Run:
    """One call: its forward, and what that left for the backward."""

    def __init__(self, executor: Executor, inputs: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        self._executor = executor
        self._program = executor.program
        self._transport = executor.transport
        self._inputs = inputs
        self._input_devices: list[torch.device] = []
        self._parameters = parameters
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._done = False

    # -- forward --

    def forward(self, tensors: list[Tensor], record: bool) -> list[Tensor]:
        executor, parts = self._executor, _Parts(self._transport)
        self._input_devices = [tensor.device for tensor in tensors]
        self._transport.begin()
        executor.store.refresh()
        for name, tensor in zip(self._inputs, tensors, strict=True):
            device = self._arrival(self._program.slots[name])
            parts.add(name, device, tensor.detach().to(self._transport.physical(device)))
        for step in self._program.forward:
            if isinstance(step, Transfer):
                parts.expect(step.target, self._transport.start(step.exchange, parts.get(step.source)))
            else:
                for device in executor.owned(step.grid.devices):
                    self._compute(step, device, parts, record)
            for slot in executor.last_reads(step):
                parts.drop(slot)
        results = [parts.get(slot)[executor.deliver_from] for slot in self._program.outputs]
        self._update_buffers(parts)
        parts.settle()
        self._transport.end()
        return [tensor.view_as(tensor) for tensor in results]

    def _arrival(self, slot: Slot) -> int:
        return slot.devices[0] if self._transport.processes == 1 else self._transport.owned[0]

    def _compute(self, step: Compute, device: int, parts: _Parts, record: bool) -> None:
        slots = self._program.slots
        if step.batch(device) == 0 and self._is_empty(step, device):
            self._nothing(step, device, parts)
            return
        with self._transport.on(device), torch.set_grad_enabled(record):
            values = [parts.get(operand.slot)[device] for operand in step.operands]
            needed = [record and slots[operand.slot].requires_grad for operand in step.operands]
            states = self._executor.states(step, device)
            needed += [record and self._takes_gradient(state) for state in step.states]
            inputs = tuple(_leaf(t) if n else t for t, n in zip((*values, *states), needed, strict=True))
            results = self._executor.code(step, device)(*inputs)
        for result, tensor in zip(step.results, results, strict=True):
            self._check(step, slots[result.slot], device, tensor)
            parts.add(result.slot, device, tensor.detach())
        self._executor.write_back(step, device)
        if record:
            self._recorded[id(step), device] = _Recorded(inputs, results)

    def _is_empty(self, step: Compute, device: int) -> bool:
        """Whether the device has nothing to compute; it takes part in a normalisation for the running statistics."""
        results = (self._program.slots[result.slot] for result in step.results)
        return step.code is not Code.NORMALISE and all(0 in slot.local_shape(device) for slot in results)

    def _takes_gradient(self, state: State) -> bool:
        return state.name in self._parameters

    def _nothing(self, step: Compute, device: int, parts: _Parts) -> None:
        """A device without samples has empty results, and no gradient to give."""
        for result in step.results:
            slot = self._program.slots[result.slot]
            place = self._transport.physical(device)
            parts.add(result.slot, device, torch.empty(slot.local_shape(device), dtype=slot.dtype, device=place))

    def _check(self, step: Compute, slot: Slot, device: int, tensor: Tensor) -> None:
        if tuple(tensor.shape) != slot.local_shape(device):
            raise RuntimeFailure(
                f"{' + '.join(step.layers)}: {slot.name} has shape {tuple(tensor.shape)} on device {device} where "
                f"{slot.local_shape(device)} was planned; give these layers one replica and one shard"
            )

    def _update_buffers(self, parts: _Parts) -> None:
        for buffer, slot in self._program.updates.items():
            self._executor.store.original(buffer).copy_(parts.get(slot)[self._executor.deliver_from])

    # -- backward --

    def backward(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs and of the parameters, from those of the results (None counts as zero)."""
        if self._done:
            raise RuntimeError(AGAIN)
        self._done = not keeps_graph()
        grads = _Parts(self._transport)
        sums = Gradients(self._executor.store, self._transport, self._program.holdings)
        self._transport.begin()
        self._take_outputs(outputs, grads)
        for step in self._program.backward:
            if isinstance(step, Transfer):
                self._send_back(step, grads)
            elif isinstance(step, Reduce):
                sums.launch(self._program.buckets[step.bucket])
            else:
                for device in self._executor.owned(step.grid.devices):
                    self._go_back(step, device, grads, sums)
                for result in step.results:
                    grads.drop(result.slot)
        sums.arrive()
        given = [self._input_gradient(name, i, grads) for i, name in enumerate(self._inputs)]
        self._transport.end()
        return [*given, *(sums.total(name) for name in self._parameters)]

    def _take_outputs(self, outputs: Sequence[Tensor | None], grads: _Parts) -> None:
        for slot, gradient in zip(self._program.outputs, outputs, strict=True):
            if gradient is not None and self._program.slots[slot].requires_grad:
                place = self._transport.physical(self._executor.deliver_from)
                # The mean over processes, taken once and here, makes every later reduction a plain sum.
                share = gradient if self._transport.processes == 1 else gradient / self._transport.processes
                grads.add(slot, self._executor.deliver_from, share.to(place))

    def _send_back(self, step: Transfer, grads: _Parts) -> None:
        target = self._program.slots[step.target]
        if not target.requires_grad:
            return
        held = grads.get(step.target)
        if not held and self._transport.processes == 1:
            return
        here = self._executor.owned(target.devices)
        whole = {device: held[device] if device in held else self._zeros(target, device) for device in here}
        grads.expect(step.source, self._transport.start(step.transposed, whole))
        grads.drop(step.target)

    def _zeros(self, slot: Slot, device: int) -> Tensor:
        with self._transport.on(device):
            place = self._transport.physical(device)
            return torch.zeros(slot.local_shape(device), dtype=slot.dtype, device=place)

    def _go_back(self, step: Compute, device: int, grads: _Parts, sums: Gradients) -> None:
        recorded = self._recorded.get((id(step), device))
        if self._done:
            self._recorded.pop((id(step), device), None)
        if recorded is None:
            return
        known = {result.slot: grads.get(result.slot).get(device) for result in step.results}
        pairs = [
            (tensor, known[result.slot])
            for result, tensor in zip(step.results, recorded.results, strict=True)
            if tensor.requires_grad and known[result.slot] is not None
        ]
        leaves = [tensor for tensor in recorded.inputs if tensor.requires_grad]
        if not pairs or not leaves:
            return
        with self._transport.on(device):
            given = torch.autograd.grad(
                [tensor for tensor, _ in pairs],
                leaves,
                [gradient for _, gradient in pairs],
                allow_unused=True,
                retain_graph=not self._done,
            )
        found = {id(leaf): gradient for leaf, gradient in zip(leaves, given, strict=True)}
        self._hand_on(step, device, [found.get(id(tensor)) for tensor in recorded.inputs], grads, sums)

    def _hand_on(
        self, step: Compute, device: int, given: Sequence[Tensor | None], grads: _Parts, sums: Gradients
    ) -> None:
        count = len(step.operands)
        for operand, gradient in zip(step.operands, given[:count], strict=True):
            if gradient is not None:
                grads.add(operand.slot, device, gradient)
        for state, gradient in zip(step.states, given[count:], strict=True):
            if gradient is not None:
                sums.add(state, device, gradient)

    def _input_gradient(self, name: str, index: int, grads: _Parts) -> Tensor | None:
        slot = self._program.slots[name]
        device = self._arrival(slot)
        gradient = grads.get(name).get(device)
        if gradient is None and slot.requires_grad and 0 in slot.local_shape(device):
            gradient = self._zeros(slot, device)  # no samples, so no step has run on it
        if gradient is None or not slot.requires_grad:
            return None
        # The mean over processes is for parameters; a process's own inputs see its own loss.
        own = gradient if self._transport.processes == 1 else gradient * self._transport.processes
        return own.to(self._input_devices[index])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


class _Call(torch.autograd.Function):
    """A whole call of the compiled model as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        results = run.forward(list(tensors[: len(run._inputs)]), record=True)
        ctx.mark_non_differentiable(*(tensor for tensor in results if not tensor.is_floating_point()))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *ctx.run.backward(gradients))
