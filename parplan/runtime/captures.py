"""Captured graphs of one model, and the plan they run by.

A graph is captured at the first call of each kind, and the plan is asked for once. Under torchrun every rank captures
at the same time and rank 0 alone plans.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parplan.compat import pytree
from parplan.errors import PlanError
from parplan.graph.capture import capture
from parplan.graph.hooks import HookWatch
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.runtime.calls import Call
from parplan.runtime.distributed import DistributedTransport
from parplan.runtime.programs import Captured, Options, Programs
from parplan.runtime.tensors import OwnTensors
from parplan.runtime.transport import Transport

__all__ = ["Captures", "Planner", "bound_to_batch"]

Planner = Callable[[LayerGraph], Plan]


class Captures:
    """What is known of one model.

    Args:
        module: the user's module.
        planner: makes a plan from a captured graph.
        transport: which devices there are.
        options: how programs are lowered.

    Attributes:
        plan: once it is made.
        programs: what graphs are lowered to.
    """

    def __init__(self, module: nn.Module, planner: Planner, transport: Transport, options: Options) -> None:
        self._module = module
        self._own = OwnTensors(module)
        self._hooks = HookWatch(module)
        self._planner = planner
        self._transport = transport
        self._dim = options.dim
        self._captured: dict[Hashable, Captured] = {}
        self._bound: set[Hashable] = set()  # kinds that are captured for every number of samples
        self._traced: dict[Hashable, LayerGraph] = {}  # captured to be planned for, not yet run
        self.programs = Programs(module, transport, options)
        self.plan: Plan | None = None

    def clear(self) -> None:
        """Forget what was captured, but not the plan."""
        self._captured.clear()
        self._bound.clear()
        self._traced.clear()
        self._own.look_up()
        self._hooks = HookWatch(self._module)
        self.programs.copies.clear()
        if self.programs.sync is not None:
            self.programs.sync.forget()

    def find(self, call: Call, training: bool) -> Captured:
        """The graph for a call, captured and planned for if it is the first of its kind."""
        if self._own.replaced:
            self.clear()
        kind = self._kind(call, training)
        if self.plan is not None and kind not in self._captured and kind not in self._bound:
            # Ranks may meet a kind at different calls (longest sequences differ), so this does not ask the others.
            self._capture(call, training, self._supposed_batch(call), self.plan)
        if kind in self._captured:
            return self._captured[kind]
        batch = self._whole_batch(call)
        if (kind, batch) not in self._captured:
            self._capture(call, training, batch, self.plan or self._make_plan(call, batch))
        return self._captured[kind if kind in self._captured else (kind, batch)]

    def _capture(self, call: Call, training: bool, batch: int | None, plan: Plan) -> None:
        """A new graph, for one number of samples if it is bound to that."""
        kind, graph = self._kind(call, training), self._trace(call, training, batch)
        known = self.programs.know(graph, plan)
        if bound_to_batch(graph):
            self._bound.add(kind)
            self._captured[kind, batch] = known
        else:
            self._captured[kind] = known

    def _supposed_batch(self, call: Call) -> int | None:
        """Samples over all processes if each brings as many as this one."""
        if call.batch is None:
            return None
        groups = self.programs.groups(self.plan) if self.plan is not None else None
        return max(1, call.batch) * (self._transport.processes if groups is None else groups.replicas)

    def _kind(self, call: Call, training: bool) -> Hashable:
        """What has to agree for two calls to share a graph."""
        casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
        return (self._own.modes(training), casts, self._own.trained, self._hooks.marks, call.signature)

    def _whole_batch(self, call: Call) -> int | None:
        """Samples over all processes, which all have to ask."""
        if call.batch is None:
            return None
        whole = call.batch
        if isinstance(self._transport, DistributedTransport):
            sizes = self._transport.gather_sizes(call.batch)
            groups = self.programs.groups(self.plan) if self.plan is not None else None
            whole = sum(sizes if groups is None else (sizes[rank] for rank in groups.column(0)))
        call.check(whole)
        return whole

    def _trace(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        """Capture for `batch` samples, or for 2 where it is 1, as an axis of 1 looks like none at all."""
        key = (self._kind(call, training), batch)
        if key in self._traced:
            return self._traced.pop(key)
        graph = self._traced_at(call, training, 2 if batch == 1 else batch)
        if batch == 1 and bound_to_batch(graph):
            return self._traced_at(call, training, batch)
        return graph

    def _traced_at(self, call: Call, training: bool, batch: int | None) -> LayerGraph:
        sharding = self.programs.sharding
        whole: AbstractContextManager[None] = sharding.whole_shapes() if sharding else nullcontext()
        # What is made here also serves calls that record gradients; a checkpoint around this one must not see it made.
        with whole, torch.inference_mode(False), saved_tensors_hooks(_as_it_is, _as_it_is):
            args, kwargs = call.resized(batch) if batch is not None else pytree.tree_unflatten(call.leaves, call.spec)
            return capture(self._module, args, kwargs, training=training, dim=self._dim)

    def _make_plan(self, call: Call, batch: int | None) -> Plan:
        # Every rank captures, at the same time; only one plans.
        graph = self._trace(call, True, batch)
        self._traced[self._kind(call, True), batch] = graph
        distributed = isinstance(self._transport, DistributedTransport)

        def planned() -> str:
            return self._planner(graph).to_json()

        text = self._transport.from_first(planned) if isinstance(self._transport, DistributedTransport) else planned()
        plan = Plan.from_json(text)
        count = self.programs.device_count
        if plan.devices > count or (distributed and plan.devices != count):
            raise PlanError(
                f"the plan is for {plan.devices} devices, here are {count} {'ranks' if distributed else 'devices'}; "
                f"start as many, or make a plan for {count}"
            )
        self.plan = plan
        return plan


def bound_to_batch(graph: LayerGraph) -> bool:
    """Whether a graph holds for one number of samples only."""
    loose = [
        value
        for layer in graph.layers.values()
        if layer.batch is None and not layer.constant
        for value in layer.outputs
        if value not in graph.batch_dims and graph.values[value].shape
    ]
    return graph.fixed_batch or bool(loose)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
