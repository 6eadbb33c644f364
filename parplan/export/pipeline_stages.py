"""Pipeline stages of a plan as cuts of `torch.distributed.pipelining.pipeline`, which traces a model and splits it.

torch cuts the order in which a model runs, where a module begins or ends, and hands values from a stage to the next one
alone. A plan that needs more is refused by layer. Its cuts are tried on a copy of the model: each parameter has to be
in its stage of the plan.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.lowering.micro_batches import How, combinations
from parplan.lowering.pipeline.stages import StageNumbers, stage_numbers
from parplan.plan import Plan

__all__ = ["Stages", "check_inputs", "find_stages", "schedule_class"]

BEGINNING, END = "BEGINNING", "END"


@dataclass(frozen=True)
class Stages:
    """The stages of a program.

    Args:
        groups: processes of each group, which are copies of its stages; stage k is on group k modulo the groups.
        of: stage per layer, as it runs.
        cuts: for each stage but the first, the module where it begins: at its "BEGINNING", or behind its "END"; with a
            loss inside the model, also where that begins.
        schedule: torch's class.
        tied: parameters that modules of several stages share: the stage of each of their names.
        inputs: of the model, those that the first stage reads.
        targets: the input that the model's loss reads; None where the loss is outside.
    """

    groups: tuple[tuple[int, ...], ...]
    of: Mapping[str, int]
    cuts: Mapping[str, str]
    schedule: str
    tied: Sequence[Mapping[str, int]]
    inputs: tuple[int, ...]
    targets: int | None

    @property
    def devices(self) -> int:
        """Processes of all groups, one for each device that has layers, in their order."""
        return sum(map(len, self.groups))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.cuts) + (self.targets is None)


def find_stages(graph: LayerGraph, plan: Plan, module: nn.Module, inputs: tuple[Any, Any]) -> Stages | None:
    """The stages of a plan with a schedule; None where all its layers are on one group of devices.

    Raises:
        PlanError: torch's pipelining cannot express them.
    """
    numbers = stage_numbers(graph, plan.layers)
    if numbers.count == 1:
        return None
    _check_groups(plan, numbers)
    used = sorted(chain.from_iterable(numbers.groups))
    groups = tuple(tuple(map(used.index, group)) for group in numbers.groups)
    order = sorted(node for layer in graph.layers.values() for node in layer.nodes)
    bounds = _bounds(graph, numbers, {node: place for place, node in enumerate(order)})
    ends = [cut.place for cut in _cuts(graph, order, bounds)]
    makes = {node.name: sum(place >= end for end in ends) for place, node in enumerate(order)}
    of = {name: max(makes[node.name] for node in layer.nodes) for name, layer in graph.layers.items()}
    targets, loss = _loss(graph, order, makes, numbers.count)
    cuts = {cut.path: cut.where for cut in _cuts(graph, order, [*bounds, *loss])}
    _check_values(graph, order, makes, numbers.count, targets)
    args = _micro_batch(graph, plan, inputs, len(numbers.groups[0]))
    found = Stages(groups, of, cuts, schedule_class(plan, numbers), _tied(graph, module, of), (), targets)
    return replace(found, inputs=_tried(graph, found, module, args))


def _loss(
    graph: LayerGraph, order: Sequence[fx.Node], makes: Mapping[str, int], count: int
) -> tuple[int | None, list[tuple[int, int]]]:
    """The input that a loss inside the model reads in the last stage, and between which ops the loss begins.

    torch gives inputs to the first stage and targets to the loss: the program calls what is behind the last weights its
    loss function.
    """
    late = [(place, source) for place, node in enumerate(order) if makes[node.name] for source in node.all_input_nodes
            if source.name in graph.user_inputs]  # fmt: skip
    if not late or list(graph.results) != graph.losses:
        return None, []
    (after, targets), weighted = late[0], [layer for layer in graph.layers.values() if layer.parameters]
    before = order.index(max(node for layer in weighted for node in layer.nodes))
    if before >= after or any(source is not targets for _, source in late) or makes[order[after].name] < count - 1:
        return None, []
    how = combinations(graph)[graph.losses[0]].how
    if how is not How.MEAN:
        raise PlanError(
            f"{graph.label(graph.losses[0])}: the loss is {how.value}, and torch's schedules average over "
            "micro-batches; return a mean over samples"
        )
    return graph.user_inputs.index(targets.name), [(before, after)]


def _check_groups(plan: Plan, numbers: StageNumbers) -> None:
    """Refuse what torch's stages have no form for, of equally many devices each."""
    told = [len(group) for group in numbers.groups]
    if len(set(told)) > 1:
        raise PlanError(
            f"the plan's stages are on groups of {', '.join(map(str, told))} devices; torch's have equally many: plan "
            "with a number of stages that divides the devices (parplan analyze --stages)"
        )
    for name, own in plan.layers.items():
        if own.shards > 1:
            raise PlanError(
                f"{name}: {own.shards} shards of {own.axis} in a plan with pipeline stages, whose program has whole "
                "layers in each stage; give the layer replicas instead, or export a plan without stages "
                "(parplan analyze --stages 1)"
            )


def schedule_class(plan: Plan, numbers: StageNumbers) -> str:
    """torch's name for the plan's order: with several stages per group, 1f1b is interleaved if they divide evenly."""
    groups, forward_first = len(numbers.groups), plan.schedule == "gpipe"
    if numbers.count == groups:
        return "ScheduleGPipe" if forward_first else "Schedule1F1B"
    return "ScheduleLoopedBFS" if forward_first or plan.micro_batches % groups else "ScheduleInterleaved1F1B"


def _bounds(graph: LayerGraph, numbers: StageNumbers, place: Mapping[fx.Node, int]) -> list[tuple[int, int]]:
    """For each stage but the first, the last op in front of it and its first one, by place in the forward.

    Ops that follow from no weights (positions, masks, targets) may be in any stage.
    """
    counted = dict[str, Layer]()
    for name, layer in graph.layers.items():
        if layer.parameters or any(graph.producer.get(value) in counted for value in layer.inputs):
            counted[name] = layer
    if missing := set(range(numbers.count)) - {numbers.of[name] for name in counted}:
        raise PlanError(
            f"stage {min(missing)} of {numbers.count} has no layer in the plan, whose layers go back to the devices of "
            f"stage 0; torch's pipeline has equally many stages on each of {len(numbers.groups)} groups of devices: "
            f"give layers to devices {list(numbers.groups[min(missing) % len(numbers.groups)])} there too"
        )
    found = []
    for stage in range(1, numbers.count):
        before = max((max(layer.nodes), name) for name, layer in counted.items() if numbers.of[name] < stage)
        after = min((min(layer.nodes), name) for name, layer in counted.items() if numbers.of[name] >= stage)
        if after[0] < before[0]:
            raise PlanError(
                f"{after[1]}: it is in stage {numbers.of[after[1]]} and runs before {before[1]}, of stage "
                f"{numbers.of[before[1]]}; torch cuts a model in the order in which it runs: put {after[1]} into stage "
                f"{numbers.of[before[1]]}, or {before[1]} into stage {numbers.of[after[1]]}"
            )
        found.append((place[before[0]], place[after[0]]))
    return found


@dataclass(frozen=True)
class _Cut:
    """The module at whose beginning or end a stage begins, and the place of its first op."""

    path: str
    where: str
    place: int


def _cuts(graph: LayerGraph, order: Sequence[fx.Node], bounds: Sequence[tuple[int, int]]) -> list[_Cut]:
    """The module at whose beginning or end each stage begins: the largest one that is called once."""
    calls, places = defaultdict[str, set[str]](set), defaultdict[str, list[int]](list)
    for place, node in enumerate(order):
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            path = str(path).partition("@")[0]
            calls[path].add(key)
            places[path].append(place)
    once = sorted((path for path in calls if path and len(calls[path]) == 1), key=lambda path: path.count("."))
    found = list[_Cut]()
    for stage, (before, after) in enumerate(bounds, 1):
        free = [path for path in once if all(path != cut.path for cut in found)]
        begun = [path for path in free if before < places[path][0] <= after]
        ended = [path for path in free if before <= places[path][-1] < after]
        if not begun and not ended:
            ahead, behind = (
                next(name for name, layer in graph.layers.items() if order[place] in layer.nodes)
                for place in (before, after)
            )
            raise PlanError(
                f"{behind}: stage {stage} begins there, and no module that is called once begins with it or ends in "
                f"front of it, which is where torch cuts a model; give {ahead} and {behind} the same devices, or make "
                "one of them a module of its own"
            )
        if begun:
            found.append(_Cut(begun[0], BEGINNING, places[begun[0]][0]))
        else:
            found.append(_Cut(ended[0], END, places[ended[0]][-1] + 1))
    return found


def _check_values(
    graph: LayerGraph, order: Sequence[fx.Node], makes: Mapping[str, int], count: int, targets: int | None
) -> None:
    """Refuse values that go elsewhere than from a stage to the next one, but targets, which go to the loss."""
    readers = {node.name: name for name, layer in graph.layers.items() for node in layer.nodes}
    for node in order:
        stage = makes[node.name]
        for source in node.all_input_nodes:
            reader = readers[node.name]
            if source.name in graph.user_inputs and stage and targets is None:
                raise PlanError(
                    f"{reader}: it reads input {source.name} in stage {stage}; torch's pipeline gives inputs to the "
                    "first stage, and one to a loss that is all that the model returns, behind its last weights: put "
                    f"{reader} into stage 0, or leave the loss out of the model"
                )
            if source.name in makes and stage - makes[source.name] > 1:
                raise PlanError(
                    f"{reader}: in stage {stage} it reads a result of {readers[source.name]}, of stage "
                    f"{makes[source.name]}; torch's pipeline hands values to the next stage alone: put both into "
                    "stages that follow each other, or plan with fewer stages (parplan analyze --stages)"
                )
    for value in graph.results:
        if makes.get(value, count - 1) < count - 1:
            raise PlanError(
                f"{readers[value]}: the model returns its result, made in stage {makes[value]}; torch's pipeline "
                "returns those of the last stage alone: return nothing else, or plan with fewer stages"
            )
    if graph.out_spec.type not in (None, tuple):
        raise PlanError(
            f"{graph.model} returns a {graph.out_spec.type.__name__}; torch's pipeline returns tensors: return one, or "
            "a tuple of them"
        )


def _micro_batch(graph: LayerGraph, plan: Plan, inputs: tuple[Any, Any], copies: int) -> tuple[torch.Tensor, ...]:
    """The arguments of the first micro-batch of a copy."""
    args, kwargs = inputs
    if kwargs or not all(isinstance(one, torch.Tensor) for one in args):
        raise PlanError(
            f"{graph.model} is called with {'keyword arguments' if kwargs else 'arguments that are no tensors'}; a "
            "program with pipeline stages has tensors in order: wrap the model in a module that takes those alone"
        )
    samples = max(1, plan.batch // copies // plan.micro_batches)
    check_inputs(graph)
    return tuple(one[:samples] for one in args)


def check_inputs(graph: LayerGraph) -> None:
    """Refuse inputs without samples along their first dimension, where programs cut micro-batches.

    Raises:
        PlanError: there is one.
    """
    for name in graph.user_inputs:
        if name is None or graph.batch_dims.get(name) != 0:
            raise PlanError(
                f"input {name} of {graph.model} has no samples along its first dimension, where a program without "
                "parplan cuts micro-batches; make it a buffer, or move the samples there"
            )


def _tied(graph: LayerGraph, module: nn.Module, of: Mapping[str, int]) -> list[dict[str, int]]:
    """Parameters of several stages: of each of their names the stage of its module.

    torch leaves one of them unused in the other's stage, and sums no gradients.
    """
    found = []
    for placeholder, name in graph.parameters.items():
        users = {user: of[user] for user in graph.users.get(placeholder, ())}
        if len(set(users.values())) <= 1:
            continue
        same = _names(module, name)
        stages = dict[str, int]()
        for one in same:
            path = one.rpartition(".")[0]
            inside = {stage for user, stage in users.items() if user.partition("@")[0] == path}
            if len(inside) == 1:
                stages[one] = inside.pop()
        if set(stages.values()) != set(users.values()) or len(stages) < len(same):
            told = ", ".join(f"{user} (stage {stage})" for user, stage in users.items())
            raise PlanError(
                f"{name}: it is used by {told}; torch splits parameters by module: give each stage a module of its own "
                "that has the parameter, or all of these layers the same devices"
            )
        found.append(stages)
    return found


def _names(module: nn.Module, name: str) -> list[str]:
    """All names of a parameter."""
    own = module.get_parameter(name)
    return [other for other, parameter in module.named_parameters(remove_duplicate=False) if parameter is own]


def _tried(graph: LayerGraph, stages: Stages, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """The inputs of torch's first stage, in its order, when torch has split a copy of the model.

    Raises:
        PlanError: it cannot, or a parameter is elsewhere than in the plan.
    """
    own = copy.deepcopy(module)
    for name in (name for names in stages.tied for name in names):
        path, _, leaf = name.rpartition(".")
        setattr(own.get_submodule(path), leaf, nn.Parameter(own.get_parameter(name).detach().clone()))
    cuts = {path: SplitPoint[where] for path, where in stages.cuts.items()}
    try:
        pipe = pipeline(own, args, split_spec=cuts)
    except RuntimeError as error:
        raise PlanError(
            f"torch cannot split {graph.model} into stages: {error}; export a plan without them "
            "(parplan analyze --stages 1)"
        ) from error
    held = [{name for name, _ in pipe.get_stage_module(k).named_parameters()} for k in range(pipe.num_stages)]
    apart = {name: stage for names in stages.tied for name, stage in names.items()}
    for placeholder, name in graph.parameters.items():
        for user in graph.users.get(placeholder, ()):
            here = [other for other in _names(module, name) if apart.get(other, stages.of[user]) == stages.of[user]]
            if len(held) != len(stages.cuts) + 1 or held[stages.of[user]].isdisjoint(here):
                raise PlanError(
                    f"{name}: the plan has it in stage {stages.of[user]} of {stages.count}, and torch's split of "
                    f"{graph.model} into {len(held)} has not; export a plan without stages "
                    "(parplan analyze --stages 1)"
                )
    inputs = pipe.info().graph.find_nodes(op="placeholder")
    calls = pipe.info().graph.find_nodes(op="call_module")
    for number, call in enumerate(calls[1:], 1):
        makers = {one.args[0] if one.op == "call_function" else one for one in call.all_input_nodes}
        given = {calls[number - 1]}
        if number == stages.count and stages.targets is not None:  # the loss
            given.add(inputs[stages.targets])
        if others := sorted(map(str, makers - given)):
            raise PlanError(
                f"stage {number} of torch's split of {graph.model} reads {', '.join(others)}, and gets values from "
                f"stage {number - 1} alone; export a plan without stages (parplan analyze --stages 1)"
            )
    read = tuple(inputs.index(node) for node in calls[0].args)
    return tuple(sorted(read)) if len(read) == len(inputs) else read  # of all inputs torch keeps the model's order
