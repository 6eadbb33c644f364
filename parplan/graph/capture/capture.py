"""Capture: torch.export to an fx graph of ATen ops, put into the form the planner and runtime share.

The exported program is functionalised and a few ops are put back into their plain form (batch norm
that updates its statistics in place, dropout), so that generated code runs at eager speed.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from threading import RLock
from typing import Any

import torch
from torch import Tensor, fx, nn

from parplan.compat import mended_export, overload_name, pytree, schema_of
from parplan.errors import CaptureError
from parplan.graph.attributes.containers import register_caches
from parplan.graph.attributes.first_call import Change
from parplan.graph.attributes.number_inputs import Number, as_tensors
from parplan.graph.attributes.size_branches import SizeBranches
from parplan.graph.batch_changes import BatchChanges, batch_changes, changed_constants, everything_changes, ops_digest
from parplan.graph.capture.batch_reductions import split_batch_reductions
from parplan.graph.capture.canonical import Canonical, canonicalise
from parplan.graph.capture.equal_rows import compute_rows_once, counted_samples, sample_sources
from parplan.graph.capture.merged_heads import merged_heads
from parplan.graph.capture.merged_samples import unflatten_between_layers
from parplan.graph.capture.model_export import Exported, ExportRequest, FirstCallChanges, export_call
from parplan.graph.capture.other_batches import Twin, at_another_batch, export_blocks
from parplan.graph.capture.settled_state import export_settled
from parplan.graph.capture.whole_batch import WholeBatch, unplaced, whole_batch
from parplan.graph.export.autocast import record_casts
from parplan.graph.export.functionalise import functionalise
from parplan.graph.export.garbage import seldom_collected
from parplan.graph.export.strided_views import lay_out_strided
from parplan.graph.layer_graph import LayerGraph, TensorSpec
from parplan.graph.layers import build_layers
from parplan.graph.local import SAME, is_resized
from parplan.graph.user_code.functions import known_sites

__all__ = ["batch_of", "capture", "check_dense", "computes_alike"]

_VARIANT = re.compile(r"^(Tensor|Scalar)(_(Tensor|Scalar))?$")


# Captures replace functions of torch, and of Python, for the whole process (seen_attributes, seen_modes,
# compiling_branches, symbolic_sizes, RandomNumbers, OpaqueCalls.intercepted, intercepted_modules, lazy_code,
# own_buffer_assignments, stand_ins, packed_sequences), and so does torch.export: one thread at a time.
_CAPTURING = RLock()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    with _CAPTURING:
        yield


@_one_at_a_time()
@seldom_collected()
@mended_export()
def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = True,
    dim: int | None = 0,
    check_batch: bool = True,
    numbers: Sequence[Number] = (),
    compiling: bool | None = None,
    settle: bool = True,
) -> LayerGraph:
    """Capture `model` called with `args` and `kwargs` as a graph of layers.

    Nothing is computed and nothing of the model changes; its mode is put back. A model whose first call changes it and
    whose later calls do not keeps those changes, as after a plain call (`settled`). Tensors whose dimension `dim`
    equals the batch (the first such tensor's) are split over replicas, others shared; with None all are shared.

    Args:
        training: capture the training graph (else the evaluation graph).
        check_batch: capture a second batch size as well and compare, so that a layer whose constants
            depend on the batch is never given replicas.
        numbers: attributes that the graph takes as inputs.
        compiling: whether to capture the code that the model has for compilers; None: where its other code fails.
        settle: leave the model with the changes of a first call; False puts them back: no such call is about to run.

    Raises:
        CaptureError: the model cannot be exported; the text names the line.
    """
    register_caches()
    leaves, in_spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    check_dense(leaves, model.named_buffers())
    batch = batch_of(leaves, dim)
    call = ExportRequest(model, leaves, in_spec, batch, dim or 0, training, numbers, compiling=compiling)
    with as_tensors(numbers) as tensors, _said_once(call.said):
        settled: tuple[Change, ...] = ()
        try:
            given = call.resized(call.alike, call.batch)
            first = export_blocks(call, given) or export_call(call, given)
        except FirstCallChanges as found:
            settled, first = found.changes, export_settled(call, found)
        call = replace(call, compiling=bool(first.compiling))
        twin = Twin(call.alike)
        bound = WholeBatch()
        if check_batch and call.batch is not None:
            twin = at_another_batch(call, first)
            bound = whole_batch(first.program, twin.export.program if twin.export is not None else None, call.batch)
        if numbers:
            _check_inputs(call, first, tensors)
        graph = _assemble(call, first, twin, bound)
    if unchecked := first.recorder.host_reads.unchecked:
        warnings.warn(
            f"{type(model).__name__}: left out of the captured model, as weights or activations decide it: the "
            f"assertion at {unchecked[0]}{f' and {len(unchecked) - 1} more' if len(unchecked) > 1 else ''}",
            stacklevel=2,
        )
    inputs = {tensor.data_ptr(): number for number, tensor in zip(numbers, tensors, strict=True)}
    known = {name: inputs[t.data_ptr()] for name, t in graph.constants.items() if t.data_ptr() in inputs}
    for change in reversed(settled if not settle else ()):
        change.undo()
    return replace(
        graph,
        numbers=known,
        settled=tuple(f"{change.path}: it {change.what}" for change in settled),
        compiling=first.compiling,
        unchecked=tuple(unchecked),
    )


@contextmanager
def _said_once(said: Sequence[str]) -> Iterator[None]:
    """Pass on to stderr, at the end, what the model has printed in one export, the one with most lines."""
    try:
        yield
    finally:
        sys.stderr.write(max(said, key=lambda text: text.count("\n"), default=""))


def batch_of(leaves: Sequence[Any], dim: int | None = 0) -> int | None:
    """Samples in one step: the size along `dim` of the first tensor that has it; None without one, or without `dim`."""
    if dim is None:
        return None
    return next((leaf.shape[dim] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim), None)


def check_dense(leaves: Sequence[Any], buffers: Iterable[tuple[str, Tensor]] = ()) -> None:
    """Refuse tensors that are not dense, of which devices cannot hold a part.

    Raises:
        CaptureError: an input or a buffer is sparse or nested.
    """
    given = ((place, leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    for name, tensor in (*given, *buffers):
        if tensor.layout is not torch.strided:
            where = f"input {name}" if isinstance(name, int) else name  # words for the error alone: every call asks
            raise CaptureError(
                f"{where}, of shape {list(tensor.shape)}, is no dense tensor ({tensor.layout}), and devices are sent "
                "parts of dense ones only; make it dense (to_dense()), or bring its indices and values as two tensors "
                "and add them up in the forward (index_add)"
            )


def _check_inputs(call: ExportRequest, first: Exported, tensors: Sequence[Tensor]) -> None:
    """Refuse numbers of which the graph still has a value of its own: with other numbers it is another graph.

    Raises:
        CaptureError: Python code or an op takes a number as such.
    """
    for tensor in tensors:
        tensor.mul_(3).add_(7)
    again = export_call(call, call.resized(call.alike, call.batch))
    exported, other = first.program, again.program
    own = {tensor.data_ptr() for tensor in tensors}
    mine, others = exported.constants, other.constants
    fixed = mine.keys() == others.keys() and all(
        torch.equal(mine[name], others[name]) for name in mine if mine[name].data_ptr() not in own
    )
    changes = batch_changes(exported.graph_module, other.graph_module)
    same = changes | first.opaque.changes(exported.graph_module, again.opaque) == BatchChanges()
    if first.recorder.host_reads.any or not fixed or not same:
        raise CaptureError(f"{', '.join(n.path for n in call.numbers)}: the forward does not only calculate with it")


def _canonical(model: nn.Module, export: Exported) -> Canonical:
    exported, opaque = export.program, export.opaque
    opaque.settle(exported)
    with known_sites(opaque.sites):
        functional = functionalise(exported)
    opaque.mark(functional.program.graph)
    lay_out_strided(functional.program.graph)
    found = canonicalise(functional, model)
    record_casts(found.graph)
    return found


def _changes(call: ExportRequest, first: Exported, twin: Twin, own: Canonical) -> tuple[BatchChanges, SizeBranches]:
    """Changes with the number of samples, of the canonical graph, and the Python branches on it."""
    module = own.functional.program.graph_module
    if twin.export is None:
        return everything_changes(module, twin.errors[0]) if twin.errors else BatchChanges(), SizeBranches()
    other = _canonical(call.model, twin.export)
    ratio = Fraction(twin.batch, call.batch or 1)
    changes = batch_changes(module, other.functional.program.graph_module, ratio)
    changes |= changed_constants(module, own.constants, [*other.constants.values()])
    changes |= first.opaque.changes(module, twin.export.opaque)
    constants = [list(filter(None, each.results)) for each in (own, other)]
    same = first.recorder.stores_like(twin.export.recorder) and constants[0] == constants[1]
    sized = constants[0] != constants[1] or first.recorder.left != twin.export.recorder.left
    changes = replace(changes, sized=sized)
    same = same and own.counters == other.counters  # `self.seen += x.shape[0]` is no counter of steps
    changes = changes if same else replace(changes, results=True)
    for node in own.graph.nodes:
        if node.name not in changes.all:
            node.meta[SAME] = True
    branches = twin.branches
    return changes, replace(branches, ops=ops_digest(module, changes, own.constants) if branches.asks_anew else "")


def _assemble(call: ExportRequest, first: Exported, twin: Twin, bound: WholeBatch) -> LayerGraph:
    model, recorder = call.model, first.recorder
    graph = _canonical(model, first)
    changes, branches = _changes(call, first, twin, graph)
    samples = {name: call.dim for i, name in enumerate(graph.users) if name is not None and i in twin.samples}
    changes = compute_rows_once(graph.graph, changes, frozenset(samples))
    known = {node.name for node in graph.graph.nodes}
    places = split_batch_reductions(graph.graph, samples, changes.grown)
    made = {name: (place.dim,) for name, place in places.items() if name not in known}
    changes = replace(changes, grown={**changes.grown, **made})
    state = frozenset(graph.buffers) | frozenset(graph.constants)
    # The call of a leaf module is one layer; attention's projection is part of the same call.
    leaf_paths = frozenset(
        n for n, m in model.named_modules() if n and (isinstance(m, nn.MultiheadAttention) or not list(m.children()))
    )
    sources = sample_sources(graph.graph, changes, frozenset(samples))
    counted = counted_samples(graph.graph, changes, frozenset(samples))
    given = (leaf_paths, frozenset(graph.parameters), state, samples | sources, changes.unexplained, changes.grown)
    built, flattened = build_layers(graph.graph, *given), dict[str, int]()
    heads = merged_heads(graph.graph, places, call.batch or 1)
    if built.merged or heads:
        merged = {name: place for name, place in places.items() if built.merged and place.outer > 1}
        kept = frozenset(graph.buffer_updates.values())
        flattened, grown = unflatten_between_layers(graph.graph, built, merged, heads, changes.grown, kept)
        changes = replace(changes, grown={**changes.grown, **grown})
        built = build_layers(graph.graph, *given[:-1], changes.grown)
    fixed = changes.results or bool(changes.irregular)
    for layer in built.layers.values():  # whose code holds only for the captured batch
        dims = layer.batch.dims if layer.batch is not None else {}
        paired = built.batch_dims.items() if layer.batch is None else ()
        fixed = fixed or any(axis.dims.get(value) == dim for axis in layer.axes for value, dim in paired)
        for node in layer.nodes:
            if layer.batch is None:
                only_shape = node.name not in changes.unexplained
                fixed = fixed or (node.name in changes.all and not is_resized(node, only_shape))
            else:
                # A dimension that grows with the batch, but not with the samples of a replica, keeps its captured size.
                fixed = fixed or not {dims.get(node.name)}.issuperset(changes.grown.get(node.name, ()))
    users = zip(graph.users, call.leaves, strict=True)
    trainable = {name for name, path in graph.parameters.items() if model.get_parameter(path).requires_grad}
    trainable |= {name for name, leaf in users if name is not None and isinstance(leaf, Tensor) and leaf.requires_grad}
    return LayerGraph(
        model=type(model).__name__,
        digraph=built.digraph,
        layers=built.layers,
        values=_specs(graph.graph, trainable, {one for one in graph.outputs if isinstance(one, str)}),
        producer=built.producer,
        batch=call.batch,
        batch_dims=built.batch_dims,
        user_inputs=graph.users,
        user_outputs=graph.outputs,
        in_spec=call.in_spec,
        out_spec=graph.functional.program.call_spec.out_spec,
        parameters=graph.parameters,
        buffers=graph.buffers,
        constants=graph.constants,
        buffer_updates=graph.buffer_updates,
        counters=graph.counters,
        training=call.training,
        sites=first.sites,
        one_batch=changes.one_batch,
        flattened=flattened,
        sample_indices=bound.indices,
        unplaced=unplaced(graph.outputs, bound.grown, built, flattened, counted),
        checkpoints=dict(first.opaque.checkpoints),
        late=graph.functional.late,
        reads=recorder.guards,
        stored=tuple(recorder.stored),
        containers=first.containers,
        checks=recorder.checks_beside(twin.export.recorder if twin.export is not None else None),
        fixed_batch=fixed,
        sized=changes.sized,
        grown=changes.grown if twin.export is not None else None,
        size_branches=branches,
    )


def _specs(graph: fx.Graph, trainable: set[str], results: set[str]) -> dict[str, TensorSpec]:
    """Shapes and types of all values, and whether a gradient of the results comes back through them.

    A parameter behind `detach()` or a comparison has none, so that every process leaves its `grad` at None.
    """
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
    reached = set[fx.Node]()
    for node in reversed(graph.nodes):
        if _flows(node, specs) and (node.name in results or not reached.isdisjoint(node.users)):
            reached.add(node)
        elif node.name in specs:
            specs[node.name] = replace(specs[node.name], requires_grad=False)
    return specs


def _flows(node: fx.Node, specs: Mapping[str, TensorSpec]) -> bool:
    return specs[node.name].requires_grad if node.name in specs else bool(node.meta.get("parplan_flows"))


def computes_alike(plain: LayerGraph, other: LayerGraph) -> bool:
    """Whether `other`, captured with tensors in the place of numbers, does what `plain` does with the numbers."""
    first, second = list(_named_ops(plain, {})), list(_named_ops(other, other.numbers))
    return first == second and _results(plain) == _results(other)


def _results(graph: LayerGraph) -> list[Any]:
    values = graph.values
    return [(values[v].dtype, len(values[v].shape)) if isinstance(v, str) else v for v in graph.user_outputs]


def _named_ops(graph: LayerGraph, numbers: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Ops by name and by the type of their results, but for arithmetic on the numbers themselves."""
    scalars = set(numbers)
    for layer in graph.layers.values():
        for node in layer.nodes:
            sources = {source.name for source in node.all_input_nodes}
            if sources and sources <= scalars:
                scalars.add(node.name)
            else:
                spec, schema = graph.values.get(node.name), schema_of(node.target)
                # What differs between an op on a number and one on a tensor is left out of its name.
                name = str(node.target if schema is None else schema.name)
                if schema is not None:
                    name = f"{name.replace('rsub', 'sub')}.{_VARIANT.sub('', overload_name(node.target))}"
                yield (name, *((spec.dtype, len(spec.shape), spec.requires_grad) if spec is not None else ()))
