"""A plan as a PyTorch program: DeviceMesh, parallelize_module, fully_shard, DDP and checkpoint, without parplan.

Each of these says less than a plan does. What they cannot say runs otherwise in the program, and is listed in it by
layer.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import gather_groups
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme, Strategy
from parplan.planner.search_space.verifier import check

__all__ = ["TorchProgram", "torch_program"]

_STYLES = {"out-features": "ColwiseParallel", "in-features": "RowwiseParallel"}
_LINE = 100
_MOST_NAMED = 6


@dataclass(frozen=True)
class TorchProgram:
    """The parts of a program that applies a plan.

    Args:
        model: the model's name, and `devices` how many the plan has.
        tensor: devices that share the work on the same samples; the others are copies of them.
        styles: the tensor parallelism of modules, as Python code, by path.
        slices: groups of modules whose weights are gathered from slices together, and whether these are freed behind
            the forward.
        replayed: modules whose activations are computed again.
        micro_batches: parts of a batch that go forward and backward one after another.
        statistics: batch norms take statistics of all samples.
        otherwise: what runs otherwise than in the plan, in sentences.
    """

    model: str
    devices: int
    tensor: int
    styles: Mapping[str, str]
    slices: Sequence[tuple[tuple[str, ...], bool]]
    replayed: Sequence[str]
    micro_batches: int
    statistics: bool
    otherwise: Sequence[str]

    @property
    def data(self) -> int:
        """Copies of the model, on samples of their own."""
        return self.devices // self.tensor

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the weights: those of `slices`, or all as DDP takes no tensor-parallel ones."""
        return bool(self.slices) or (self.tensor > 1 and self.data > 1)

    def text(self) -> str:
        """The program."""
        return "\n".join([*self._head(), *self._imports(), *self._parallelize(), *self._train_step()]) + "\n"

    def _head(self) -> list[str]:
        copies = f"{self.data} {'copies' if self.data > 1 else 'copy'} of the model"
        if self.tensor > 1:
            copies += f", each on {self.tensor} devices whose ranks start from one seed and take the same samples"
        lines = [
            f'"""The plan of parplan for {self.model} on {self.devices} devices, with PyTorch alone.',
            "",
            *textwrap.wrap(
                f"Run it with `torchrun --nproc-per-node {self.devices}` in {self.devices} processes: "
                f"`mesh, model = parallelize(model)` before the optimizer is made. {copies}. A process takes part "
                f"mesh['data'].get_local_rank() of {self.data} of the samples.",
                _LINE,
            ),
        ]
        if self.otherwise:
            lines += ["", "Otherwise than in the plan:"]
            for sentence in self.otherwise:
                lines += textwrap.wrap(sentence, _LINE, initial_indent="- ", subsequent_indent="  ")
        return [*lines, '"""', ""]

    def _imports(self) -> list[str]:
        lines = ["import contextlib"] * (self.micro_batches > 1 and self.data > 1 and not self.sharded)
        lines += ["import os", "", "import torch", "from torch import nn"]
        lines.append("from torch.distributed.device_mesh import DeviceMesh, init_device_mesh")
        if self.sharded:
            lines.append("from torch.distributed.fsdp import fully_shard")
        if self.styles:
            names = sorted({style.partition("(")[0] for style in self.styles.values()})
            lines.append(f"from torch.distributed.tensor.parallel import {', '.join(names)}, parallelize_module")
        if any("Replicate" in style or "Shard" in style for style in self.styles.values()):
            lines.append("from torch.distributed.tensor import Replicate")
        if not self.sharded and self.data > 1:
            lines.append("from torch.nn.parallel import DistributedDataParallel")
        if self.replayed:
            lines.append("from torch.utils.checkpoint import checkpoint")
        return lines

    def _parallelize(self) -> list[str]:
        shape = f"({self.data}, {self.tensor})"
        lines = [
            "", "",
            "def parallelize(model: nn.Module) -> tuple[DeviceMesh, nn.Module]:",
            '    """The devices, and the model as the plan runs it."""',
            '    kind = "cpu"',
            "    if torch.accelerator.is_available():",
            "        kind = torch.accelerator.current_accelerator().type",
            '        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))',
            f'    mesh = init_device_mesh(kind, {shape}, mesh_dim_names=("data", "tensor"))',
            "    model = model.to(kind)",
        ]  # fmt: skip
        if self.statistics:
            lines += [
                '    if kind == "cpu":',
                '        print("torch has no synchronized batch norm for CPUs: statistics are each copy\'s own")',
                "    else:",
                "        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, mesh[\"data\"].get_group())",
            ]  # fmt: skip
        if self.replayed:
            lines += ["    for name in (", *_listed(map(_code, self.replayed), 8), "    ):"]
            lines += ["        recompute(model.get_submodule(name))"]
        if self.styles:
            lines += [
                "    styles = {",
                *(f"        {_code(name)}: {style}," for name, style in self.styles.items()),
                "    }",
            ]
            lines += ['    model = parallelize_module(model, mesh["tensor"], styles)']
        lines += self._spread()
        lines.append("    return mesh, model")
        if self.replayed:
            lines += [
                "", "",
                "def recompute(module: nn.Module) -> None:",
                '    """Compute what the backward needs of a module again instead of keeping it."""',
                "    forward = module.forward",
                "",
                "    def again(*args, **kwargs):",
                "        return checkpoint(forward, *args, use_reentrant=False, **kwargs)",
                "",
                "    module.forward = again",
            ]  # fmt: skip
        return lines

    def _spread(self) -> list[str]:
        """Copies of the model: in slices, or whole."""
        if not self.sharded:
            return ['    model = DistributedDataParallel(model, process_group=mesh["data"].get_group())'] * (
                self.data > 1
            )
        lines = list[str]()
        for freed in dict.fromkeys(freed for _, freed in self.slices):
            groups = [_code(names) for names, own in self.slices if own == freed]
            lines += ["    for names in (", *_listed(groups, 8), "    ):"]
            lines += ["        together = [model.get_submodule(name) for name in names]"]
            lines += [f'        fully_shard(together, mesh=mesh["data"], reshard_after_forward={freed})']
        return [*lines, '    fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)']

    def _train_step(self) -> list[str]:
        if self.micro_batches == 1:
            return []
        backward = ["loss = loss_fn(model(own), wanted) / MICRO_BATCHES", "loss.backward()"]
        if self.sharded:
            backward = ["model.set_requires_gradient_sync(number == MICRO_BATCHES)", *backward]
        elif self.data > 1:
            waits = "with contextlib.nullcontext() if number == MICRO_BATCHES else model.no_sync():"
            backward = [waits, *(f"    {line}" for line in backward)]
        return [
            "", "",
            f"MICRO_BATCHES = {self.micro_batches}",
            "", "",
            "def train_step(model: nn.Module, loss_fn, optimizer, inputs: torch.Tensor, targets: torch.Tensor):",
            '    """A step in equal micro-batches; loss_fn is a mean over samples. The mean loss of this copy."""',
            "    optimizer.zero_grad()",
            "    total = 0.0",
            "    parts = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)",
            "    for number, (own, wanted) in enumerate(parts, 1):",
            *(f"        {line}" for line in backward),
            "        total += loss.detach()",
            "    optimizer.step()",
            "    return total",
        ]  # fmt: skip


def _code(names: str | tuple[str, ...]) -> str:
    """A name, or a tuple of names, as Python code."""
    if isinstance(names, str):
        return json.dumps(names)
    return f"({', '.join(map(json.dumps, names))}{',' * (len(names) == 1)})"


def _listed(words: Iterable[str], indent: int) -> list[str]:
    return [f"{' ' * indent}{word}," for word in words]


def torch_program(graph: LayerGraph, plan: Plan, module: nn.Module) -> TorchProgram:
    """The program of a plan.

    Args:
        module: the captured model, whose modules the program names.

    Raises:
        ParplanError: the plan is for another model or breaks a rule, or has pipeline stages.
    """
    check(plan, graph)
    if plan.schedule != SCHEDULES[0]:
        raise PlanError(
            f"the plan has pipeline stages (schedule {plan.schedule}), whose program would be another training loop; "
            "export a plan without them (parplan analyze --stages 1)"
        )
    return _Translation(graph, plan, module).program()


class _Translation:
    """The search for what torch has for each layer's strategy."""

    def __init__(self, graph: LayerGraph, plan: Plan, module: nn.Module) -> None:
        self._graph, self._plan, self._module = graph, plan, module
        self._paths = {name for name, _ in module.named_modules()}
        self._otherwise: dict[str, list[str]] = {}  # layers, by what is said of them
        # By work: where most of it is on copies, two large layers in shards are better whole in each.
        work: Counter[int] = Counter()
        for name, own in plan.layers.items():
            layer = graph.layers[name]
            work[own.shards if self._style_of(layer, own) else 1] += _products(graph, layer)
        self._tensor = max(work, key=lambda shards: (work[shards], shards), default=1)
        self._cut = {
            name: graph.layers[name]
            for name, own in plan.layers.items()
            if own.shards == self._tensor > 1 and self._style_of(graph.layers[name], own)
        }

    def program(self) -> TorchProgram:
        """The parts of the program."""
        graph, plan = self._graph, self._plan
        styles, slices, replayed = self._styles(), self._slices(), self._replayed()
        self._note_the_others()
        if plan.scheme is not Scheme.GATHER:
            self._say(f"scheme {plan.scheme.value}: all samples go through every layer at once")
        sentences = [f"{_named(names)}: {what}" if names else what for what, names in self._otherwise.items()]
        spread_statistics = any(
            layer.mixes_batch and plan.layers[name].replicas > 1 for name, layer in graph.layers.items()
        )
        return TorchProgram(
            plan.model, plan.devices, self._tensor, styles, slices, replayed, plan.micro_batches, spread_statistics,
            sentences,
        )  # fmt: skip

    def _say(self, what: str, *layers: str) -> None:
        self._otherwise.setdefault(what, []).extend(layers)

    def _style_of(self, layer: Layer, own: Strategy) -> str | None:
        """The style of a linear layer of its own weights that is cut over all devices of each copy; None of others."""
        style = _STYLES.get(own.axis or "") if own.shards > 1 else None
        if style is None or own.shards * own.replicas != self._plan.devices or layer.kind != "linear":
            return None
        axis = layer.axis(own.axis)
        plain = type(self._module.get_submodule(layer.name)) is nn.Linear if layer.name in self._paths else False
        whole = axis is not None and not axis.sections
        return style if plain and whole and all(len(self._graph.users[p]) == 1 for p in layer.parameters) else None

    def _styles(self) -> dict[str, str]:
        """The code of each cut module's style: whole tensors in and out, but where elementwise ops alone join two."""
        kept, found = self._kept_cut(), dict[str, str]()
        for name, layer in self._cut.items():
            style = _STYLES[self._plan.layers[name].axis or ""]
            if style == "ColwiseParallel":
                options = "" if set(layer.outputs) <= kept else "output_layouts=Replicate()"
            else:
                options = "" if set(layer.inputs) <= kept else "input_layouts=Replicate()"
            found[name] = f"{style}({options})"
        return found

    def _kept_cut(self) -> set[str]:
        """Values of which every device of a copy has a part, from one cut module to the next."""
        graph, columns = self._graph, set[str]()
        readers: dict[str, list[Layer]] = defaultdict(list)
        for layer in graph.layers.values():
            for value in layer.inputs:
                readers[value].append(layer)
        for name, layer in self._cut.items():
            columns |= set(layer.outputs) if self._plan.layers[name].axis == "out-features" else set()
        elementwise = {name for name, layer in graph.layers.items() if self._is_elementwise(layer)}
        found = columns | {value for name in elementwise for value in graph.layers[name].outputs}

        def stays(value: str) -> bool:
            maker = graph.layers[graph.producer[value]]
            if value in graph.results or (value not in columns and not set(maker.inputs) <= found):
                return False
            return all(
                (layer.name in self._cut and self._plan.layers[layer.name].axis == "in-features")
                or (layer.name in elementwise and {*layer.inputs, *layer.outputs} <= found)
                for layer in readers[value]
            )

        while gone := {value for value in found if not stays(value)}:
            found -= gone
        return found

    def _is_elementwise(self, layer: Layer) -> bool:
        """Whether a layer computes on parts of its inputs as on the whole: elementwise ops of nothing else, in the plan
        cut as its inputs are."""
        own = self._plan.layers[layer.name]
        axis = layer.axis(own.axis)
        last = all(
            axis is not None and axis.dims.get(value) == len(self._graph.values[value].shape) - 1
            for value in (*layer.inputs, *layer.outputs)
        )
        ops = (node.target for node in layer.nodes if node.op == "call_function")
        pointwise = all(torch.Tag.pointwise in getattr(op, "tags", ()) for op in ops)
        return own.shards == self._tensor > 1 and last and pointwise and not layer.parameters and not layer.buffers

    def _slices(self) -> list[tuple[tuple[str, ...], bool]]:
        """Modules whose weights the plan keeps in slices, by gather group."""
        graph, layers, found = self._graph, self._plan.layers, list[tuple[tuple[str, ...], bool]]()
        taken = set[str]()
        for group in gather_groups(graph):
            for state in STATES[1:]:
                own = [name for name in group if layers[name].state == state and layers[name].replicas > 1]
                paths = dict.fromkeys(
                    graph.parameters[p].rpartition(".")[0] for name in own for p in graph.layers[name].parameters
                )
                modules = tuple(path for path in paths if path not in taken and self._alone(path))
                taken.update(paths)
                found += [(modules, state == STATES[2])] if modules else []
        if found:
            inside = {path for modules, _ in found for path in modules}
            rest = [n for n, layer in graph.layers.items() if layer.parameters and n not in inside]
            if rest:
                self._say("in slices of their own or whole in the plan, here in those of the whole model", *rest)
        return found

    def _alone(self, path: str) -> bool:
        """Whether a module has parameters, none of them in modules inside, and shares none with another module."""
        module = self._module.get_submodule(path)
        owners = Counter(id(p) for one in self._module.modules() for p in one.parameters(recurse=False))
        return (
            bool(path)
            and not any(True for _ in module.children())
            and all(owners[id(p)] == 1 for p in module.parameters())
        )

    def _replayed(self) -> list[str]:
        """The largest modules all of whose layers the plan replays."""
        layers, found = self._plan.layers, list[str]()
        replayed = [name for name in self._graph.layers if layers[name].saved == SAVED[1]]
        for path, _ in self._module.named_modules():
            inside = [name for name in self._graph.layers if path and _is_in(name, path)]
            if len(inside) > 1 and set(inside) <= set(replayed) and not any(_is_in(path, other) for other in found):
                found.append(path)
        left = [name for name in replayed if not any(_is_in(name, path) for path in found)]
        if left:
            self._say("replayed in the plan, here kept: no module has just such layers", *left)
        return found

    def _note_the_others(self) -> None:
        """Say of layers with weights, and of those whose updates differ, what torch has nothing for."""
        for name, layer in self._graph.layers.items():
            own = self._plan.layers[name]
            if not layer.parameters or name in self._cut:
                continue
            if own.shards > 1:
                self._say(f"{own.shards} shards of {own.axis} in the plan, here whole in every process", name)
            elif own.replicas < self._plan.devices // self._tensor:
                self._say(f"{own.replicas} of {self._plan.devices} devices in the plan, here all", name)
            elif own.replicas * self._tensor > self._plan.devices and _products(self._graph, layer):
                self._say("samples over all devices in the plan, here those of a copy compute alike", name)
            if own.update_period is not None:
                self._say(f"updated every {own.update_period} passes in the plan, here once per step", name)


def _products(graph: LayerGraph, layer: Layer) -> int:
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
