"""Parts of layers made ready to be timed: their code at local sizes, with random inputs that make sense to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from parplan.cost_models.ops.op_calls import op_calls
from parplan.cost_models.ops.work import op_work
from parplan.cost_models.profile.records import PartEntry
from parplan.cost_models.sampling import Measurement
from parplan.graph import batch_norm
from parplan.graph.axes.call import Call
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer, local_module, local_shape
from parplan.graph.packed_sequences import longest

__all__ = ["LayerPart", "part_entry", "part_signature"]


def part_signature(graph: LayerGraph, part: LocalLayer) -> str:
    """Text that is equal for parts that do the same work: ops, constants, local shapes, types, gradients."""
    lines = []
    seen: dict[str, int] = {}
    for call in op_calls(graph, part):
        for operand in (*call.inputs, *call.outputs):
            seen.setdefault(operand.name, len(seen))
        tensors = [
            f"{seen[o.name]}:{o.dtype}{list(o.shape)}{'g' if o.requires_grad else ''}"
            for o in (*call.inputs, *call.outputs)
        ]
        constants = fx.node.map_arg(call.arguments, lambda node: seen.get(node.name, "-"))
        lines.append(f"{call.op} {' '.join(tensors)} {constants}")
    return "\n".join(lines + [SHARED] * part.shares_statistics)


def part_entry(graph: LayerGraph, part: LocalLayer, measurement: Measurement) -> PartEntry:
    """A measurement of a part as a profile keeps it; parts of one family differ in sizes only."""
    calls = op_calls(graph, part)
    ops = [call.op for call in calls if not call.is_view]
    types = {str(out.dtype).removeprefix("torch.") for call in calls for out in call.outputs}
    family = " ".join([" ".join(ops) or "view", "/".join(sorted(types)), *[SHARED] * part.shares_statistics])
    kernels = [kernel for call in calls for kernel in op_work(call).forward]
    flops, nbytes = sum(kernel.flops for kernel in kernels), float(sum(kernel.nbytes for kernel in kernels))
    gradients = tuple(operand.requires_grad for call in calls for operand in (*call.inputs, *call.outputs))
    return PartEntry(part_signature(graph, part), family, flops, nbytes, measurement, gradients=gradients)


@dataclass(frozen=True)
class LayerPart:
    """One device's part of a layer, ready to run: its code, and what it takes.

    Args:
        code: takes `tensors` in order and returns a tuple.
        tensors: random inputs that make sense to the code, then parameters and buffers.
        arriving: how many of them come from the layers before, anew in every step.
    """

    code: Callable[..., Sequence[Any]]
    tensors: tuple[Tensor, ...]
    arriving: int

    @classmethod
    def of(cls, graph: LayerGraph, part: LocalLayer, device: torch.device) -> LayerPart:
        """One device's part of a layer on `device`."""
        layer = part.layer
        names = (*layer.inputs, *layer.parameters, *layer.buffers)
        code: Callable[..., Sequence[Any]] = local_module(graph, [part], names, layer.outputs, place=device)
        if part.shares_statistics:
            code = _with_shared_statistics(part, names)
        if graph.autocast is not None:
            code = torch.autocast(device.type, graph.autocast, cache_enabled=False)(code)
        return cls(code, tuple(_tensor(graph, part, name, device) for name in names), len(layer.inputs))

    @classmethod
    def idle(cls, device: torch.device) -> LayerPart:
        """A part that does nothing: its times are those of calling a part, forward and backward."""
        code = fx.Graph()
        code.output((code.call_function(torch.ops.aten.alias.default, (code.placeholder("x"),)),))
        made = fx.GraphModule(torch.nn.Module(), code)
        return cls(made, (torch.zeros(1, device=device, requires_grad=True),), 1)

    def fresh_inputs(self) -> list[Tensor]:
        """Inputs of the code; those that come from layers before are written anew, to new memory."""
        new = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.tensors[: self.arriving]]
        return [*new, *self.tensors[self.arriving :]]


# What tells a batch norm that shares its statistics with other replicas from one by itself: it is other code.
SHARED = "shared statistics"


def _with_shared_statistics(part: LocalLayer, names: Sequence[str]) -> Callable[..., Sequence[Tensor]]:
    """The runtime's batch norm whose replicas exchange statistics, without the exchange."""
    normalise = batch_norm.normaliser(part.layer)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        known = dict(zip(names, tensors, strict=True))
        x = known[part.layer.inputs[0]]
        parts = batch_norm.statistics(x, torch.promote_types(x.dtype, torch.float32))
        return normalise(x, parts.repeat(part.strategy.replicas, 1, 1), known)

    return run


def _tensor(graph: LayerGraph, part: LocalLayer, name: str, device: torch.device) -> Tensor:
    spec = graph.values[name]
    shape = local_shape(graph, part, name)
    if name in graph.constants and tuple(graph.constants[name].shape) == shape:
        return graph.constants[name].to(device)
    time = longest(part.layer.nodes, name)
    if time is not None:
        return torch.full(shape, time, dtype=spec.dtype, device=device)
    bags = [Call(node) for node in part.layer.nodes if op_name(node) == "offset_bags"]
    listed = [str(call.name("indices")) for call in bags if call.name("offsets") == name]
    if listed:  # bags of equal lengths
        return torch.arange(shape[0], device=device).mul(local_shape(graph, part, listed[0])[0]) // max(1, shape[0])
    if not spec.dtype.is_floating_point:
        # Bounded for the ops that use them as an index, through views of them.
        names, bounds = {name}, list[int]()
        for node in (n for n in part.layer.nodes if any(s.name in names for s in n.all_input_nodes)):
            bounds += [_BOUNDS[op_name(node)](node)] if op_name(node) in _BOUNDS else []
            value = node.meta.get("val")
            if isinstance(value, Tensor) and not value.dtype.is_floating_point:
                names.add(node.name)
        return torch.randint(0, min(bounds, default=_FLAGS), shape, device=device).to(spec.dtype)
    # Dimensions from the widest stride to the narrowest, as captured: views and kernels depend on it.
    source = next(s for node in part.layer.nodes for s in node.all_input_nodes if s.name == name)
    strides, order = source.meta["val"].stride(), list(range(len(shape)))
    if all(strides):
        order.sort(key=lambda dim: -strides[dim])
    back = [order.index(dim) for dim in range(len(shape))]
    # Between 0.5 and 1.5: right for variances, harmless for the rest, and no denormal numbers.
    tensor = torch.rand([shape[dim] for dim in order], device=device).add_(0.5).to(spec.dtype).permute(back)
    return tensor.detach().requires_grad_(spec.requires_grad)


_FLAGS = 2  # integers nothing is known about


def _extent(node: fx.Node, dim: Any) -> int:
    """Extent of the first operand along `dim`; of vectors the only one."""
    shape = node.all_input_nodes[0].meta["val"].shape
    return int(shape[dim if len(shape) > 1 else 0])


def _shortest_looked_up(node: fx.Node) -> int:
    """The smallest dimension that `x[i, :, j]` has an index for."""
    source, indices = Call(node)["self"], Call(node)["indices"]
    return min(int(size) for size, index in zip(source.meta["val"].shape, indices, strict=False) if index is not None)


# How many different indices an op takes.
_BOUNDS: dict[str, Callable[[fx.Node], int]] = {
    **dict.fromkeys(("embedding", "embedding_bags", "offset_bags"), lambda node: _extent(node, 0)),
    **dict.fromkeys(
        ("class_rows", "class_terms", "cross_entropy_loss", "nll_loss", "nll_loss_nd"), lambda node: _extent(node, 1)
    ),
    **dict.fromkeys(("gather", "index_select"), lambda node: _extent(node, node.args[1])),
    "expert_products": lambda node: int(Call(node)["count"]),
    "index": _shortest_looked_up,
}
