"""Capture: torch.export to an fx graph of ATen ops, put into the form the planner and runtime share.

The exported program is functionalised and a few ops are put back into their plain form (batch norm
that updates its statistics in place, dropout), so that generated code runs at eager speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind

from parplan.compat import pytree
from parplan.errors import CaptureError
from parplan.graph.attributes.containers import register_caches
from parplan.graph.attributes.number_inputs import Number, as_tensors
from parplan.graph.attributes.recording import Recorder
from parplan.graph.batch_changes import BatchChanges, batch_changes, everything_changes
from parplan.graph.capture.batch_reductions import split_batch_reductions
from parplan.graph.capture.canonical import canonicalise
from parplan.graph.capture.merged_samples import sample_places, unflatten_between_layers
from parplan.graph.capture.model_export import Exported, ExportRequest, export_call
from parplan.graph.capture.whole_batch import WholeBatch, unplaced, whole_batch
from parplan.graph.export.functionalise import functionalise
from parplan.graph.layer_graph import LayerGraph, TensorSpec
from parplan.graph.layers import build_layers, owner_of
from parplan.graph.local import names_sizes
from parplan.graph.user_code.functions import known_sites
from parplan.graph.user_code.opaque import OpaqueCalls

__all__ = ["batch_of", "capture"]


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    dim: int = 0,
    check_batch: bool = True,
    numbers: Sequence[Number] = (),
) -> LayerGraph:
    """Capture `model` called with `args` and `kwargs` as a graph of layers.

    Nothing is computed and nothing of the model changes; its mode is put back. Tensors whose
    dimension `dim` equals the batch (the first such tensor's) are split over replicas, others shared.

    Args:
        training: capture the training graph (else the evaluation graph).
        check_batch: capture a second batch size as well and compare, so that a layer whose constants
            depend on the batch is never given replicas.

        numbers: attributes that the graph takes as inputs.

    Raises:
        CaptureError: the model cannot be exported; the text names the line.
    """
    register_caches()
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    call = ExportRequest(model, leaves, in_spec, batch_of(leaves, dim), dim, training, numbers)
    with as_tensors(numbers) as tensors:
        first = export_call(call, call.resized(call.alike, call.batch), call.sites, call.opaque)
        exported, recorder = first.program, first.recorder
        samples, changes, bound = call.alike, BatchChanges(), WholeBatch()
        if check_batch and call.batch is not None:
            samples, changes, twice = _compare(call, exported, recorder)
            bound = whole_batch(exported, twice, call.batch)
        if numbers:
            _check_inputs(call, exported, recorder, tensors)
    graph = _assemble(call, first, samples, changes, bound)
    inputs = {tensor.data_ptr(): number for number, tensor in zip(numbers, tensors, strict=True)}
    known = {name: inputs[t.data_ptr()] for name, t in graph.constants.items() if t.data_ptr() in inputs}
    return replace(graph, numbers=known)


def batch_of(leaves: Sequence[Any], dim: int = 0) -> int | None:
    """Samples in one step: the size along `dim` of the first tensor that has it; None without one."""
    return next((leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim), None)


def _check_inputs(
    call: ExportRequest, exported: ExportedProgram, recorder: Recorder, tensors: Sequence[Tensor]
) -> None:
    """Refuse numbers of which the graph still has a value of its own: with other numbers it is another graph.

    Raises:
        CaptureError: Python code or an op takes a number as such.
    """
    for tensor in tensors:
        tensor.mul_(3).add_(7)
    opaque = OpaqueCalls()
    other = export_call(call, call.resized(call.alike, call.batch), {}, opaque).program
    own = {tensor.data_ptr() for tensor in tensors}
    mine, others = exported.constants, other.constants
    fixed = mine.keys() == others.keys() and all(
        torch.equal(mine[name], others[name]) for name in mine if mine[name].data_ptr() not in own
    )
    changes = batch_changes(exported.graph_module, other.graph_module)
    same = changes | call.opaque.changes(exported.graph_module, opaque) == BatchChanges()
    if recorder.host_reads.any or not fixed or not same:
        raise CaptureError(f"{', '.join(n.path for n in call.numbers)}: the forward does not only calculate with it")


def _compare(
    call: ExportRequest, exported: ExportedProgram, recorder: Recorder
) -> tuple[frozenset[int], BatchChanges, ExportedProgram | None]:
    """Which leaves hold samples, what changes with their number, and the capture that shows it.

    Usually all leaves of the batch's size do. One may have that size by chance (a bias beside the
    samples): then the model does not fit a larger batch of it, and is tried with that leaf unchanged.
    """
    first, *others = sorted(call.alike)
    without = [call.alike - {other} for other in others]
    batch, reasons = call.batch or 0, []
    # A smaller batch is tried last: there may be no room for twice the batch, which says nothing about replicas.
    for other_batch in (2 * batch, *([batch // 2] if batch > 3 else [])):
        for samples in dict.fromkeys([call.alike, *without, frozenset({first})]):
            opaque = OpaqueCalls()
            try:
                other = export_call(call, call.resized(samples, other_batch), {}, opaque)
            except CaptureError as error:
                reasons.append(f"for {other_batch}: {error}")
                continue
            changes = batch_changes(exported.graph_module, other.program.graph_module)
            changes = changes | call.opaque.changes(exported.graph_module, opaque)
            if not recorder.stores_like(other.recorder):
                changes = replace(changes, results=True)
            return samples, changes, other.program
    return call.alike, everything_changes(exported.graph_module, reasons[0]), None


@dataclass(frozen=True)
class _Inputs:
    """Placeholders of an exported program by what they are."""

    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, torch.Tensor]
    users: list[str | None]


def _inputs(program: ExportedProgram) -> _Inputs:
    found = _Inputs({}, {}, {}, [])
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        if spec.kind is InputKind.PARAMETER:
            found.parameters[name] = str(spec.target)
        elif spec.kind is InputKind.BUFFER:
            found.buffers[name] = str(spec.target)
        elif spec.kind is InputKind.USER_INPUT:
            found.users.append(None if isinstance(spec.arg, ConstantArgument) else name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            found.constants[name] = program.constants[str(spec.target)]
        else:
            raise CaptureError(f"input {name!r} of kind {spec.kind.name} is not supported in a captured model")
    return found


def _assemble(
    call: ExportRequest,
    first: Exported,
    sample_leaves: frozenset[int],
    changes: BatchChanges,
    bound: WholeBatch,
) -> LayerGraph:
    model, exported, recorder = call.model, first.program, first.recorder
    call.opaque.settle(exported)
    with known_sites(call.opaque.sites):
        functional = functionalise(exported)
    call.opaque.mark(functional.program.graph)
    program = functional.program
    inputs = _inputs(program)
    own_name = {id(parameter): name for name, parameter in model.named_parameters()}  # of the names of a tied parameter
    tied = {placeholder: own_name[id(model.get_parameter(path))] for placeholder, path in inputs.parameters.items()}
    graph = canonicalise(functional, tied)
    samples = {name: call.dim for i, name in enumerate(inputs.users) if name is not None and i in sample_leaves}
    moved = split_batch_reductions(graph.graph, samples)
    graph.outputs = tuple(moved.get(one, one) if isinstance(one, str) else one for one in graph.outputs)
    graph.buffer_updates = {buffer: moved.get(value, value) for buffer, value in graph.buffer_updates.items()}
    state = frozenset(inputs.buffers) | frozenset(inputs.constants)
    # The call of a leaf module is one layer; attention's projection is part of the same call.
    whole = (nn.MultiheadAttention,)
    leaf_paths = frozenset(
        n for n, m in model.named_modules() if n and (isinstance(m, whole) or not list(m.children()))
    )
    given = (leaf_paths, frozenset(graph.parameters), state, samples, changes.unexplained)
    built, flattened = build_layers(graph.graph, *given), dict[str, int]()
    if built.merged:
        kept, places = frozenset(graph.buffer_updates.values()), sample_places(graph.graph, samples)
        replaced = unflatten_between_layers(graph.graph, built, places, kept)
        flattened = dict(replaced.values())
        graph.outputs = tuple(replaced[r][0] if isinstance(r, str) and r in replaced else r for r in graph.outputs)
        built = build_layers(graph.graph, *given)
    fixed = changes.results
    for layer in built.layers.values():  # whose code holds only for the captured batch
        if layer.batch is None:
            # `flatten` names no sizes, what it becomes without in-place changes does.
            named = layer.reached and any(map(names_sizes, layer.nodes))
            paired = any(a.dims.get(value) == dim for a in layer.axes for value, dim in built.batch_dims.items())
            fixed = fixed or named or paired or owner_of(layer.nodes[0]) in changes.all
        else:
            # A value that grows with the batch although no sample reaches it keeps its captured size.
            dims = layer.batch.dims
            fixed = fixed or any(node.name in changes.resized and node.name not in dims for node in layer.nodes)
    users = zip(inputs.users, call.leaves, strict=True)
    trainable = {name for name, path in graph.parameters.items() if model.get_parameter(path).requires_grad}
    trainable |= {name for name, leaf in users if name is not None and isinstance(leaf, Tensor) and leaf.requires_grad}
    return LayerGraph(
        model=type(model).__name__,
        digraph=built.digraph,
        layers=built.layers,
        values=_specs(graph.graph, trainable),
        producer=built.producer,
        batch=call.batch,
        batch_dims=built.batch_dims,
        user_inputs=tuple(inputs.users),
        user_outputs=graph.outputs,
        in_spec=call.in_spec,
        out_spec=program.call_spec.out_spec,
        parameters=graph.parameters,
        buffers=inputs.buffers,
        constants=inputs.constants,
        buffer_updates=graph.buffer_updates,
        counters=graph.counters,
        training=call.training,
        sites=call.sites,
        one_batch=changes.one_batch,
        flattened=flattened,
        sample_indices=bound.indices,
        unplaced=unplaced(graph.outputs, bound.grown, built, flattened),
        late=functional.late,
        reads=recorder.guards,
        stored=tuple(recorder.stored),
        containers=first.containers,
        fixed_batch=fixed,
    )


def _specs(graph: fx.Graph, trainable: set[str]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            flows = node.name in trainable or any(_flows(source, specs) for source in node.all_input_nodes)
            differentiable = value.dtype.is_floating_point or value.dtype.is_complex
            grad = flows and differentiable and node.target is not torch.ops.aten.detach.default
            specs[node.name] = TensorSpec(tuple(value.shape), value.dtype, grad)
        elif node.op == "call_function":
            flows = any(_flows(source, specs) for source in node.all_input_nodes)
            node.meta["parplan_flows"] = flows
    return specs


def _flows(node: fx.Node, specs: Mapping[str, TensorSpec]) -> bool:
    return specs[node.name].requires_grad if node.name in specs else bool(node.meta.get("parplan_flows"))
