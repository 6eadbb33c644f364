"""Captured graphs of one model, and the plan they run by.

A graph is captured at the first call of each kind, and the plan is asked for once. Under torchrun every rank captures
at the same time and rank 0 alone plans.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from parplan.accelerators import autocast_types
from parplan.compat import pytree
from parplan.errors import CaptureError, PlanError, RuntimeFailure
from parplan.graph.attributes.number_inputs import Number
from parplan.graph.attributes.surroundings import callers_modes
from parplan.graph.capture.capture import capture, computes_alike
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.user_code.module_hooks import HookWatch
from parplan.plan import Plan
from parplan.runtime.calls import ModelCall
from parplan.runtime.programs.planned_memory import PlannedMemory
from parplan.runtime.programs.program_cache import Captured, Options, Programs
from parplan.runtime.programs.rank_agreement import come_together
from parplan.runtime.programs.sample_axes import check_own_samples, no_own_samples
from parplan.runtime.programs.start_values import with_memory
from parplan.runtime.transport.base import Transport

__all__ = ["Captures", "Planner"]

Planner = Callable[[LayerGraph], Plan]

# Graphs kept per kind of call, for different values of the attributes that the forward reads.
KEPT_CAPTURES = 8
# Fewer calls than this between two captures, and capturing is what takes the time.
CALLS_PER_CAPTURE = 50


class Captures:
    """The captured graphs of one model, and its plan.

    Args:
        module: the user's module.
        planner: makes a plan from a captured graph.
        transport: which devices there are.
        options: how programs are lowered.

    Attributes:
        plan: once it is made.
        planned: the shapes that it was made for.
        programs: lowers the graphs.
        repeated: the call before, which another one may repeat (runtime/module/repeated_call.py); None once forgotten.
        progress: shows the phases of the first capture and of planning, if anything does.
    """

    def __init__(self, module: nn.Module, planner: Planner, transport: Transport, options: Options) -> None:
        self._module = module
        self._own = _OwnTensors(module)
        self._hooks = HookWatch(module)
        self._planner = planner
        self._transport = transport
        self._dim = options.dim
        self._grouped = options.groups  # some processes bring the same samples
        self._captured: dict[Hashable, list[Captured]] = defaultdict(list)
        self._forms: dict[Hashable, list[Captured]] = defaultdict(list)  # by what kinds that differ in sizes share
        self._times: dict[Hashable, list[int]] = defaultdict(list)  # of captures, in calls
        self._calls = 0
        self._fixed: set[frozenset[str]] = set()  # numbers that no graph can take as inputs
        self._bound: set[Hashable] = set()  # kinds that are captured for every number of samples
        self._traced: dict[Hashable, LayerGraph] = {}  # captured to be planned for, not yet run
        self._compiling: set[Hashable] = set()  # kinds, whatever their sizes, whose code for compilers is captured
        self.programs = Programs(module, transport, options)
        self.plan: Plan | None = None
        self.planned: PlannedMemory | None = None
        self.progress: AbstractContextManager[Any] = nullcontext()
        self.repeated: Any = None

    def clear(self) -> None:
        """Forget what was captured, but not the plan."""
        self._captured.clear()
        self._forms.clear()
        self._times.clear()
        self._fixed.clear()
        self._bound.clear()
        self._traced.clear()
        self._compiling.clear()
        self._own = _OwnTensors(self._module)
        self._hooks = HookWatch(self._module)
        self.repeated = None
        self.programs.copies.clear()
        if self.programs.sync is not None:
            self.programs.sync.forget()

    def still(self, graph: LayerGraph, modes: Hashable) -> bool:
        """Whether a call of the kind that a graph was found for, in these modes, finds it again; it counts as one."""
        found = not self._own.replaced and self.modes(graph.training) == modes and graph.reads.hold
        if found:
            self._calls += 1
            self._transport.begin_call()
        return found

    def find(self, call: ModelCall, training: bool) -> Captured:
        """The graph for a call, captured and planned for if it is the first of its kind.

        A call that records gradients and needs clearly more memory than was planned is warned of.
        """
        found = self._find(call, training)
        if self.planned is not None and torch.is_grad_enabled():
            self.planned.compare(call, found.graph, found.nbytes, self._supposed_batch(call))
        return found

    def of_other_sizes(self, call: ModelCall, training: bool) -> list[Captured]:
        """The captures of calls that differ from this one in sizes and numbers alone, where it has none itself."""
        kind = self._kind(call, training)
        if self._own.replaced or kind in self._bound or self._captured.get(kind):
            return []
        known = self._forms.get((self.modes(training), call.form), [])
        return [captured for captured in known if captured.graph.reads.hold]

    def serve(self, call: ModelCall, captured: Captured, batch: int) -> bool:
        """Whether a capture is that of a call with `batch` samples; where that is not known it is captured so, too."""
        known = captured.graph.size_branches
        if batch not in captured.batches and known.hold(batch) is None:
            graph = self._traced_at(call, captured.graph.training, batch)
            if graph.size_branches.ops == known.ops and not graph.fixed_batch:
                captured.batches.add(batch)
        return batch in captured.batches or bool(known.hold(batch))

    def recaptured(self, call: ModelCall, training: bool, graph: LayerGraph, plan: Plan) -> Captured:
        """A capture for as many samples as `graph` was made with: what that has wrong for others, this has, too."""
        return self.programs.know(self._traced_at(call, training, graph.batch), plan)

    def _find(self, call: ModelCall, training: bool) -> Captured:
        if self._own.replaced:
            for name, parameter in self._module.named_parameters():
                if not isinstance(parameter, nn.Parameter):
                    raise RuntimeFailure(
                        f"{name} is a plain tensor during this call, as torch.func.functional_call makes it; a "
                        "compiled model runs with its own parameters: use the plain model there, `module` of the "
                        "compiled one"
                    )
            self.clear()
        self._calls += 1
        kind, supposed = self._kind(call, training), self._supposed_batch(call)
        found = self._fitting(kind, supposed)
        if found is None and self.plan is not None and kind not in self._bound:
            # Ranks may meet a kind at different calls (longest sequences differ), so this does not ask the others, but
            # supposes that each brings as many samples as this one.
            self._capture(call, training, supposed, self.plan)
            found = self._fitting(kind, supposed)
        if found is not None:
            return found
        come_together(self._transport, training)
        batch = self._whole_batch(call)
        if self.plan is None:
            # Every rank captures, at the same time; only one plans, and shows how far it is.
            with self.progress if self._transport.rank == 0 else nullcontext() as shown:
                if shown is not None:
                    shown.phase("capture")
                graph = self._trace(call, True, batch, settle=training)
                if training or not graph.settled:
                    self._traced[self._kind(call, True), batch] = graph
                with self._transport.busy():
                    plan = Plan.from_json(self._transport.from_first(lambda: self._planner(graph).to_json()))
            count, ranks = self.programs.device_count, self._transport.processes > 1
            if plan.devices > count or (ranks and plan.devices != count):
                raise PlanError(
                    f"the plan is for {plan.devices} devices, here are {count} {'ranks' if ranks else 'devices'}; "
                    f"start as many, or make a plan for {count}"
                )
            self.plan = plan
            self.planned = PlannedMemory.of(call, graph, None if batch is None else max(plan.batch, batch))
            # Which processes bring the same samples is known only now.
            batch = self._whole_batch(call) if self._grouped else batch
        assert self.plan is not None
        found = self._fitting((kind, batch), batch)
        if found is None:
            self._capture(call, training, batch, self.plan)
            found = self._fitting(kind, batch) or self._fitting((kind, batch), batch)
        assert found is not None
        return found

    def _fitting(self, kind: Hashable, batch: int | None) -> Captured | None:
        """The graph of a kind for these samples whose attributes are those of now; the first to be tried next time."""
        known = self._captured.get(kind, [])
        for index, captured in enumerate(known):
            if captured.graph.reads.hold and captured.serves(batch):
                if index:
                    known.insert(0, known.pop(index))
                return captured
        return None

    def _capture(self, call: ModelCall, training: bool, batch: int | None, plan: Plan) -> None:
        """A new graph, for one number of samples if it is bound to that; none where a known one turns out to be it."""
        kind = self._kind(call, training)
        alike = [one for one in self._captured.get(kind, []) if one.graph.reads.hold and one.graph.size_branches.ops]
        self._make_room((kind, batch) if kind in self._bound else kind)
        graph = self._with_numbers(call, training, batch, self._captured.get(kind, [])) or self._trace(
            call, training, batch
        )
        ops = graph.size_branches.ops
        same = next((one for one in alike if ops == one.graph.size_branches.ops and batch is not None), None)
        if same is not None and not graph.fixed_batch:
            same.batches.add(batch or 1)
            return
        known = self.programs.know(graph, plan)
        self._forms[self.modes(training), call.form].append(known)
        if batch is not None:
            known.batches.add(batch)
        if graph.fixed_batch:
            self._bound.add(kind)
            self._captured[kind, batch].insert(0, known)
        else:
            self._captured[kind].insert(0, known)

    def _with_numbers(
        self, call: ModelCall, training: bool, batch: int | None, known: Sequence[Captured]
    ) -> LayerGraph | None:
        """A graph that takes numbers as inputs which change for the second time; None where there are none, or it
        would not do the same."""
        found: dict[str, Number] = {}
        values: dict[str, list[Any]] = defaultdict(list)
        for captured in known:
            for number, before in captured.graph.reads.changed_numbers():
                found[number.path] = number
                values[number.path].append(before)
        numbers = [*{n.path: n for captured in known for n in captured.graph.numbers.values()}.values()]
        numbers += [found[path] for path, before in values.items() if len(set(before)) > 1]
        paths = frozenset(number.path for number in numbers)
        if not numbers or paths in self._fixed:
            return None
        try:
            graph = self._traced_at(call, training, batch, numbers)
            if any(computes_alike(captured.graph, graph) for captured in known):
                return graph
        except CaptureError:
            pass  # the plain capture that follows says why, if it is not the number
        self._fixed.add(paths)
        return None

    def _make_room(self, kind: Hashable) -> None:
        """Forget the graph that was not used for longest, where there are many for different attributes.

        Raises:
            RuntimeFailure: attributes change so often that capturing them would take the time.
        """
        known = self._captured.get(kind, [])
        self._times[kind].append(self._calls)
        if len(known) < KEPT_CAPTURES:
            return
        paths = Counter(entry.path for captured in known for entry in captured.graph.reads.changed())
        since = self._calls - self._times[kind][-KEPT_CAPTURES - 1]
        if since < KEPT_CAPTURES * CALLS_PER_CAPTURE and paths:
            (path, _), *_ = paths.most_common(1)
            raise RuntimeFailure(
                f"the forward reads the attribute {path}, which has had {len(known) + 1} values in {since + 1} calls, "
                "and the model was captured for each of them; hold it in a buffer (register_buffer) and use it as a "
                "tensor, or pass it as an argument that is a tensor"
            )
        if since < KEPT_CAPTURES * CALLS_PER_CAPTURE:
            raise RuntimeFailure(
                f"the forward does something else for each of {len(known) + 1} numbers of samples in {since + 1} calls,"
                f" and the model was captured for each of them; bring batches of fewer sizes\n"
                f"  at {known[0].graph.size_branches.line}"
            )
        known.pop()

    def _kind(self, call: ModelCall, training: bool) -> Hashable:
        """The facts that two calls which share a graph have in common."""
        return (self.modes(training), call.signature)

    def modes(self, training: bool) -> Hashable:
        """The modes that a graph is captured in."""
        casts = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in autocast_types())
        made = torch.empty(0)  # as the forward makes them
        modes = (self._own.modes(training), torch.is_grad_enabled())
        return (*modes, casts, made.dtype, made.device, self._own.trained, self._hooks.marks)

    def _supposed_batch(self, call: ModelCall) -> int | None:
        """Samples over all processes if each that brings its own brings as many as this one."""
        groups = self.programs.groups(self.plan) if self.plan is not None else None
        times = self._transport.processes if groups is None else groups.replicas
        return max(1, call.batch) * times if call.batch is not None else None

    def _whole_batch(self, call: ModelCall) -> int | None:
        """Samples over all processes, which all have to ask."""
        if call.batch is None:
            return None
        sizes = [size for (size,) in self._transport.gather(call.batch)]
        groups = self.programs.groups(self.plan) if self.plan is not None else None
        whole = sum(sizes if groups is None else (sizes[rank] for rank in groups.column(0)))
        call.check(whole)
        return whole

    def _trace(self, call: ModelCall, training: bool, batch: int | None, settle: bool = True) -> LayerGraph:
        """Capture for `batch` samples, or for 2 where it is 1, as an axis of 1 looks like none at all."""
        key = (self._kind(call, training), batch)
        known = self._traced.pop(key, None)
        if known is not None and known.reads.hold:
            return known
        graph = self._traced_at(call, training, 2 if batch == 1 else batch, settle=settle)
        if batch == 1 and (graph.fixed_batch or not graph.serves(batch)):
            return self._traced_at(call, training, batch, settle=settle)
        return graph

    def _traced_at(
        self,
        call: ModelCall,
        training: bool,
        batch: int | None,
        numbers: Sequence[Number] = (),
        settle: bool = True,
    ) -> LayerGraph:
        # A graph made here also serves calls that record gradients; a checkpoint around this one must not see it made.
        modes = callers_modes(), torch.inference_mode(False), saved_tensors_hooks(*[lambda tensor: tensor] * 2)
        with ExitStack() as stack:
            for mode in (self._transport.busy(), *modes):
                stack.enter_context(mode)
            if self.programs.waiting is not None:
                stack.enter_context(with_memory(self._module, self._transport.physical(self._transport.owned[0])))
            args, kwargs = call.resized(batch) if batch is not None else pytree.tree_unflatten(call.leaves, call.spec)
            kind = self.modes(training), call.nesting
            how: dict[str, Any] = {"training": training, "dim": self._dim, "numbers": numbers, "settle": settle}
            how["compiling"] = kind in self._compiling or None
            try:
                graph = capture(self._module, args, kwargs, **how)
            except CaptureError as error:
                if self._transport.processes == 1 or batch in (None, call.batch):
                    raise
                capture(self._module, *call.arguments, **{**how, "settle": False})  # its own error is about own shapes
                raise no_own_samples(call, batch, str(error)) from error
        if graph.compiling:
            self._compiling.add(kind)
        if self._transport.processes > 1 and not self._grouped:
            check_own_samples(graph)
        return graph


_takes_gradients, _training = attrgetter("requires_grad"), attrgetter("training")


class _OwnTensors:
    """The parameters and buffers that `module` had when this was made.

    A user may replace one (`layer.weight = nn.Parameter(...)`, `load_state_dict(assign=True)`, `to()`); no captured
    graph fits then. Walking over a module at every call costs more than looking here. Attributes that the forward reads
    are watched per captured graph (parplan/graph/attributes/guards.py).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = list(module.parameters())
        self._modules = list(module.modules())
        self._places: list[dict[str, Any]] = [
            place for part in self._modules for place in (part._parameters, part._buffers, part._modules)
        ]
        self._sizes = [len(place) for place in self._places]
        entries = [(place, key, thing) for place in self._places for key, thing in place.items()]
        self._holders = [place for place, _, _ in entries]
        self._names = [key for _, key, _ in entries]
        self._things = [thing for _, _, thing in entries]

    @property
    def replaced(self) -> bool:
        """Whether one of them is no longer the module's, or there are others."""
        if self._sizes != [*map(len, self._places)]:
            return True
        # By functions of C, as every call of the model asks.
        return not all(map(is_, map(dict.get, self._holders, self._names), self._things))

    @property
    def trained(self) -> Hashable:
        """Per parameter whether it takes gradients."""
        return tuple(map(_takes_gradients, self._parameters))

    def modes(self, training: bool) -> Hashable:
        """Per module whether it is in training mode when the whole is captured in this one: users switch parts."""
        if training != self._module.training:
            return training  # capture switches every module
        return tuple(map(_training, self._modules))
