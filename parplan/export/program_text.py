"""The text of a PyTorch program that applies a plan without parplan."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["FIND_DEVICE", "RECOMPUTE", "TorchProgram", "code", "listed"]

_LINE = 100

FIND_DEVICE = (
    '    kind = "cpu"',
    "    if torch.accelerator.is_available():",
    "        kind = torch.accelerator.current_accelerator().type",
    '        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))',
)
RECOMPUTE = (
    "", "",
    "def recompute(module: nn.Module) -> None:",
    '    """Compute what the backward needs of a module again instead of keeping it."""',
    "    forward = module.forward",
    "",
    "    def again(*args, **kwargs):",
    "        return checkpoint(forward, *args, use_reentrant=False, **kwargs)",
    "",
    "    module.forward = again",
)  # fmt: skip


@dataclass(frozen=True)
class TorchProgram:
    """The parts of a program that applies a plan.

    Args:
        model: the model's name, and `devices` how many the plan has.
        tensor: devices that share the work on the same samples; the others are copies of them.
        styles: the tensor parallelism of modules, as Python code, by path.
        slices: groups of modules whose weights are gathered from slices together, and whether these are freed behind
            the forward; None where all weights are whole. All other weights are one group then.
        replayed: modules whose activations are computed again.
        micro_batches: parts of a batch that go forward and backward one after another.
        statistics: batch norms take statistics of all samples.
        unused: the forward uses some parameter that is trained not at all.
        loss_inside: the model returns its loss.
        otherwise: what runs otherwise than in the plan, in sentences.
    """

    model: str
    devices: int
    tensor: int
    styles: Mapping[str, str]
    slices: Sequence[tuple[tuple[str, ...], bool]] | None
    replayed: Sequence[str]
    micro_batches: int
    statistics: bool
    unused: bool
    loss_inside: bool
    otherwise: Sequence[str]

    @property
    def data(self) -> int:
        """Copies of the model, on samples of their own."""
        return self.devices // self.tensor

    @property
    def sharded(self) -> bool:
        """Whether `fully_shard` holds the weights: in slices as in the plan, or as DDP has no tensor-parallel ones."""
        return self.slices is not None or (self.tensor > 1 and self.data > 1)

    def text(self) -> str:
        """The program."""
        return "\n".join([*self._head(), *self._imports(), *self._parallelize(), *self._train_step()]) + "\n"

    def _use(self) -> str:
        """How to run it."""
        copies = f"{self.data} copies of the model" if self.data > 1 else "One copy of the model"
        if self.tensor > 1:
            each = ", each" if self.data > 1 else ""
            copies += f"{each} on {self.tensor} devices whose ranks start from one seed and take the same samples"
        elif self.sharded:
            copies += ", whose ranks start from one seed, as each keeps a part of its own weights"
        part = "Every process takes the whole batch."
        if self.data > 1:
            part = f"Of {self.data} equal parts of a batch, a process takes number mesh['data'].get_local_rank()."
        return (
            f"Run it in {self.devices} processes, such as `torchrun --nproc-per-node {self.devices}` starts, with "
            f"`mesh, model = parallelize(model)` before the optimizer is made. {copies}. {part}"
        )

    def _head(self) -> list[str]:
        lines = [
            f'"""The plan of parplan for {self.model} on {self.devices} devices, with PyTorch alone.',
            "",
            *textwrap.wrap(self._use(), _LINE),
        ]
        if self.otherwise:
            lines += ["", "Otherwise than in the plan:"]
            for sentence in self.otherwise:
                sentence = sentence.replace("\\", r"\\").replace('"""', r"\"\"\"")  # names may have any characters
                lines += textwrap.wrap(sentence, _LINE, initial_indent="- ", subsequent_indent="  ")
        return [*lines, '"""', ""]

    def _imports(self) -> list[str]:
        lines = ["import contextlib"] * (self.micro_batches > 1 and self.data > 1 and not self.sharded)
        lines += ["import os", "", "import torch", "from torch import nn"]
        lines.append("from torch.distributed.device_mesh import DeviceMesh, init_device_mesh")
        if self.sharded:
            lines.append("from torch.distributed.fsdp import fully_shard")
        if any("Replicate" in style for style in self.styles.values()):
            lines.append("from torch.distributed.tensor import Replicate")
        if self.styles:
            names = sorted({style.partition("(")[0] for style in self.styles.values()})
            lines.append(f"from torch.distributed.tensor.parallel import {', '.join(names)}, parallelize_module")
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
            *FIND_DEVICE,
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
            lines += ["    for name in (", *listed(map(code, self.replayed), 8), "    ):"]
            lines += ["        recompute(model.get_submodule(name))"]
        if self.styles:
            lines += [
                "    styles = {",
                *(f"        {code(name)}: {style}," for name, style in self.styles.items()),
                "    }",
            ]
            lines += ['    model = parallelize_module(model, mesh["tensor"], styles)']
        lines += self._spread()
        lines.append("    return mesh, model")
        if self.replayed:
            lines += RECOMPUTE
        return lines

    def _spread(self) -> list[str]:
        """Copies of the model: in slices, or whole."""
        if not self.sharded:
            unused = ", find_unused_parameters=True" * self.unused
            made = f'DistributedDataParallel(model, process_group=mesh["data"].get_group(){unused})'
            return [f"    model = {made}"] * (self.data > 1)
        lines = list[str]()
        for freed, groups in self._gather_groups().items():
            lines += ["    for names in (", *listed(groups, 8), "    ):"]
            lines += ["        together = [model.get_submodule(name) for name in names]"]
            lines += [f'        fully_shard(together, mesh=mesh["data"], reshard_after_forward={freed})']
        return [*lines, '    fully_shard(model, mesh=mesh["data"], reshard_after_forward=False)']

    def _gather_groups(self) -> Mapping[bool, Sequence[str]]:
        """The groups of `slices` as Python code, by whether their weights are freed behind the forward."""
        found: dict[bool, list[str]] = {}
        for names, freed in self.slices or ():
            found.setdefault(freed, []).append(code(names))
        return found

    def _train_step(self) -> list[str]:
        if self.micro_batches == 1:
            return []
        call = "model(*map(part, inputs), **{name: part(one) for name, one in named.items()})"
        loss = call if self.loss_inside else f"loss_fn({call}, part(targets))"
        backward = [f"loss = {loss} / MICRO_BATCHES", "loss.backward()"]
        if self.sharded:
            backward = ["model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)", *backward]
        elif self.data > 1:
            waits = "with contextlib.nullcontext() if number == MICRO_BATCHES - 1 else model.no_sync():"
            backward = [waits, *(f"    {line}" for line in backward)]
        given = "" if self.loss_inside else "loss_fn, "
        wanted = "" if self.loss_inside else ", targets"
        means = "the model returns a mean" if self.loss_inside else "loss_fn is a mean"
        takes = "the model's inputs, a tensor or a tuple of them, and those by keyword"
        return [
            "", "",
            f"MICRO_BATCHES = {self.micro_batches}",
            "", "",
            f"def train_step(model: nn.Module, {given}optimizer, inputs{wanted}, **named):",
            '    """A step in equal micro-batches: the mean loss of this copy.',
            "",
            "    Args:",
            f"        inputs, named: {takes}.",
            '    """',
            f"    # Each micro-batch counts alike: {means} over samples.",
            "    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)",
            f"    for one in (*inputs{wanted}, *named.values()):",
            "        if len(one) % MICRO_BATCHES:",
            '            raise ValueError(f"{len(one)} samples have no {MICRO_BATCHES} equal micro-batches")',
            "    optimizer.zero_grad()",
            "    total = 0.0",
            "    for number in range(MICRO_BATCHES):",
            "",
            "        def part(one):",
            "            return one.chunk(MICRO_BATCHES)[number]",
            "",
            *(f"        {line}" for line in backward),
            "        total += loss.detach()",
            "    optimizer.step()",
            "    return total",
        ]  # fmt: skip


def code(names: str | tuple[str, ...]) -> str:
    """A name, or a tuple of names, as Python code."""
    if isinstance(names, str):
        return json.dumps(names, ensure_ascii=False)  # Python has no pairs of surrogates
    return f"({', '.join(map(code, names))}{',' * (len(names) == 1)})"


def listed(words: Iterable[str], indent: int) -> list[str]:
    """Words as lines of a tuple."""
    return [f"{' ' * indent}{word}," for word in words]
