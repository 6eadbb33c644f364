"""A plan as a PyTorch program: DeviceMesh, parallelize_module, fully_shard, DDP and checkpoint, without parplan.

Each of these says less than a plan does. What they cannot say runs otherwise in the program, and is listed in it by
layer.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parplan.errors import ParplanError, PlanError
from parplan.export.pipeline_stages import Stages, check_inputs, find_stages
from parplan.export.pipeline_text import PipelineProgram
from parplan.export.program_text import TorchProgram
from parplan.graph.axes.loss_ops import BATCH_MEAN, BATCH_SUM
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Axis, Layer, LayerGraph, once_per_graph
from parplan.graph.repeated import gather_groups
from parplan.lowering.holdings import slices
from parplan.lowering.micro_batches import How, combinations
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check

__all__ = ["products", "torch_program"]

aten = torch.ops.aten

# By the axis that is cut; an embedding's rows are its vocabulary.
_STYLES: Mapping[type[nn.Module], Mapping[str, str]] = {
    nn.Linear: {"out-features": "ColwiseParallel", "in-features": "RowwiseParallel"},
    nn.Embedding: {"features": "ColwiseParallel", "vocabulary": "RowwiseParallel"},
}
_MOST_NAMED = 6


def torch_program(
    graph: LayerGraph, plan: Plan, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> TorchProgram:
    """The program of a plan.

    Args:
        module: the captured model, whose modules the program names.
        args, kwargs: that it was captured with.

    Raises:
        ParplanError: the plan is for another model or breaks a rule, or torch cannot express its pipeline stages.
    """
    check(plan, graph)
    inputs = (args, kwargs or {})
    stages = find_stages(graph, plan, module, inputs) if plan.schedule != SCHEDULES[0] else None
    return _Translation(graph, plan, module, inputs, stages).program()


class _Translation:
    """The search for what torch has for each layer's strategy."""

    def __init__(
        self, graph: LayerGraph, plan: Plan, module: nn.Module, inputs: tuple[Any, Any], stages: Stages | None
    ) -> None:
        self._graph, self._plan, self._module, self._inputs, self._stages = graph, plan, module, inputs, stages
        self._devices = len(stages.groups[0]) if stages else plan.devices  # that a layer may be on
        self._paths = dict.fromkeys(name for name, _ in module.named_modules())
        self._otherwise: dict[str, list[str]] = {}  # layers, by what is said of them
        # By work: where most of it is on copies, two large layers in shards are better whole in each.
        work: Counter[int] = Counter()
        styled = {name for name, own in plan.layers.items() if self._has_style(graph.layers[name], own)}
        for name, own in plan.layers.items():
            work[own.shards if name in styled else 1] += products(graph, graph.layers[name])
        self._tensor = max(work, key=lambda shards: (work[shards], shards), default=1)
        self._cut = {
            name: graph.layers[name]
            for name, own in plan.layers.items()
            if name in styled and own.shards == self._tensor
        }

    def program(self) -> TorchProgram:
        """The parts of the program."""
        graph, plan = self._graph, self._plan
        if plan.micro_batches > 1 and not self._stages:
            check_inputs(graph)
        styles, in_slices, replayed, statistics = self._styles(), self._slices(), self._replayed(), self._statistics()
        self._note_the_others()
        self._note_losses()
        devices = self._stages.devices if self._stages else plan.devices
        copies, pieces = self._devices // self._tensor, plan.micro_batches
        if plan.batch % (copies * pieces):
            micro = f" x {pieces} micro-batches" if pieces > 1 else ""
            self._say(
                f"{plan.batch} samples in uneven parts in the plan, here as many as {copies} copies{micro} divide"
            )
        if devices < plan.devices:
            self._say(f"{devices} of {plan.devices} devices have layers in the plan, here processes in their order")
        if plan.scheme is not Scheme.GATHER:
            self._say(f"scheme {plan.scheme.value}: all samples go through every layer at once")
        sentences = [f"{_named(names)}: {what}" if names else what for what, names in self._otherwise.items()]
        # By identity: tied parameters have several names.
        read = {id(self._module.get_parameter(graph.parameters[placeholder])) for placeholder in graph.users}
        trained = {id(parameter) for parameter in self._module.parameters() if parameter.requires_grad}
        parts = (
            plan.model, devices, self._tensor, styles, in_slices, replayed, plan.micro_batches, statistics,
            not trained <= read, list(graph.results) == graph.losses, sentences,
        )  # fmt: skip
        return PipelineProgram(*parts, self._stages) if self._stages else TorchProgram(*parts)

    def _say(self, what: str, *layers: str) -> None:
        self._otherwise.setdefault(what, []).extend(layers)

    def _has_style(self, layer: Layer, own: Strategy) -> bool:
        """Whether torch has a style for a layer: a linear one or an embedding of its own weights, cut over all devices
        of each copy."""
        if own.shards == 1 or layer.name not in self._paths or own.shards * own.replicas != self._devices:
            return False
        module, axis = self._module.get_submodule(layer.name), layer.axis(own.axis)
        if axis is None or axis.sections or own.axis not in _STYLES.get(type(module), ()):
            return False
        # Rows that are not trained or kept short, and sparse gradients, are those of a whole table.
        special = isinstance(module, nn.Embedding) and (
            module.padding_idx is not None or module.max_norm is not None or module.sparse
        )
        alone = all(len(self._graph.users[parameter]) == 1 for parameter in layer.parameters)
        return alone and not special and layer.kind in ("linear", "embedding")

    def _styles(self) -> dict[str, str]:
        """The code of each cut module's style: whole tensors in and out, but where parts go from one to the next."""
        kept, found = self._kept_cut, dict[str, str]()
        for name, layer in self._cut.items():
            style = _STYLES[type(self._module.get_submodule(name))][self._plan.layers[name].axis or ""]
            if style == "ColwiseParallel":
                options = "" if set(layer.outputs) <= kept else "output_layouts=Replicate()"
            else:
                options = "" if set(layer.inputs) <= kept else "input_layouts=Replicate()"
            found[name] = f"{style}({options})"
        return found

    @cached_property
    def _kept_cut(self) -> Set[str]:
        """Values of which every device of a copy has a part, from one cut module to the next.

        The layers between run the module's own code on parts of what they are written for. It is run once with modules
        that are as small as the parts: a layer with other sizes than the plan's parts gets whole tensors instead.
        """
        between = {name for name, layer in self._graph.layers.items() if self._may_keep(layer)}
        while found := self._parts_between(between):
            layers = self._graph.layers
            try:
                small = self._captured_small(found)
                wrong = {
                    name for name in layers.keys() - self._cut.keys() if self._is_other(layers[name], small, found)
                }
                if not wrong:
                    return found
            except ParplanError:  # the code asks for whole sizes somewhere; elementwise ops do not
                wrong = {name for name in between if not _is_elementwise(layers[name])}
            if not between:
                return set()
            made = {value for name in wrong for value in layers[name].outputs}
            readers = {name for name in between if not made.isdisjoint(layers[name].inputs)}
            between -= wrong & between or readers or between
        return set()

    def _axis_of(self, name: str) -> Axis | None:
        return self._graph.layers[name].axis(self._plan.layers[name].axis)

    def _may_keep(self, layer: Layer) -> bool:
        """Whether the plan has a layer without weights on parts of its inputs, which are all cut alike."""
        own, axis = self._plan.layers[layer.name], self._axis_of(layer.name)
        if axis is None or not own.shards == self._tensor > 1 or layer.parameters or axis.partial or axis.repeats:
            return False
        made = [node.name for node in layer.nodes if node.op == "call_function" and not node.all_input_nodes]
        packed = any(sections.over(own.shards) is not None for sections in axis.sections.values())
        return not packed and set(layer.outputs) <= axis.dims.keys() and axis.dims.keys().isdisjoint(made)

    def _parts_between(self, between: Set[str]) -> set[str]:
        """The values that stay in parts if these layers take them."""
        graph = self._graph
        readers: dict[str, list[str]] = defaultdict(list)
        for layer in graph.layers.values():
            for value in layer.inputs:
                readers[value].append(layer.name)
        columns = {name for name in self._cut if self._plan.layers[name].axis == "out-features"}
        found = {value for name in columns | between for value in graph.layers[name].outputs}

        def takes_parts(name: str) -> bool:
            axis, layer = self._axis_of(name), graph.layers[name]
            assert axis is not None
            cut = {value for value in layer.inputs if value in axis.dims}
            return bool(cut) and {*cut, *layer.outputs} <= found and found.isdisjoint({*layer.inputs} - cut)

        def stays(value: str) -> bool:
            maker, own = graph.producer[value], self._axis_of(graph.producer[value])
            if value in graph.results or own is None or not (maker in columns or takes_parts(maker)):
                return False
            for name in readers[value]:
                axis = self._axis_of(name)
                if axis is None or axis.dims.get(value) != own.dims[value]:
                    return False
                if name in columns or not (name in self._cut or (name in between and takes_parts(name))):
                    return False
            return bool(readers[value])

        while gone := {value for value in found if not stays(value)}:
            found -= gone
        return found

    def _captured_small(self, parts: Set[str]) -> LayerGraph:
        """The graph of the model with modules that give and take parts as small as those.

        Raises:
            ParplanError: its code does not run with them.
        """
        small = copy.deepcopy(self._module)
        for name, layer in self._cut.items():
            linear = small.get_submodule(name)
            if parts.isdisjoint({*layer.inputs, *layer.outputs}):
                continue
            assert isinstance(linear, nn.Linear)  # an embedding gives whole tensors
            inside, outside = linear.in_features, linear.out_features
            if self._plan.layers[name].axis == "out-features":
                outside //= self._tensor
            else:
                inside //= self._tensor
            weight = linear.weight
            own = nn.Linear(inside, outside, linear.bias is not None, device=weight.device, dtype=weight.dtype)
            small.set_submodule(name, own)
        return capture(small, *self._inputs)

    def _is_other(self, layer: Layer, small: LayerGraph, parts: Set[str]) -> bool:
        """Whether a layer computes something else beside parts than the plan has: where it takes parts, of other shapes
        than the plan's; other ops, or with other numbers, which Python worked out from the sizes of parts."""
        given = set(layer.outputs) <= parts
        axis = self._axis_of(layer.name) if given else None
        for node in layer.nodes:
            own = _ops_by_name(small).get(node.name)
            if own is None or own.target != node.target or _given(own, given) != _given(node, given):
                return True
            if node.name not in self._graph.values:
                continue
            shape = list(self._graph.values[node.name].shape)
            if axis is not None and node.name in axis.dims:
                shape[axis.dims[node.name]] //= self._tensor
            if list(small.values[node.name].shape) != shape:
                return True
        return False

    @cached_property
    def _inside(self) -> Mapping[str, Set[str]]:
        """The layers inside each module whose forward is called, by its path."""
        found = defaultdict[str, set[str]](set)
        for name, layer in self._graph.layers.items():
            for node in layer.nodes:
                for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                    found[str(path).partition("@")[0]].add(name)
        return found

    def _slices(self) -> list[tuple[tuple[str, ...], bool]] | None:
        """Modules whose weights the plan keeps in slices, by gather group; None where it keeps none."""
        graph, layers, found = self._graph, self._plan.layers, list[tuple[tuple[str, ...], bool]]()
        if not any(slices(graph, layer, layers[name]) for name, layer in graph.layers.items()):
            return None
        taken, alone = set[str](), self._alone()
        for group in gather_groups(graph):
            for state in STATES[1:]:
                own = [name for name in group if layers[name].state == state and layers[name].replicas > 1]
                paths = dict.fromkeys(
                    graph.parameters[p].rpartition(".")[0] for name in own for p in graph.layers[name].parameters
                )
                modules = tuple(path for path in paths if path not in taken and path in alone)
                taken.update(paths)
                found += [(modules, state == STATES[2])] if modules else []
        together = {path for modules, _ in found for path in modules}
        for name, layer in graph.layers.items():
            if not {graph.parameters[p].rpartition(".")[0] for p in layer.parameters} <= together:
                self._say("in slices of their own or whole in the plan, here in those of the whole model", name)
        return found

    def _alone(self) -> set[str]:
        """The modules without modules inside whose parameters one layer alone reads, in their forward."""
        modules = dict(self._module.named_modules())
        owners = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
        leaves = {path: module for path, module in modules.items() if path and next(module.children(), None) is None}
        read = {self._graph.parameters[p]: users for p, users in self._graph.users.items()}

        def alone(path: str, module: nn.Module) -> bool:
            users = [read.get(f"{path}.{name}", ()) for name, _ in module.named_parameters()]
            inside = all(len(own) <= 1 and self._inside[path] >= {*own} for own in users)
            return inside and all(owners[id(p)] == 1 for p in module.parameters())

        return {path for path, module in leaves.items() if path in self._inside and alone(path, module)}

    def _replayed(self) -> list[str]:
        """The largest modules whose forward is called, all of whose layers the plan replays."""
        layers, found = self._plan.layers, list[str]()
        replayed = {name: None for name in self._graph.layers if layers[name].saved == SAVED[1]}
        for path in self._paths if replayed else ():
            inside = self._inside.get(path, set()) if path else set()
            if len(inside) < 2 or not replayed.keys() >= inside or any(_is_in(path, other) for other in found):
                continue
            if self._stages is None or len({self._stages.of[name] for name in inside}) == 1:
                found.append(path)
        left = [name for name in replayed if not any(name in self._inside[path] for path in found)]
        if left:
            self._say("replayed in the plan, here kept: no module has just such layers", *left)
        return found

    def _note_the_others(self) -> None:
        """Say of which layers torch has nothing for the plan's shards, replicas or updates, or other samples."""
        kept, copies = self._kept_cut, self._devices // self._tensor
        for name, layer in self._graph.layers.items():
            own = self._plan.layers[name]
            if own.update_period is not None:
                self._say(f"updated every {own.update_period} passes in the plan, here once per step", name)
            whole = copies > 1 and self._is_of_all_samples(layer)
            if whole:
                self._say("of all samples in the plan, here of those of each copy alone", name)
            if set(layer.outputs) <= kept and _is_random(layer):
                self._say("random numbers of its own for every part in the plan, here the same for all parts", name)
            if name in self._cut or set(layer.outputs) <= kept or whole or not (layer.parameters or own.shards > 1):
                continue
            if own.shards > 1:
                self._say(f"{own.shards} shards of {own.axis} in the plan, here whole in every process", name)
            elif own.replicas < self._devices // self._tensor:
                self._say(f"{own.replicas} of {self._devices} devices in the plan, here all", name)
            elif own.replicas * self._tensor > self._devices and products(self._graph, layer):
                self._say("samples over all devices in the plan, here those of a copy compute alike", name)

    def _is_of_all_samples(self, layer: Layer) -> bool:
        """Whether a layer's numbers follow from all samples together, other than as a mean, which copies average."""
        if layer.batch is not None or layer.mixes_batch or self._graph.batch_dims.keys().isdisjoint(layer.inputs):
            return False
        return any(node.target not in (BATCH_MEAN, BATCH_SUM) for node in layer.nodes)

    def _note_losses(self) -> None:
        """Say in what a loss inside the model, of copies or of stages' micro-batches, differs from that of all samples.

        Raises:
            PlanError: it is a sum over samples, of which copies would take the mean.
        """
        graph, copies = self._graph, self._devices // self._tensor
        if copies == 1 and not (self._stages and self._stages.targets is not None):
            return
        try:
            found = combinations(graph)
        except PlanError as error:
            if not any(self._is_of_all_samples(layer) for layer in graph.layers.values()):  # it is not said yet
                self._say(f"{str(error).partition(';')[0]}: in the plan; here each copy has those of its own")
            return
        parts = "copies'" if copies > 1 else "micro-batches'"
        for value, own in found.items():
            if own.how is How.SUM and copies > 1:
                raise PlanError(
                    f"{graph.label(value)}: it is {own.how.value}, and torch averages gradients over copies of a "
                    "model; return a mean over samples"
                )
            if own.counts:
                self._say(
                    f"of all targets that count in the plan, here the mean of {parts} means", graph.producer[value]
                )

    def _statistics(self) -> bool:
        """Whether torch's synchronized batch norm has the plan's statistics of all samples."""
        found = False
        if self._devices == self._tensor:  # one copy
            return found
        for name, layer in self._graph.layers.items():
            if layer.mixes_batch and self._plan.layers[name].replicas > 1:
                synchronized = name in self._paths and isinstance(self._module.get_submodule(name), _BatchNorm)
                where = "on CPUs" if synchronized else "here"
                self._say(f"statistics of all samples in the plan, {where} of each copy's own", name)
                found = found or synchronized
        return found


@once_per_graph
def _ops_by_name(graph: LayerGraph) -> Mapping[str, fx.Node]:
    return {node.name: node for layer in graph.layers.values() for node in layer.nodes}


# Their numbers are sizes, which are compared as the shapes of what they make.
_SIZED = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.unflatten.int,
}  # fmt: skip


def _given(node: fx.Node, of_parts: bool) -> object:
    """The arguments of an op, with names of values, to be compared; without the sizes of parts."""
    if of_parts and node.target in _SIZED:
        return [one.name for one in node.all_input_nodes]
    return fx.map_arg((node.args, node.kwargs), lambda one: one.name)


def _is_random(layer: Layer) -> bool:
    """Whether a layer draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in layer.nodes)


def _is_elementwise(layer: Layer) -> bool:
    """Whether a layer has elementwise ops alone, which compute on parts as on the whole."""
    ops = (node.target for node in layer.nodes if node.op == "call_function")
    return all(torch.Tag.pointwise in getattr(op, "tags", ()) for op in ops)


def products(graph: LayerGraph, layer: Layer) -> int:
    """Multiply-adds of a layer's matrices, about: each weight, as often as there are positions of results."""
    weights = [graph.values[name] for name in layer.parameters if len(graph.values[name].shape) > 1]
    if layer.kind == "embedding" or not weights or not layer.outputs:
        return 0
    positions = graph.values[layer.outputs[0]].elements // max(1, weights[0].shape[0])
    return sum(weight.elements for weight in weights) * positions


def _is_in(name: str, path: str) -> bool:
    """Whether a layer or module is a module, or in it."""
    return name == path or name.startswith(f"{path}.")


def _named(names: Sequence[str]) -> str:
    """Names of layers for a sentence, not too many."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
