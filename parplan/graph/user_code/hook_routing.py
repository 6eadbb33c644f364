"""Put the ops of tensor hooks where they belong in an exported graph: behind the tensor that each hook is on."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from parplan.compat import memory_of
from parplan.errors import CaptureError
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node, nodes_in, written_memories
from parplan.graph.export.functionalise import rename_output
from parplan.graph.kinds import kind_of
from parplan.graph.user_code.gradient_hooks import GRADIENT_HOOK, HookSite

__all__ = ["route_through_hooks"]

aten = torch.ops.aten


def route_through_hooks(exported: ExportedProgram, sites: Mapping[str, Any]) -> None:
    """Put every hook's op directly behind the tensor it belongs to, with all uses of that tensor behind it.

    Raises:
        CaptureError: the tensor is changed in place, so that there is no one gradient of it.
    """
    graph = exported.graph
    hooks: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        if node.target is GRADIENT_HOOK:
            if sites[node.args[-1]].removed:
                graph.erase_node(node)
            else:
                made: Any = node.args[0]  # the tensor object, in front of ops that hand their operand back as it is
                while made.target in _IDENTITIES and _looks(made) == _looks(made.args[0]):
                    made = made.args[0]
                hooks.setdefault(made, []).append(node)
    for source, own in hooks.items():
        site = sites[str(own[0].args[-1])]
        _check_unchanged(graph, source, site)
        # Hooks run in the order they were registered, so the first one is the last that the tensor passes.
        place = source
        for node in reversed(own):
            node.args = (place, *node.args[1:])
            place = node
        for user in [user for user in source.users if user not in own]:
            user.replace_input_with(source, place)
            if user.op == "output":
                rename_output(exported, source.name, place.name)
        _place(graph, source, own, site)


_IDENTITIES = (
    aten.contiguous.default, aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default, aten.to.dtype, aten.to.device, aten.to.other, aten.to.dtype_layout,
    aten.type_as.default, aten.flatten.using_ints, aten.expand_as.default, aten.resolve_conj.default,
)  # fmt: skip


def _looks(node: Any) -> tuple[Any, ...]:
    value = node.meta["val"]
    return memory_of(value), value.shape, value.stride(), value.dtype


def _check_unchanged(graph: fx.Graph, source: fx.Node, site: HookSite) -> None:
    """Refuse changes in place of a hooked tensor after it was made, or views of what it was before."""
    memory, after, changed = memory_of_node(source), False, False
    before: set[fx.Node] = set()
    for node in graph.nodes:
        own = is_tensor(node) and memory_of_node(node) == memory
        inplace = own and is_inplace(node)
        changed |= inplace
        late = after and (inplace or (changed and not before.isdisjoint(node.all_input_nodes)))
        if late:
            raise CaptureError(
                f"a tensor with a hook is also changed in place, so it has several gradients\n  at {site.line}\n"
                "  register the hook on a tensor that nothing changes, such as h = h.clone()"
            )
        after |= node is source
        if own and not after:
            before.add(node)


def _place(graph: fx.Graph, source: fx.Node, hooks: Sequence[fx.Node], site: HookSite) -> None:
    """Move hooks behind their tensor and the tensors they read, and all that takes the hooked tensor behind them."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    reading = [node for node in hooks if any(order[value] > order[source] for value in _values(node))]
    # The last of a graph's arguments, or of the results of one op, where `source` is one of those.
    anchor, behind = source, list[fx.Node]()
    alike = [source.target, source.args[:1]] if source.target is operator.getitem else None
    while anchor.op == anchor.next.op == "placeholder" or alike == [anchor.next.target, anchor.next.args[:1]]:
        anchor = anchor.next
    if reading:
        last = max(reading, key=order.__getitem__)
        between = [node for node in graph.nodes if order[source] < order[node] < order[last] and node not in hooks]
        reached = set(hooks)
        for node in between:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
                behind.append(node)
        # Readers of some memory cannot move past others that change it.
        moved = set(behind)
        for memory in written_memories(between):
            touching = set(nodes_in(graph.nodes, memory))
            using = {node for node in between if not touching.isdisjoint((node, *node.all_input_nodes))}
            if using & moved and using - moved:
                raise CaptureError(
                    f"a hook reads tensors beside which others are changed in place\n  at {site.line}\n  use ops that "
                    "return new tensors (relu instead of relu_)"
                )
        anchor = _with_values_in_front(graph, source, hooks, behind, last, site)
    for node in (*reversed(hooks), *behind):
        anchor.append(node)
        anchor = node


def _values(hook: fx.Node) -> list[fx.Node]:
    values: Any = hook.args[1]
    return list(values)


def _with_values_in_front(
    graph: fx.Graph,
    source: fx.Node,
    hooks: Sequence[fx.Node],
    behind: Sequence[fx.Node],
    last: fx.Node,
    site: HookSite,
) -> fx.Node:
    """Let hooks read what depends on the hooked tensor as copies, computed in front; returns the last of those."""
    needed = {value for node in hooks for value in _values(node)}
    for node in reversed(behind):
        needed |= set(node.all_input_nodes) if node in needed else set()
    copies = dict.fromkeys(hooks, source)
    anchor = last.prev
    for node in behind:
        if node not in needed:
            continue
        if node.target is GRADIENT_HOOK:  # of another tensor, which hands it on
            copies[node] = copies.get(node.all_input_nodes[0], node.all_input_nodes[0])
            continue
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if random or is_inplace(node) or kind_of([node]) in ("hooks", "function", "batch_norm", "dropout"):
            raise CaptureError(
                f"a hook reads a tensor that {node.target} makes of the tensor it is on, and that op cannot run twice\n"
                f"  at {site.line}\n  let the hook read something that does not depend on the op"
            )
        with graph.inserting_after(anchor):
            anchor = copies[node] = graph.node_copy(node, lambda taken: copies.get(taken, taken))
    for node in hooks:
        node.args = (node.args[0], [copies.get(value, value) for value in _values(node)], node.args[2])
    return anchor
