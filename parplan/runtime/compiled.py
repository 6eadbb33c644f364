"""A model that runs by a plan, and behaves like the model in every other way.

Graphs are captured at the first call of each kind, planned once, and lowered once per number of samples. In one process
the compiled model takes whole batches and gives whole results, like `nn.DataParallel`; under torchrun every process
brings its own samples and gets its own results, like `DistributedDataParallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from parplan.errors import PlanError, RuntimeFailure
from parplan.graph.capture import capture
from parplan.graph.layer_graph import Constant, LayerGraph
from parplan.layout import Region
from parplan.plan import Plan, Strategy
from parplan.runtime.buffers import BufferSync, fresh_buffers
from parplan.runtime.calls import Call
from parplan.runtime.devices import Device, existing, logical, memories, transport_for
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.executor import Executor
from parplan.runtime.lower import Setting, lower
from parplan.runtime.parameters import Store
from parplan.runtime.program import Program
from parplan.runtime.sharding import Sharding, same_start
from parplan.runtime.strategies import strategies_for

__all__ = ["Compiled"]

Planner = Callable[[LayerGraph], Plan]

# Samples per rank that a program is lowered for to see whether it needs the ranks' real numbers.
SUPPOSED_SAMPLES = 2


@dataclass
class _Captured:
    """A captured graph, how its layers run, and what it was lowered to, by samples per process."""

    graph: LayerGraph
    strategies: Mapping[str, Strategy]
    needs_sizes: bool
    executors: dict[tuple[int, ...], Executor] = field(default_factory=dict)


class Compiled(nn.Module):
    """`module`, run by the plan that `planner` makes for it.

    Args:
        module: the model; its parameters and buffers stay its own.
        planner: makes a plan from a captured graph; asked once, with the training graph.
        devices: where each logical device lives. None: under a process group one device per process, else all CUDA
            devices, else the CPU.
        output_device: where results go in one process; default: where logical device 0 lives.
        dim: the dimension along which inputs carry samples.
        batch_norm: "global" statistics over the whole batch, or "local" ones per replica.
        dropout: False switches dropout off, for comparisons.
        group: the process group, under torchrun; default: all processes.
    """

    def __init__(
        self,
        module: nn.Module,
        planner: Planner,
        *,
        devices: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        batch_norm: str = "global",
        dropout: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if batch_norm not in ("global", "local"):
            raise PlanError(f'batch_norm is {batch_norm!r}; it is "global" or "local"')
        # Not a submodule: names would get a prefix.
        object.__setattr__(self, "module", module)
        self.module: nn.Module
        self.training = module.training
        self.plan: Plan | None = None
        self.program: Program | None = None
        self._planner = planner
        self._transport = transport_for(devices, group)
        self._memories = memories(self._transport)
        self._output_device = existing(output_device) if output_device is not None else None
        self._output = logical(self._output_device, self._transport)
        self._dim = dim
        self._global = batch_norm == "global"
        self._dropout = dropout
        self._captured: dict[Hashable, _Captured] = {}
        self._traced: dict[Hashable, LayerGraph] = {}  # captured to be planned for, not yet run
        self._sharding: Sharding | None = None
        self._held: Mapping[str, Mapping[int, Region]] = {}
        self._sync: BufferSync | None = None
        if isinstance(self._transport, DistributedTransport):
            same_start(module, self._transport)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments.

        Raises:
            RuntimeFailure: no samples, or another process failed.
        """
        call = Call.of(args, kwargs, self._dim)
        captured = self._capture(call)
        samples = self._samples(call, captured)
        if captured.needs_sizes or self._transport.processes == 1:
            call.check(sum(samples))  # else a rank may have no samples, and does not know of the others'
        executor = self._executor(captured, samples)
        self.program = executor.program
        if self._sync is not None:
            self._sync.run()
        values = zip(captured.graph.user_inputs, _placed(call), strict=True)
        results = executor({name: tensor for name, tensor in values if name is not None and tensor is not None})
        self._after(captured.graph)
        return self._nested(captured.graph, results)

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Capture and plan for inputs like these without running anything; returns the plan."""
        self._capture(Call.of(args, kwargs, self._dim))
        assert self.plan is not None
        return self.plan

    @property
    def device_count(self) -> int:
        """How many logical devices there are, over all processes."""
        return len(self._memories)

    @property
    def device(self) -> torch.device:
        """Where the first logical device of this process lives."""
        return self._transport.physical(self._transport.owned[0])

    # -- capture, plan, lower --

    def _capture(self, call: Call) -> _Captured:
        kind = self._kind(call, self.training)
        if kind in self._captured:
            return self._captured[kind]
        batch = self._whole_batch(call)
        if (kind, batch) not in self._captured:
            if self.plan is None:
                self._make_plan(call, batch)
            graph = self._trace(call, self.training, batch)
            known = self._known(graph)
            if not _bound_to_batch(graph):
                self._captured[kind] = known
                return known
            self._captured[kind, batch] = known
        return self._captured[kind, batch]

    def _kind(self, call: Call, training: bool) -> Hashable:
        """What has to agree for two calls to share a graph."""
        return (training, tuple(parameter.requires_grad for parameter in self.module.parameters()), call.signature)

    def _whole_batch(self, call: Call) -> int | None:
        """Samples over all processes, which all have to ask."""
        if call.batch is None:
            return None
        whole = call.batch
        if isinstance(self._transport, DistributedTransport):
            whole = sum(self._transport.gather_sizes(call.batch))
        call.check(whole)
        return whole

    def _trace(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        """Capture for `batch` samples, or for 2 where it is 1, as an axis of 1 looks like none at all."""
        key = (self._kind(call, training), batch)
        if key in self._traced:
            return self._traced.pop(key)
        graph = self._traced_at(call, training, 2 if batch == 1 else batch)
        if batch == 1 and _bound_to_batch(graph):
            return self._traced_at(call, training, batch)
        return graph

    def _traced_at(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        args, kwargs = call.resized(batch) if batch is not None else pytree.tree_unflatten(call.leaves, call.spec)
        whole: AbstractContextManager[None] = self._sharding.whole_shapes() if self._sharding else nullcontext()
        with whole:
            return capture(self.module, args, kwargs, training=training, dim=self._dim)

    def _make_plan(self, call: Call, batch: int | None) -> None:
        # Every rank captures, at the same time; only one plans.
        graph = self._trace(call, True, batch)
        self._traced[self._kind(call, True), batch] = graph
        distributed = isinstance(self._transport, DistributedTransport)

        def planned() -> str:
            return self._planner(graph).to_json()

        text = self._transport.from_first(planned) if isinstance(self._transport, DistributedTransport) else planned()
        plan = Plan.from_json(text)
        count = len(self._memories)
        if plan.devices > count or (distributed and plan.devices != count):
            raise PlanError(
                f"the plan is for {plan.devices} devices, here are {count} {'ranks' if distributed else 'devices'}; "
                f"start as many, or make a plan for {count}"
            )
        self.plan = plan

    def _known(self, graph: LayerGraph) -> _Captured:
        assert self.plan is not None
        strategies = strategies_for(graph, self.plan)
        supposed = self._lower(graph, strategies, self._supposed())
        if isinstance(self._transport, DistributedTransport):
            self._hold(graph, supposed)
        return _Captured(graph, strategies, bool(supposed.transfers))

    def _supposed(self) -> tuple[int, ...]:
        return (SUPPOSED_SAMPLES,) * self._transport.processes

    def _lower(self, graph: LayerGraph, strategies: Mapping[str, Strategy], samples: tuple[int, ...]) -> Program:
        setting = Setting(
            devices=len(self._memories),
            samples=samples,
            memories=self._memories,
            output=self._output,
            global_statistics=self._global,
        )
        return lower(graph, strategies, setting)

    def _hold(self, graph: LayerGraph, program: Program) -> None:
        """Cut the module's parameters to this rank's blocks, once; later graphs have to agree."""
        assert isinstance(self._transport, DistributedTransport)
        held = {graph.parameters[name]: dict(blocks) for name, blocks in program.holdings.items()}
        if self._sharding is None:
            self._held = held
            self._sharding = Sharding(self.module, held, self._transport)
        self._sharding.fresh |= fresh_buffers(graph, program)
        for name, blocks in held.items():
            if self._held.get(name) != blocks:
                raise RuntimeFailure(
                    f"{name} is held as {self._held.get(name)} since the first call, and this call needs {blocks}; "
                    "call the model in training mode first, with the inputs it is trained with"
                )

    def _samples(self, call: Call, captured: _Captured) -> tuple[int, ...]:
        own = call.batch if call.batch is not None else 1
        if isinstance(self._transport, DistributedTransport):
            if captured.needs_sizes:
                return self._transport.gather_sizes(own)
            return (own,) * self._transport.processes
        return (own,)

    def _executor(self, captured: _Captured, samples: tuple[int, ...]) -> Executor:
        if samples not in captured.executors:
            graph, distributed = captured.graph, isinstance(self._transport, DistributedTransport)
            program = self._lower(graph, captured.strategies, samples)
            store = Store(self.module, graph, program, self._transport, sharded=distributed)
            made = Executor(graph, captured.strategies, program, store, self._transport, self._output, self._dropout)
            captured.executors[samples] = made
            if isinstance(self._transport, DistributedTransport) and graph.training and not self._global:
                self._sync = self._sync or BufferSync(graph, program, store, self._transport)
        return captured.executors[samples]

    # -- results --

    @torch.no_grad()
    def _after(self, graph: LayerGraph) -> None:
        for name, step in graph.counters.items():
            self.module.get_buffer(graph.buffers[name]).add_(step)
        if self._sync is not None and graph.training:
            self._sync.written()

    def _nested(self, graph: LayerGraph, results: Sequence[Tensor]) -> Any:
        tensors = iter(results)
        leaves = [leaf.value if isinstance(leaf, Constant) else self._out(next(tensors)) for leaf in graph.user_outputs]
        return pytree.tree_unflatten(leaves, graph.out_spec)

    def _out(self, tensor: Tensor) -> Tensor:
        return tensor if self._output_device is None else tensor.to(self._output_device)

    # -- a module like the one it holds --

    def train(self, mode: bool = True) -> Compiled:
        """Set the module's mode."""
        self.training = mode
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The plain model's state, with its names; under torchrun full tensors, gathered by all ranks together."""
        state = self.module.state_dict(*args, **kwargs)
        return self._sharding.gather(state) if self._sharding else state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a plain model's state, of full tensors; each rank keeps its blocks."""
        state = self._sharding.cut(state_dict) if self._sharding else state_dict
        return self.module.load_state_dict(state, strict, assign)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The module's modules, by their own names."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's children."""
        return self.module.named_children()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Compiled:
        """Move or convert the module; what was captured no longer fits."""
        self.module._apply(fn, recurse)
        self._captured.clear()
        self._traced.clear()
        return self


def _placed(call: Call) -> list[Tensor | None]:
    return [leaf if isinstance(leaf, Tensor) else None for leaf in call.leaves]


def _bound_to_batch(graph: LayerGraph) -> bool:
    """Whether a graph holds for one number of samples only."""
    loose = [
        value
        for layer in graph.layers.values()
        if layer.batch is None and not layer.constant
        for value in layer.outputs
        if value not in graph.batch_dims and graph.values[value].shape
    ]
    return graph.fixed_batch or bool(loose)
