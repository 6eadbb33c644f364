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
from torch import nn

from parplan.errors import ParplanError
from parplan.export.pipeline_stages import Stages, find_stages
from parplan.export.pipeline_text import PipelineProgram
from parplan.export.program_text import TorchProgram
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Axis, Layer, LayerGraph
from parplan.graph.repeated import gather_groups
from parplan.lowering.micro_batches import combinations
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check

__all__ = ["products", "torch_program"]

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
        styles, slices, replayed = self._styles(), self._slices(), self._replayed()
        self._note_the_others()
        devices = self._stages.devices if self._stages else plan.devices
        if devices < plan.devices:
            self._say(f"{devices} of {plan.devices} devices have layers in the plan, here processes in their order")
        if self._stages and self._stages.targets is not None and combinations(graph)[graph.results[0]].counts:
            self._say(
                "of all targets that count in the plan, here the mean of micro-batches' means",
                graph.producer[graph.results[0]],
            )
        if plan.scheme is not Scheme.GATHER:
            self._say(f"scheme {plan.scheme.value}: all samples go through every layer at once")
        sentences = [f"{_named(names)}: {what}" if names else what for what, names in self._otherwise.items()]
        spread_statistics = any(
            layer.mixes_batch and plan.layers[name].replicas > 1 for name, layer in graph.layers.items()
        )
        parts = (
            plan.model, devices, self._tensor, styles, slices, replayed, plan.micro_batches, spread_statistics,
            sentences,
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
            try:
                small = self._captured_small(found)
                other = {name for name in between if not self._is_as_planned(self._graph.layers[name], small, found)}
                if not other:
                    return found
            except ParplanError:  # the code asks for whole sizes somewhere; elementwise ops do not
                if not between:
                    return set()
                other = {name for name in between if not _is_elementwise(self._graph.layers[name])} or between
            between -= other
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

    def _is_as_planned(self, layer: Layer, small: LayerGraph, parts: Set[str]) -> bool:
        """Whether a layer that is given parts has those of the plan inside."""
        axis = self._axis_of(layer.name)
        if axis is None or not set(layer.outputs) <= parts:
            return True  # it has whole tensors
        for name in (node.name for node in layer.nodes if node.name in self._graph.values):
            shape = list(self._graph.values[name].shape)
            if name in axis.dims:
                shape[axis.dims[name]] //= self._tensor
            if name not in small.values or list(small.values[name].shape) != shape:
                return False
        return True

    def _slices(self) -> list[tuple[tuple[str, ...], bool]]:
        """Modules whose weights the plan keeps in slices, by gather group."""
        graph, layers, found = self._graph, self._plan.layers, list[tuple[tuple[str, ...], bool]]()
        taken, alone = set[str](), self._alone()
        for group in gather_groups(graph):
            for state in STATES[1:]:
                own = [name for name in group if layers[name].state == state and layers[name].replicas > 1]
                paths = dict.fromkeys(
                    graph.parameters[p].rpartition(".")[0] for name in own for p in graph.layers[name].parameters
                )
                # In stages a module that is called twice is two modules.
                again = {path for path in paths if self._stages and f"{path}@1" in graph.layers}
                modules = tuple(path for path in paths if path not in taken and path in alone and path not in again)
                taken.update(paths)
                found += [(modules, state == STATES[2])] if modules else []
        if found:
            inside = {path for modules, _ in found for path in modules}
            rest = [n for n, layer in graph.layers.items() if layer.parameters and n not in inside]
            if rest:
                self._say("in slices of their own or whole in the plan, here in those of the whole model", *rest)
        return found

    def _alone(self) -> set[str]:
        """The modules without modules inside that share no parameter with another one."""
        modules = dict(self._module.named_modules())
        owners = Counter(id(p) for module in modules.values() for p in module.parameters(recurse=False))
        leaves = {path: module for path, module in modules.items() if path and next(module.children(), None) is None}
        return {path for path, module in leaves.items() if all(owners[id(p)] == 1 for p in module.parameters())}

    def _replayed(self) -> list[str]:
        """The largest modules all of whose layers the plan replays."""
        layers, found = self._plan.layers, list[str]()
        replayed = {name: None for name in self._graph.layers if layers[name].saved == SAVED[1]}
        for path in self._paths if replayed else ():
            inside = [name for name in self._graph.layers if path and _is_in(name, path)]
            if len(inside) < 2 or not replayed.keys() >= set(inside) or any(_is_in(path, other) for other in found):
                continue
            if self._stages is None or len({self._stages.of[name] for name in inside}) == 1:
                found.append(path)
        left = [name for name in replayed if not any(_is_in(name, path) for path in found)]
        if left:
            self._say("replayed in the plan, here kept: no module has just such layers", *left)
        return found

    def _note_the_others(self) -> None:
        """Say of which layers torch has nothing for the plan's shards, replicas or updates."""
        kept = self._kept_cut
        for name, layer in self._graph.layers.items():
            own = self._plan.layers[name]
            if name in self._cut or set(layer.outputs) <= kept or not (layer.parameters or own.shards > 1):
                continue
            if own.shards > 1:
                self._say(f"{own.shards} shards of {own.axis} in the plan, here whole in every process", name)
            elif own.replicas < self._devices // self._tensor:
                self._say(f"{own.replicas} of {self._devices} devices in the plan, here all", name)
            elif own.replicas * self._tensor > self._devices and products(self._graph, layer):
                self._say("samples over all devices in the plan, here those of a copy compute alike", name)
            if own.update_period is not None:
                self._say(f"updated every {own.update_period} passes in the plan, here once per step", name)


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
