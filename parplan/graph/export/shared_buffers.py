"""Buffers that a model has under several names, made one input of its exported program.

A module that two others hold is exported with its buffers under both names. Who writes one writes the other: torch's
functionalisation ends in an error of its own there.
"""

from __future__ import annotations

from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from parplan.errors import CaptureError
from parplan.graph.axes.call import is_tensor, memory_of_node, written_memories

__all__ = ["merge_shared_buffers"]


def merge_shared_buffers(exported: ExportedProgram) -> None:
    """Let the first name of a buffer stand for its others.

    Raises:
        CaptureError: the forward writes a tensor of which a buffer, or an attribute, is a view.
    """
    graph, signature = exported.graph, exported.graph_signature
    written = written_memories(graph.nodes)
    paths = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT}
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node.name not in paths or not is_tensor(node):
            continue
        memory = memory_of_node(node)
        known = first.setdefault(memory, node)
        if known is node:
            continue
        if node.name not in signature.inputs_to_parameters and _place(known) == _place(node):
            node.replace_all_uses_with(known)
            graph.erase_node(node)
            signature.input_specs[:] = [spec for spec in signature.input_specs if spec.arg.name != node.name]
        elif memory in written:
            raise CaptureError(
                f"the forward writes {paths[known.name]} or {paths[node.name]} in place, which share memory; keep one "
                "of them, and take the other from it in the forward"
            )


def _place(node: fx.Node) -> tuple[object, ...]:
    value = node.meta["val"]
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad
