"""One call of a program: its forward steps, and the autograd graphs that they leave for its backward steps.

Each compute step records its own small graph, with its inputs cut off from what came before. The backward takes the
program's backward steps one by one, and asks autograd only for the gradients of one such graph at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from parplan.errors import RuntimeFailure
from parplan.layout import whole_block
from parplan.lowering.passes import put, take
from parplan.lowering.program import Code, Compute, Forward, Join, Reduce, Regather, Slot, Split, State, Step, Transfer
from parplan.runtime.compat import in_backward, keeps_graph, writes
from parplan.runtime.execution.executor import Executor
from parplan.runtime.execution.gradients import Gradients
from parplan.runtime.execution.slot_parts import FreedWeights, SlotParts, memory
from parplan.runtime.sharded_state.outside_gradients import ParameterAliases

__all__ = ["Run"]


@dataclass(frozen=True)
class _Recorded:
    """The autograd graph of one compute step on one device.

    Args:
        inputs: leaves of the graph, or tensors that do not need gradients.
        results: where the gradient of each enters the graph, None without; the graph alone says which values it needs.
        weights: inputs that are gathered again for the backward, by slot; not those that results are views of.
        writes: how often each input had been written, of a step that is replayed.
    """

    inputs: tuple[Tensor, ...]
    results: tuple[GradientEdge | None, ...]
    weights: Mapping[str, Tensor]
    writes: tuple[int, ...]


class Run:
    """One call of a program, forward and backward.

    Args:
        executor: whose program runs.
        inputs: names of the user's inputs.
        parameters: those that take gradients, by placeholder.
        kept: slots that are not dropped after their last reader.
        once: graphs are freed by the first backward, whatever autograd is asked for.
        micro_batch: its number in the step, so that each draws other random numbers.

    Attributes:
        reached, last_reads: slots that have a gradient in some process (None: all); of the executor, or its pipeline.
    """

    def __init__(
        self, executor: Executor, inputs: tuple[str, ...], parameters: tuple[str, ...], kept: Set[str] = frozenset(),
        once: bool = False, micro_batch: int = 0,
    ) -> None:  # fmt: skip
        self.inputs, self.parameters = inputs, parameters
        self._executor = executor
        self._program = executor.program
        self._transport = executor.transport
        self._recorder = executor.recorder
        self._input_devices: list[torch.device] = []
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self.aliases: ParameterAliases | None = None  # shared with calls as long as the backward may still come
        self._frees = once
        self.reached: Set[str] | None = None
        self.last_reads = executor.last_reads
        self._touched: set[str] = set()  # parameters that this process has a gradient of
        self._to_slices: list[str] = []  # parameters whose gradients are on their way to slices
        self._again = in_backward()
        self._freed = FreedWeights(executor.store, self._transport, self._recorder)
        self._kept = kept
        self._micro_batch = executor.seeded.micro_batch = micro_batch
        self._random_state = executor.own_draws()
        self._late: dict[str, Tensor] = {}  # values of buffers that are assigned when the call is over

    @property
    def wanting(self) -> list[bool]:
        """Per result whether it takes a gradient; returned inputs do, so that autograd refuses writes into them."""
        slots = (self._program.slots[name] for name in self._program.outputs)
        return [slot.requires_grad or slot.value in self.inputs for slot in slots]

    def forward(self, tensors: list[Tensor], record: bool) -> list[Tensor]:
        """The results for the user's inputs; `record` keeps the graphs that a backward needs."""
        self._recorder.runtime()
        parts = self.begin(tensors)
        self.go_forward(self._program.forward, parts, record)
        results = [parts.get(slot)[self._executor.deliver_from] for slot in self._program.outputs]
        self.update_buffers(parts)
        self.finish(parts)
        for tensor in results:
            self._transport.used_here(tensor)
        # The caller may write into results of their own memory. Autograd would not follow a write into a shared one, so
        # there they are views, into which it refuses writes.
        counts, states = Counter(map(memory, [*results, *tensors])), self._executor.state_results(results)
        shared = [counts[memory(tensor)] > 1 or number in states for number, tensor in enumerate(results)]
        return [t.view_as(t) if one else t.detach() for t, one in zip(results, shared, strict=True)]

    def begin(self, tensors: Sequence[Tensor]) -> SlotParts:
        """The user's inputs, where they arrive."""
        parts = SlotParts(self._transport, self._recorder)
        self._input_devices = [tensor.device for tensor in tensors]
        self._executor.store.refresh()
        for name, tensor in zip(self.inputs, tensors, strict=True):
            device = self._arrival(self._program.slots[name])
            parts.put(name, device, tensor.detach().to(self._transport.physical(device)))
        self._freed.begin(self._program.freed.values())
        for name in self._program.slices:
            for device in self._executor.owned(self._program.slots[name].devices):
                parts.put(name, device, self._executor.store.slice(name, device))
        self._transport.begin()
        for name in (*self.inputs, *self._program.slices):
            for device, tensor in parts.get(name).items():
                with self._transport.on(device):
                    self._transport.used_here(tensor)  # a graph may be the last to hold it
        return parts

    def go_forward(self, steps: Iterable[Forward], parts: SlotParts, record: bool) -> None:
        """Take forward steps."""
        with self._random_state.entered():
            for step in steps:
                self._step_forward(step, parts, record)

    def _step_forward(self, step: Forward, parts: SlotParts, record: bool) -> None:
        executor = self._executor
        if isinstance(step, Transfer):
            parts.start(step, parts.get(step.source))
        elif isinstance(step, Split):
            self._split(parts, step.source, step.targets, step)
        elif isinstance(step, Join):
            self._join(parts, step.sources, step.target, step)
        else:
            executor.seeded.micro_batch = self._micro_batch if step.pass_number is None else step.pass_number
            executor.each(step, partial(self._compute, step, parts=parts, record=record))
            executor.done(step)
            self._free_weights(step)
        for slot in self.last_reads[id(step)]:
            if slot not in self._kept:
                parts.drop(slot)

    def _split(self, parts: SlotParts, whole: str, pieces: Sequence[str | None], step: Split | Join) -> None:
        """The passes' parts of a value of the whole batch, or of its gradient; None: not wanted."""
        for device, tensor in parts.get(whole).items():
            with self._transport.on(device):
                for piece, ranges in zip(pieces, step.ranges[device], strict=True):
                    if piece is not None:
                        parts.put(piece, device, take(tensor, step.dim, ranges))

    def _join(self, parts: SlotParts, pieces: Sequence[str], whole: str, step: Split | Join) -> None:
        """A value of the whole batch, or its gradient, from the passes' parts; those that are missing are zero."""
        slot = self._program.slots[whole]
        held = [parts.get(piece) for piece in pieces]
        for device in self._executor.owned(slot.devices):
            present = [device in own for own in held]
            if any(present):
                tensor = self._new(slot, device, torch.empty if all(present) else torch.zeros)
                with self._transport.on(device):
                    for own, ranges in zip(held, step.ranges[device], strict=True):
                        if device in own:
                            put(tensor, step.dim, ranges, own[device])
                    parts.put(whole, device, tensor)

    def _new(self, slot: Slot, device: int, make: Callable[..., Tensor] = torch.zeros) -> Tensor:
        """A tensor for one device's part of a slot."""
        with self._transport.on(device):
            return make(slot.local_shapes[device], dtype=slot.dtype, device=self._transport.physical(device))

    def _arrival(self, slot: Slot) -> int:
        return slot.devices[0] if self._transport.processes == 1 else self._transport.owned[0]

    def _compute(self, step: Compute, device: int, parts: SlotParts, record: bool) -> None:
        executor, slots = self._executor, self._program.slots
        made = [slots[result.slot] for result in step.results]
        # Without samples a device takes part in a normalisation alone, for the running statistics.
        idle = step.batch(device) == 0 and step.code is not Code.NORMALISE
        if idle and all(0 in slot.local_shapes[device] for slot in made):
            for slot in made:
                parts.add(slot.name, device, self._new(slot, device))
            return
        with self._transport.on(device), torch.set_grad_enabled(record):
            values = [parts.get(operand.slot)[device] for operand in step.operands]
            needed = [record and slots[operand.slot].requires_grad for operand in step.operands]
            states = executor.states(step, device)
            needed += [record and state.name in self.parameters for state in step.states]
            inputs = tuple(
                t.detach().requires_grad_() if n else t for t, n in zip((*values, *states), needed, strict=True)
            )
            executor.hooks.guard(inputs)
            self._recorder.computing(device)
            code = executor.code.get(step, device)
            if record and step.unit is not None:
                code = partial(
                    checkpoint, code, use_reentrant=False, preserve_rng_state=executor.is_random(step),
                    context_fn=executor.seeded.again,
                )  # fmt: skip
            results = executor.run_code(step, device, code, inputs)
        for slot, tensor in zip(made, results, strict=True):
            parts.add(slot.name, device, tensor.detach())
        if record:
            edges = tuple(get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in results)
            counts = tuple(map(writes, inputs)) if step.unit is not None else ()
            self._recorded[id(step), device] = _Recorded(inputs, edges, self._weights(step, inputs, results), counts)

    def update_buffers(self, parts: SlotParts) -> None:
        """Assign buffers that the forward writes; those that the model writes last wait for `end`."""
        found = {buffer: parts.get(slot) for buffer, slot in self._program.updates.items()}
        if found:
            self._transport.show()
        values = {buffer: held[self._executor.deliver_from] for buffer, held in found.items()}
        for value in values.values():
            self._transport.used_here(value)
        late = self._executor.graph.late
        self._late = {buffer: value for buffer, value in values.items() if buffer in late}
        self._assign({buffer: value for buffer, value in values.items() if buffer not in late})
        self._executor.share_buffers()

    def finish(self, parts: SlotParts) -> None:
        """Wait for movements that nothing has read, and until all messages have left."""
        parts.settle()
        with self._recorder.sends:
            self._transport.end()

    def end(self) -> None:
        """Assign the buffers that the model writes last: not where a checkpoint that runs again has ended before."""
        self._assign(self._late)
        self._late = {}

    @torch.no_grad()
    def _assign(self, values: Mapping[str, Tensor]) -> None:
        for buffer, value in values.items():
            self._executor.store.original(buffer).copy_(value)

    def enter_backward(self) -> None:
        """The streams of autograd's thread see what the forward has seen, as a checkpoint may run it again on them."""
        self._transport.show()

    def backward(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the inputs and of the parameters, from those of the results (None counts as zero)."""
        self._frees = not keeps_graph()
        sums = Gradients(self._executor.store, self._transport, self._recorder)
        given = self.go_back(outputs, sums)
        # In sums over processes nothing counts as zero; a parameter that no process's loss depends on has none.
        some = self.reached is not None or self._executor.may_leave_out
        touched, behind = self._touched if some else None, None
        if self._executor.may_leave_out:
            used = zip(self._program.outputs, outputs, strict=True)
            behind = self._executor.parameters_behind(frozenset(name for name, pull in used if pull is not None))
        totals = sums.totals(self.parameters, touched=touched, behind=behind)
        self._transport.ready_on(self._executor.deliver_from)
        return [*given, *totals.values()]

    def go_back(self, outputs: Sequence[Tensor | None], sums: Gradients, last: bool = True) -> list[Tensor | None]:
        """Gradients of the inputs, from those of the results (None counts as zero); those of the parameters are added.

        Args:
            sums: of the parameters' gradients.
            last: all gradients are there with this backward, and are summed over devices.
        """
        self._recorder.runtime()
        self.reached, self._touched = self._reached_slots(outputs), set()
        grads = SlotParts(self._transport, self._recorder)
        self.take_outputs(self._program.outputs, outputs, grads)
        self._transport.begin()
        self.go_backward(self._program.backward, grads, sums, last)
        self.take_slices(grads, sums)
        sums.arrive()
        return self.input_gradients(grads)

    def input_gradients(self, grads: SlotParts) -> list[Tensor | None]:
        """Gradients of the inputs, when all steps have gone back."""
        given = [self._input_gradient(name, grads) for name in self.inputs]
        with self._recorder.sends:
            self._transport.end()
        # From here on the caller's streams work, which wait for all others.
        for number, (gradient, place) in enumerate(zip(given, self._input_devices, strict=True)):
            if gradient is not None:
                self._transport.used_here(gradient)
                given[number] = gradient.to(place)
        return given

    def _reached_slots(self, outputs: Sequence[Tensor | None]) -> Set[str] | None:
        """Slots that have a gradient in some process, where the losses of all leave a result out; None: all slots."""
        wanted = self._executor.differentiable_results
        if self._transport.processes == 1 or len(wanted) < 2 or self._executor.may_leave_out:
            return None
        own = {name for name, pull in zip(self._program.outputs, outputs, strict=True) if pull is not None}
        used = self._transport.any(name in own for name in wanted)
        if all(used):
            return None
        return self._program.reached({name for name, one in zip(wanted, used, strict=True) if one})

    def take_outputs(self, slots: Sequence[str], outputs: Sequence[Tensor | None], grads: SlotParts) -> None:
        """Put the gradients that the caller gives for results."""
        for slot, gradient in zip(slots, outputs, strict=True):
            if gradient is not None and self._program.slots[slot].requires_grad:
                place = self._transport.physical(self._executor.deliver_from)
                # The mean over processes, taken once and here, makes every later reduction a plain sum.
                share = gradient if self._transport.processes == 1 else gradient / self._transport.processes
                grads.put(slot, self._executor.deliver_from, share.to(place))

    def go_backward(self, steps: Iterable[Step], grads: SlotParts, sums: Gradients, last: bool = True) -> None:
        """Take backward steps; `last`: gradients are summed over devices."""
        for step in steps:
            if isinstance(step, Reduce) and not last:
                continue
            if isinstance(step, Transfer):
                self._send_back(step, grads)
            elif isinstance(step, Split):
                self._join(grads, step.targets, step.source, step)
                for target in step.targets:
                    grads.drop(target)
            elif isinstance(step, Join):
                wanted = [source if self._program.slots[source].requires_grad else None for source in step.sources]
                self._split(grads, step.target, wanted, step)
                grads.drop(step.target)
            elif isinstance(step, Reduce):
                sums.launch(step.bucket)
            elif isinstance(step, Regather):
                if self.reached is None or step.transfer.target in self.reached:
                    self._freed.gather(step.transfer)
            else:
                self._refill_weights(step)
                self._executor.each(step, partial(self._through_layers, step, grads=grads, sums=sums), backward=True)
                self._free_weights(step)
                for result in step.results:
                    grads.drop(result.slot)
                self.take_slices(grads, sums)  # of the step before, which were on their way beside this one

    def take_slices(self, grads: SlotParts, sums: Gradients) -> None:
        """Take in the gradients of parameters that lie in slices, and free what they were summed from."""
        for name in self._to_slices:
            for device, gradient in grads.get(name).items():
                sums.add(State(name, {device: whole_block(gradient.shape)}), device, gradient, own=True)
            grads.drop(name)
        if self._to_slices:
            self._transport.free_sent()
        self._to_slices = []

    def _weights(self, step: Compute, inputs: Sequence[Tensor], results: Iterable[Tensor]) -> dict[str, Tensor]:
        """Weights in the graph of a step that are freed behind it and gathered again for its backward, by slot; not of
        a forward that a checkpoint runs again, whose tensors the graphs of the first one take."""
        if not self._program.freed or self._again:
            return {}
        shown = set(map(memory, results))
        operands = zip(step.operands, inputs, strict=False)
        return {o.slot: t for o, t in operands if o.slot in self._program.freed and memory(t) not in shown}

    def _gathered(self, step: Compute) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The weights in the graphs of a step, on each device of this process."""
        for device in self._executor.owned(step.grid.devices):
            if (recorded := self._recorded.get((id(step), device))) is not None:
                yield device, recorded.weights

    def _refill_weights(self, step: Compute) -> None:
        # Not in the loop over steps: its variables would hold the weights beyond their backward.
        for device, weights in self._gathered(step):
            self._freed.refill(device, weights)

    def _free_weights(self, step: Compute) -> None:
        for device, weights in self._gathered(step):
            self._freed.free(device, weights.values())

    def _send_back(self, step: Transfer, grads: SlotParts) -> None:
        target = self._program.slots[step.target]
        if not target.requires_grad or (self.reached is not None and step.target not in self.reached):
            return
        held = grads.get(step.target)
        if not held and self._transport.processes == 1:
            return
        if step.weights:
            self._to_slices.append(step.source)
            self._touched.update([step.source] if held else [])
        here = self._executor.owned(target.devices)
        whole = {device: held[device] if device in held else self._new(target, device) for device in here}
        grads.start(step, whole, backward=True)
        grads.drop(step.target)

    def _through_layers(self, step: Compute, device: int, grads: SlotParts, sums: Gradients) -> None:
        """Gradients of one compute step on one device: to the slots of its operands, and to the sums over devices."""
        recorded = (self._recorded.pop if self._frees else self._recorded.get)((id(step), device), None)
        if recorded is None:
            return
        arrived = [grads.get(result.slot).get(device) for result in step.results]
        known = [(e, p) for e, p in zip(recorded.results, arrived, strict=True) if e is not None and p is not None]
        leaves = [tensor for tensor in recorded.inputs if tensor.requires_grad]
        if not known or not leaves:
            return
        ends, pulls = zip(*known, strict=True)
        names = [*(operand.name for operand in step.operands), *(state.name for state in step.states)]
        for name, tensor, count in zip(names, recorded.inputs, recorded.writes, strict=False):
            if writes(tensor) != count:
                raise RuntimeFailure(
                    f"{self._executor.graph.label(name)} was written between a forward and its backward, for which "
                    "layers that read it run forward again; call backward before it is written, or plan them with "
                    'saved "keep"'
                )
        states = list(zip(step.states, recorded.inputs[len(step.operands) :], strict=True))
        added = set[int]()
        for state, tensor in states if self._frees else ():
            if tensor.requires_grad and (total := sums.known(state, device)) is not None:
                tensor.register_hook(total.add_)  # while what it adds is in the cache, and alive alone
                added.add(id(tensor))
                self._touched.add(state.name)
        differentiate = partial(torch.autograd.grad, allow_unused=True, retain_graph=not self._frees)
        with self._transport.on(device):
            given: Sequence[Tensor | None] = self._executor.backward_dispatch.apart(differentiate, ends, leaves, pulls)
        self._recorder.runtime((device,))
        found = {id(leaf): gradient for leaf, gradient in zip(leaves, given, strict=True)}
        gradients = [found.get(id(tensor)) for tensor in recorded.inputs]
        # Memory that holds more than one gradient: of results that were passed on, or of several inputs.
        counts = Counter(memory(one) for one in (*gradients, *pulls, *pulls) if one is not None)
        for operand, gradient in zip(step.operands, gradients, strict=False):
            if gradient is not None:
                grads.add(operand.slot, device, gradient)
        for (state, tensor), gradient in zip(states, gradients[len(step.operands) :], strict=True):
            if gradient is not None and id(tensor) not in added:
                self._touched.add(state.name)
                sums.add(state, device, gradient, own=self._frees and counts[memory(gradient)] <= 1)

    def _input_gradient(self, name: str, grads: SlotParts) -> Tensor | None:
        slot = self._program.slots[name]
        device = self._arrival(slot)
        gradient = grads.get(name).get(device)
        if gradient is None and slot.requires_grad and 0 in slot.local_shapes[device]:
            gradient = self._new(slot, device)  # no samples, so no step has run on it
        if gradient is None or not slot.requires_grad:
            return None
        # The mean over processes is for parameters; a process's own inputs see its own loss.
        return gradient if self._transport.processes == 1 else gradient * self._transport.processes
