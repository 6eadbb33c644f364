"""The text of a PyTorch program that trains a plan's pipeline stages without parplan."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.export.pipeline_stages import Stages
from parplan.export.program_text import FIND_DEVICE, RECOMPUTE, TorchProgram, code, listed

__all__ = ["PipelineProgram"]

_WHOLE_GRADIENTS = (
    "        for weight in own.parameters():",
    "            if weight.grad is not None:",
    '                dist.all_reduce(weight.grad, group=mesh["data"].get_group())',
    '                weight.grad /= mesh["data"].size()',
)
_TIED = (
    "    for names in TIED:  # torch hands no weight from stage to stage: each has its own, from equal values",
    "        for name in names:",
    '            path, _, last = name.rpartition(".")',
    "            weight = nn.Parameter(model.get_parameter(name).detach().clone())",
    "            setattr(model.get_submodule(path), last, weight)",
)
_TIED_GRADIENTS = (
    "        for weights, group in tied:",
    "            total = sum(weight.grad{local} for weight in weights)",
    "            dist.all_reduce(total, group=group)",
    "            for weight in weights:",
    "                weight.grad{local}.copy_(total)",
)
_TIED_GROUPS = (
    "    tied, weights = [], {name: weight for stage in own for name, weight in stage.named_parameters()}",
    "    for names in TIED:",
    "        rows = sorted({number % GROUPS for number in names.values()})",
    "        for ranks in mesh.mesh[rows].T.tolist():",
    "            group = dist.new_group(ranks)",
    "            if dist.get_rank() in ranks:",
    "                mine = [name for name, number in names.items() if number in numbers]",
    "                tied.append(([weights[name] for name in mine], group))",
)

_LOSS = (
    "    loss_part = pipe.build_stage(STAGES, torch.device(kind), group).submod",
    "    graph, pipe.num_stages = pipe.split_gm.graph, STAGES",
    '    (*_, call), (output,) = graph.find_nodes(op="call_module"), graph.find_nodes(op="output")',
    "    # The last stage returns what the loss reads, beside the targets.",
    '    output.args = (tuple(one for one in call.args if one.op != "placeholder"),)',
    '    place = [one.op for one in call.args].index("placeholder")',
    "    graph.erase_node(call)",
    "",
    "    def loss_fn(results, targets):",
    "        given = list(results) if isinstance(results, (tuple, list)) else [results]",
    "        given.insert(place, targets)",
    "        found = loss_part(*given)",
    "        return found[0] if isinstance(found, (tuple, list)) else found",
    "",
)


@dataclass(frozen=True)
class PipelineProgram(TorchProgram):
    """A program with pipeline stages.

    Args:
        stages: where the model is cut, and the order of micro-batches.
    """

    stages: Stages

    @property
    def data(self) -> int:
        """Copies of each stage, on samples of their own."""
        return len(self.stages.groups[0])

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the weights."""
        return self.slices is not None

    @property
    def _with_loss(self) -> bool:
        """Whether the model has its loss inside."""
        return self.stages.targets is not None

    @property
    def _one_input(self) -> bool:
        return {*self.stages.inputs, self.stages.targets} <= {0, None}

    def _use(self) -> str:
        loss_fn, targets = ("", "") if self._with_loss else ("loss_fn, ", ", targets")
        part = "Every process is given the whole batch."
        if self.data > 1:
            part = (
                f"Of {self.data} equal parts of a batch, which the copies of a stage share, a process takes number "
                "mesh['data'].get_local_rank()."
            )
        return (
            f"Run it in {self.devices} processes, such as `torchrun --nproc-per-node {self.devices}` starts, whose "
            f"weights start from one seed, with `mesh, model, step = parallelize(model, {loss_fn}inputs)` before the "
            f"optimizer is made: model then has this process's of {self.stages.count} stages, in training or "
            f"evaluation mode as it was before. `loss = step(inputs{targets})` between optimizer.zero_grad() and "
            f"optimizer.step() goes forward and backward in {self.micro_batches} micro-batches. {part}"
        )

    def _imports(self) -> list[str]:
        lines = ["import os", "", "import torch"]
        lines += ["import torch.distributed as dist"] * (bool(self.stages.tied) or (not self.sharded and self.data > 1))
        lines += ["from torch import nn", f"from torch.distributed.device_mesh import {', '.join(self._mesh_names())}"]
        if self.sharded:
            lines.append("from torch.distributed.fsdp import fully_shard")
        lines.append(f"from torch.distributed.pipelining import {self.stages.schedule}, SplitPoint, pipeline")
        if self.replayed:
            lines.append("from torch.utils.checkpoint import checkpoint")
        return lines

    def _ranks(self) -> list[int]:
        return [device for group in self.stages.groups for device in group]

    def _mesh_names(self) -> list[str]:
        return ["DeviceMesh"] + ["init_device_mesh"] * (self._ranks() == list(range(self.devices)))

    def _parallelize(self) -> list[str]:
        groups, stages = len(self.stages.groups), self.stages
        mesh = f'init_device_mesh(kind, ({groups}, {self.data}), mesh_dim_names=("stage", "data"))'
        if len(self._mesh_names()) == 1:
            mesh = f'DeviceMesh(kind, {[list(group) for group in stages.groups]}, mesh_dim_names=("stage", "data"))'
        first = "(inputs.chunk(MICRO_BATCHES)[0],)"
        if not self._one_input:
            first = "tuple(one.chunk(MICRO_BATCHES)[0] for one in inputs)"
        lines = [
            "", "",
            f"MICRO_BATCHES = {self.micro_batches}",
            f"STAGES, GROUPS = {stages.count}, {groups}  # stage k is on group k % GROUPS of devices",
            "CUTS = {  # where stages begin, but the first",
            *(f"    {code(path)}: SplitPoint.{where}," for path, where in stages.cuts.items()),
            "}",
            *self._tied_names(),
            "", "",
            f"def parallelize(model: nn.Module, {'' if self._with_loss else 'loss_fn, '}inputs):",
            '    """The devices, the stages of this process, and a step of all micro-batches.',
            "",
            "    Args:",
            *["        loss_fn: of a micro-batch's results and targets; a mean over samples."] * (not self._with_loss),
            f"        inputs: {'one' if self._one_input else 'a tuple'} such as steps have, with as many samples.",
            '    """',
            *FIND_DEVICE,
            f"    mesh = {mesh}",
            *(_TIED if stages.tied else ()),
            f"    pipe = pipeline(model, {first}, split_spec=CUTS)",
            '    numbers = range(mesh["stage"].get_local_rank(), STAGES, GROUPS)',
            '    group = mesh["stage"].get_group()',
            *(_LOSS if self._with_loss else ()),
            "    stages = [pipe.build_stage(number, torch.device(kind), group) for number in numbers]",
            "    own = nn.ModuleList(stage.submod for stage in stages)",
            *self._inside(),
            f"    schedule = {stages.schedule}(stages{'[0]' * (stages.count == groups)}, MICRO_BATCHES, loss_fn)",
        ]  # fmt: skip
        return [*lines, *self._step(), *(RECOMPUTE if self.replayed else ())]

    def _tied_names(self) -> list[str]:
        if not self.stages.tied:
            return []
        rows = (
            "{" + ", ".join(f"{code(name)}: {stage}" for name, stage in one.items()) + "}" for one in self.stages.tied
        )
        return ["TIED = (  # weights that stages share, by name, and the stage that has them", *listed(rows, 4), ")"]

    def _inside(self) -> list[str]:
        """Recomputation, slices and shared weights of the stages of one process."""
        lines = list[str]()
        if self.replayed or self.slices:
            lines.append("    modules = {path: module for stage in own for path, module in stage.named_modules()}")
        if self.replayed:
            lines += ["    for name in (", *listed(map(code, self.replayed), 8), "    ):"]
            lines += ["        if name in modules:", "            recompute(modules[name])"]
        for freed, groups in self._gather_groups().items():
            lines += ["    for names in (", *listed(groups, 8), "    ):"]
            lines += ["        if together := [modules[name] for name in names if name in modules]:"]
            lines += [f'            fully_shard(together, mesh=mesh["data"], reshard_after_forward={freed})']
        if self.sharded:
            lines += ["    for stage in own:"]
            lines += ['        fully_shard(stage, mesh=mesh["data"], reshard_after_forward=False)']
        return lines + list(_TIED_GROUPS if self.stages.tied else ())

    def _step(self) -> list[str]:
        local = ".to_local()" if self.sharded else ""
        inputs = "inputs" if self._one_input else ", ".join(f"inputs[{place}]" for place in self.stages.inputs)
        targets = "targets"
        if self._with_loss:
            targets = "inputs" if self._one_input else f"inputs[{self.stages.targets}]"
        return [
            "",
            f"    def step(inputs{'' if self._with_loss else ', targets'}):",
            '        """Gradients of all micro-batches; the mean loss of this copy, in a process of the last stage."""',
            "        losses = []",
            f"        schedule.step({inputs}, target={targets}, losses=losses, return_outputs=False)",
            *(_WHOLE_GRADIENTS if self.data > 1 and not self.sharded else ()),
            *(line.format(local=local) for line in (_TIED_GRADIENTS if self.stages.tied else ())),
            "        return torch.stack(losses).mean().detach() if losses else None",
            "",
            "    return mesh, own, step",
        ]

    def _train_step(self) -> list[str]:
        return []
