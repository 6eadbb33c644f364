"""Capture of a model whose first call changes it and whose later calls do not: as its later calls run.

The model is exported once as it is and once with the changes that its first call makes. Where the second export changes
nothing more and both compute the same, it is the graph of every call, the first one too. The model keeps the changes,
as after a plain call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from parplan.errors import CaptureError
from parplan.graph.attributes.constant_values import constant_nodes, needed_nodes, run_nodes, writes
from parplan.graph.attributes.first_call import Change
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node
from parplan.graph.capture.model_export import Exported, ExportRequest, FirstCallChanges, export_call

__all__ = ["computes_alike", "export_settled"]


def export_settled(call: ExportRequest, found: FirstCallChanges) -> Exported:
    """The export of `call` after the changes that its model makes at the first call.

    Raises:
        CaptureError: later calls change something, too, or compute something else than the first one.
    """
    own = {id(tensor) for tensor in (*call.model.parameters(), *call.model.buffers())}
    for change in found.changes:
        module = change.now if isinstance(change.now, nn.Module) else nn.Module()
        if any(id(tensor) not in own for tensor in (*module.parameters(), *module.buffers())):
            raise CaptureError(
                f"the first call of the model gives it new tensors: it {change.what} ({change.path}); {_ONCE}"
            )
    for change in found.changes:
        change.make()
    try:
        made = export_call(call, call.resized(call.alike, call.batch))
        buffers = {change.path: change for change in found.changes if isinstance(change.now, Tensor)}
        if not computes_alike(found.program, made.program, buffers):
            change = found.changes[0]
            raise CaptureError(
                f"the first call of the model computes something else than later ones: of {change.path} it "
                f"{change.what}; {_ONCE}"
            )
    except CaptureError as error:
        for change in reversed(found.changes):
            change.undo()
        if isinstance(error, FirstCallChanges):
            raise found from error
        raise
    return made


_ONCE = "call the model once before it is captured"


def computes_alike(one: ExportedProgram, other: ExportedProgram, buffers: Mapping[str, Change]) -> bool:
    """Whether two exported programs compute the same from their inputs, however they come by constants.

    Args:
        buffers: changed buffers by name, constants with the values before in the first and after in the second.
    """
    before = {name: change.before for name, change in buffers.items() if isinstance(change.before, Tensor)}
    mine = _Program(one, before)
    theirs = _Program(other, {name: change.now for name, change in buffers.items()})
    twins: dict[fx.Node, fx.Node] = {}
    constants: list[tuple[fx.Node, fx.Node]] = []

    def alike(value: Any, twin: Any) -> bool:
        if isinstance(value, fx.Node) and isinstance(twin, fx.Node) and value not in twins:
            constants.append((value, twin))
            return value in mine.constant and twin in theirs.constant
        if isinstance(value, (list, tuple)) and isinstance(twin, (list, tuple)):
            return len(value) == len(twin) and all(map(alike, value, twin))
        if isinstance(value, dict) and isinstance(twin, dict):
            return value.keys() == twin.keys() and all(alike(value[key], twin[key]) for key in value)
        return twins[value] is twin if isinstance(value, fx.Node) else repr(value) == repr(twin)

    if len(mine.rest) != len(theirs.rest) or mine.changes_later or theirs.changes_later:
        return False
    for node, twin in zip(mine.rest, theirs.rest, strict=True):
        same = mine.target(node) == theirs.target(twin)
        if not (same and alike(node.args, twin.args) and alike(node.kwargs, twin.kwargs)):
            return False
        twins[node] = twin
    values = mine.values([node for node, _ in constants]), theirs.values([twin for _, twin in constants])
    return all(
        a.dtype == b.dtype and torch.equal(a, b)
        for a, b in ((values[0][node], values[1][twin]) for node, twin in constants)
    )


class _Program:
    """An exported program as constants and the rest.

    Args:
        buffers: values of placeholders of buffers that count as constants.
    """

    def __init__(self, program: ExportedProgram, buffers: Mapping[str, Tensor]) -> None:
        self._module = program.graph_module
        self._specs: dict[str, InputSpec] = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._known: dict[fx.Node, Tensor] = {}
        for node in program.graph.nodes:
            spec = self._specs.get(node.name) if node.op == "placeholder" else None
            if spec is not None and spec.kind is InputKind.BUFFER and str(spec.target) in buffers:
                self._known[node] = buffers[str(spec.target)]
            elif spec is not None and spec.kind is InputKind.CONSTANT_TENSOR:
                self._known[node] = program.constants[str(spec.target)]
        found = constant_nodes(program.graph, self._module, self._known)
        self._order, self.constant = found.order, found.last
        nodes = list(program.graph.nodes)
        # Writes count where they may reach the model or its inputs: a layer made for its settings alone draws weights.
        given = {memory_of_node(node) for node in nodes if node.op in ("placeholder", "get_attr") and is_tensor(node)}
        written = [
            node
            for node in nodes
            if writes(node)
            and node not in self.constant
            and not given.isdisjoint(memory_of_node(one) for one in node.all_input_nodes if is_tensor(one))
        ]
        used = needed_nodes([program.graph.output_node(), *written], nodes)
        self.rest = [node for node in used if node not in self.constant]
        # Whether a constant is written after something has read it: values are compared as they are in the end.
        read, self.changes_later = set[int](), False
        for node in used:
            tensors = [one for one in node.all_input_nodes if one in self.constant and is_tensor(one)]
            if node in self.constant:
                self.changes_later |= is_inplace(node) and not read.isdisjoint(map(memory_of_node, tensors))
            else:
                read.update(map(memory_of_node, tensors))

    def target(self, node: fx.Node) -> Any:
        """The op; of a placeholder the tensor that it is, of a region without gradients its code."""
        if node.op == "placeholder":
            spec = self._specs[node.name]
            return spec.kind, spec.target or node.name
        if node.op == "get_attr":
            return str(getattr(getattr(self._module, str(node.target)), "graph", None))
        return "" if node.op == "output" else node.target

    def values(self, wanted: Sequence[fx.Node]) -> dict[fx.Node, Any]:
        """The values of constants."""
        return run_nodes(needed_nodes(wanted, self._order), self._module, self._known)
