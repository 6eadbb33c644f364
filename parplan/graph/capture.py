"""Capture: torch.export to an fx graph of ATen ops, put into the form the planner and runtime share.

The exported program is functionalised and a few ops are put back into their plain form (batch norm
that updates its statistics in place, dropout), so that generated code runs at eager speed.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from parplan.errors import CaptureError
from parplan.graph.batch_changes import BatchChanges, batch_changes
from parplan.graph.canonical import canonicalise
from parplan.graph.layer_graph import Layer, LayerGraph, TensorSpec
from parplan.graph.layers import build_layers, owner_of

__all__ = ["batch_of", "capture"]


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    dim: int = 0,
    check_batch: bool = True,
) -> LayerGraph:
    """Capture `model` called with `args` and `kwargs` as a graph of layers.

    Nothing is computed and nothing of the model changes; its mode is put back. Tensors whose
    dimension `dim` equals the batch (the first such tensor's) are split over replicas, others shared.

    Args:
        training: capture the training graph (else the evaluation graph).
        check_batch: capture a second batch size as well and compare, so that a layer whose constants
            depend on the batch is never given replicas.

    Raises:
        CaptureError: the model cannot be exported; the text names the line.
    """
    kwargs = dict(kwargs or {})
    leaves, in_spec = pytree.tree_flatten((tuple(args), kwargs))
    batch = batch_of(leaves, dim)
    exported = _export(model, _resized(leaves, in_spec, dim, batch, batch), training)
    changes = BatchChanges()
    if check_batch and batch is not None:
        twice = _export(model, _resized(leaves, in_spec, dim, batch, 2 * batch), training)
        changes = batch_changes(exported.graph, twice.graph)
    return _assemble(model, exported, leaves, in_spec, _Mode(batch, dim, training, changes))


def batch_of(leaves: Sequence[Any], dim: int = 0) -> int | None:
    """Samples in one step: the size along `dim` of the first tensor that has it; None without one."""
    return next((leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim), None)


def _is_sample(leaf: Any, dim: int, batch: int | None) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == batch


def _resized(leaves: Sequence[Any], spec: Any, dim: int, batch: int | None, wanted: int | None) -> Any:
    """(args, kwargs) of the same shapes with `wanted` samples; memory of large tensors is never touched."""
    changed = [_like(leaf, dim, wanted) if _is_sample(leaf, dim, batch) else leaf for leaf in leaves]
    return pytree.tree_unflatten(changed, spec)


def _like(leaf: torch.Tensor, dim: int, size: int | None) -> torch.Tensor:
    shape = [size if d == dim and size is not None else s for d, s in enumerate(leaf.shape)]
    make = torch.empty if leaf.is_floating_point() else torch.zeros
    return make(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)


def _export(model: nn.Module, call: Any, training: bool) -> ExportedProgram:
    args, kwargs = call
    modes = {module: module.training for module in model.modules()}
    if training != model.training:
        model.train(training)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, args, kwargs, strict=False)
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error
    finally:
        for module, mode in modes.items():
            module.training = mode


def _explain(model: nn.Module, error: Exception) -> str:
    """The user's line and the reason, without the exporter's own frames."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename.replace("\\", "/")]
    own = [f for f in frames if "/parplan/" not in f.filename.replace("\\", "/")] or frames
    where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "(line unknown)"
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(model).__name__} cannot be captured: {type(error).__name__}: {reason}\n"
        f"  at {where}\n"
        "  torch.export must be able to trace the forward; branches on tensor values are the usual cause "
        "(use torch.where, or move them out of the model)"
    )


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


@dataclass(frozen=True)
class _Mode:
    """How a capture was asked for, and what changes with the batch."""

    batch: int | None
    dim: int
    training: bool
    changes: BatchChanges


def _assemble(
    model: nn.Module, exported: ExportedProgram, leaves: Sequence[Any], in_spec: Any, mode: _Mode
) -> LayerGraph:
    program = _functional(exported)
    inputs = _inputs(program)
    graph = canonicalise(program)
    users = [name for name in inputs.users if name is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    samples = {n: mode.dim for n, leaf in zip(users, tensors, strict=True) if _is_sample(leaf, mode.dim, mode.batch)}
    state = frozenset(inputs.buffers) | frozenset(inputs.constants)
    leaf_paths = frozenset(name for name, module in model.named_modules() if name and not list(module.children()))
    built = build_layers(
        graph.graph, leaf_paths, frozenset(inputs.parameters), state, samples, mode.changes.unexplained
    )
    trainable = {name for name, path in inputs.parameters.items() if model.get_parameter(path).requires_grad}
    trainable |= {name for name, leaf in zip(users, tensors, strict=True) if leaf.requires_grad}
    return LayerGraph(
        model=type(model).__name__,
        digraph=built.digraph,
        layers=built.layers,
        values=_specs(graph.graph, trainable),
        producer=built.producer,
        batch=mode.batch,
        batch_dims=built.batch_dims,
        user_inputs=tuple(inputs.users),
        user_outputs=graph.outputs,
        in_spec=in_spec,
        out_spec=program.call_spec.out_spec,
        parameters=_shared(model, inputs.parameters),
        buffers=inputs.buffers,
        constants=inputs.constants,
        buffer_updates=graph.buffer_updates,
        counters=graph.counters,
        training=mode.training,
        fixed_batch=any(_bound_to_batch(layer, mode.changes) for layer in built.layers.values()),
    )


def _functional(exported: ExportedProgram) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: ExportedProgram = exported.run_decompositions({})
        return program


def _bound_to_batch(layer: Layer, changes: BatchChanges) -> bool:
    """Whether a layer's code holds only for the captured batch."""
    owner = owner_of(layer.nodes[0])
    return owner in changes.unexplained or (layer.batch is None and owner in changes.all)


def _shared(model: nn.Module, parameters: Mapping[str, str]) -> dict[str, str]:
    """Dotted names by placeholder; placeholders of tied parameters get the first of their names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {placeholder: first[id(model.get_parameter(path))] for placeholder, path in parameters.items()}


def _specs(graph: fx.Graph, trainable: set[str]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            flows = node.name in trainable or any(_flows(source, specs) for source in node.all_input_nodes)
            grad = flows and value.dtype.is_floating_point and node.target is not torch.ops.aten.detach.default
            specs[node.name] = TensorSpec(tuple(value.shape), value.dtype, grad)
        elif node.op == "call_function":
            flows = any(_flows(source, specs) for source in node.all_input_nodes)
            node.meta["parplan_flows"] = flows
    return specs


def _flows(node: fx.Node, specs: Mapping[str, TensorSpec]) -> bool:
    return specs[node.name].requires_grad if node.name in specs else bool(node.meta.get("parplan_flows"))
