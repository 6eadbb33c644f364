"""Cut the captured graph into layers and join them into a networkx.DiGraph.

A layer is one call of a leaf module, or one run of functional ops between such calls. Consecutive
nodes of a topological order are always convex, so no layer can wait for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import networkx as nx
from torch import fx

from parplan.graph.axes.table import axes_of, is_tensor, shape_of
from parplan.graph.kinds import is_batch_reduction, is_loss_op, kind_of, op_name
from parplan.graph.layer_axes import Wanted, layer_axes
from parplan.graph.layer_graph import Layer
from parplan.graph.sites import is_repeatable, site_of, why_whole
from parplan.layout import Sections

__all__ = ["BOUNDARY", "LayerSet", "Owner", "build_layers", "owner_of", "wired"]

# Meta entry of a reshape between layers (merged_samples.py): the node whose layer it belongs to.
BOUNDARY = "parplan_boundary"


@dataclass(frozen=True)
class LayerSet:
    """Layers in forward order, how they are joined, who makes which value, where samples lie.

    `merged` says that samples are merged behind another axis in a value that leaves its layer.
    """

    layers: dict[str, Layer]
    digraph: nx.DiGraph
    producer: dict[str, str]
    batch_dims: dict[str, int]
    merged: bool = False


@dataclass(frozen=True)
class _Run:
    owner: Owner
    leaf: bool
    nodes: tuple[fx.Node, ...]


def build_layers(
    graph: fx.Graph,
    leaves: frozenset[str],
    parameters: frozenset[str],
    buffers: frozenset[str],
    batch_dims: Mapping[str, int],
    batch_bound: frozenset[str] = frozenset(),
    grown: Collection[str] = (),
) -> LayerSet:
    """The layers of `graph`.

    Args:
        leaves: dotted paths of modules without children.
        parameters, buffers: placeholders that are not user inputs.
        batch_dims: dimension of the samples, by user input or by value that the model makes of the batch's size.
        batch_bound: ops whose constants depend on the batch size: they see the batch whole.
        grown: values whose size depends on the batch.
    """
    names: Counter[str] = Counter()
    layers: dict[str, Layer] = {}
    sizes = [shape_of(node)[batch_dims[node.name]] for node in graph.nodes if node.name in batch_dims]
    batch_size = sizes[0] if sizes else 1
    samples, reached, made, merged = dict(batch_dims), set(batch_dims), set[str](), False
    for run in _runs(graph, leaves, parameters, batch_bound):
        layer, inside = _layer(run, names, parameters, buffers, samples, batch_bound, batch_size)
        merged = merged or inside
        is_reached = not reached.isdisjoint(layer.inputs)
        sized = any(node.name in grown for node in layer.nodes)
        constant = not is_reached and not sized and is_repeatable(layer.nodes)
        layer = replace(layer, reached=is_reached, constant=constant)
        # Values that had lost their samples (to an op that says nothing of them) and meet others here that have them.
        dims = layer.batch.dims if layer.batch is not None else {}
        lost = (value for value in layer.inputs if value in made and value not in samples)
        samples |= {value: dims[value] for value in lost if value in dims}
        made.update(layer.outputs)
        reached |= {value for value in layer.outputs if is_reached or value in samples}
        layers[layer.name] = layer
    layers = _as_read(layers, samples, batch_size)
    producer, digraph = wired(layers)
    return LayerSet(layers, digraph, producer, samples, merged)


def wired(layers: Mapping[str, Layer]) -> tuple[dict[str, str], nx.DiGraph]:
    """The maker of every value, and the graph of layers with the values that go from one to the other."""
    producer = {value: name for name, layer in layers.items() for value in layer.outputs}
    digraph = nx.DiGraph()
    digraph.add_nodes_from(layers)
    for name, layer in layers.items():
        for value in layer.inputs:
            if value in producer:
                source = producer[value]
                known = digraph.edges[source, name]["values"] if digraph.has_edge(source, name) else ()
                digraph.add_edge(source, name, values=(*known, value))
    return producer, digraph


def _as_read(layers: Mapping[str, Layer], samples: Mapping[str, int], batch_size: int) -> dict[str, Layer]:
    """The layers, cut as their readers cut what they make: in their sections ([q | k | v]), and by their heads."""
    wanted: dict[str, list[Wanted]] = defaultdict(list)
    found: dict[str, Layer] = {}
    unflattened = {node.name for layer in layers.values() for node in layer.nodes if BOUNDARY in node.meta}
    for name, layer in reversed(list(layers.items())):
        own = {value: wanted[value] for value in layer.outputs if wanted[value]}
        if own and (layer.axes or layer.kind not in ("loss", *_OWN_KINDS)):
            fixed, known = (*layer.parameters, *layer.buffers), {v: samples[v] for v in layer.inputs if v in samples}
            axes = layer_axes(
                layer.nodes, layer.outputs, fixed, known, layer.kind, batch_size, layer.buffers, own
            )  # fmt: skip
            layer = replace(layer, axes=axes.others)
        found[name] = layer
        for axis in layer.axes:
            for value in (value for value in layer.inputs if value in axis.dims):
                dim, sections, others = axis.dims[value], axis.sections.get(value), wanted[value]
                plain = Sections.of(sections.sizes) if sections is not None else None
                named = axis.name == "heads" or value in unflattened
                if (plain is not None or named) and (dim, plain) not in ((o.dim, o.sections) for o in others):
                    others.append(Wanted(dim, axis.name, plain))
                if sections is not None and any(sections.limits):
                    others.append(Wanted(dim, axis.name, sections, axis.units))
    return {name: found[name] for name in layers}


def _runs(graph: fx.Graph, leaves: frozenset[str], parameters: frozenset[str], bound: frozenset[str]) -> Iterable[_Run]:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    owners = {node: owner_of(node) for node in calls} | _between_experts(calls, parameters)
    for owner, group in groupby(calls, key=owners.__getitem__):
        nodes = tuple(group)
        # A leaf module's call is planned whole: torch's own, or one with a single weighted op.
        own = [node for node in nodes if BOUNDARY not in node.meta]
        heavy = [node for node in own if _stands_alone(node, parameters)]
        mixes = any(op_name(node) == "batch_norm" for node in own)
        one_layer = owner.kind.startswith("torch.nn") or (len(heavy) <= 1 and not (mixes and len(own) > 1))
        one_layer = one_layer and not any(map(is_batch_reduction, own))
        if owner.kind not in _OWN_KINDS and owner.path in leaves and one_layer:
            yield _Run(owner, True, nodes)
        else:
            for part in _functional_parts(nodes, parameters, bound):
                # A loss module without its reduction over the batch keeps its name.
                yield _Run(owner, owner.path in leaves and any(map(is_loss_op, part)), part)


def _between_experts(calls: Sequence[fx.Node], parameters: frozenset[str]) -> dict[fx.Node, Owner]:
    """Calls of modules without parameters (activations) between products of one list of experts: these are one layer.

    Cut between them, every shard would have to wait for the rows of all others.
    """
    found: dict[fx.Node, Owner] = {}
    last: dict[tuple[Owner, str], int] = {}
    for position, node in enumerate(calls):
        owner = owner_of(node)
        lists = {axis.routed_by for axis in axes_of(node)} - {""} if op_name(node) in _EXPERT_OPS else set[str]()
        for experts in lists | ({"all"} if _multiplies_experts(node, parameters) else set()):
            between = calls[last.get((owner, experts), position) + 1 : position]
            inside = all(f"{owner_of(each).path}.".startswith(f"{owner.path}.") for each in between)
            if inside and not any(source.name in parameters for each in between for source in _inner(each, owner)):
                found |= dict.fromkeys(between, owner)
            last[owner, experts] = position
    return found


_EXPERT_OPS = ("expert_products", "index")


def _multiplies_experts(node: fx.Node, parameters: frozenset[str]) -> bool:
    """Whether it is a product with a parameter of one matrix for each expert, all of which see all rows."""
    weights = [source for source in node.all_input_nodes if source.name in parameters]
    return op_name(node) in ("bmm", "baddbmm", "matmul") and any(len(shape_of(weight)) == 3 for weight in weights)


def _inner(node: fx.Node, owner: Owner) -> Sequence[fx.Node]:
    """Operands of a call in a module inside of `owner`; none of a call in `owner` itself."""
    return () if owner_of(node) == owner else node.all_input_nodes


@dataclass(frozen=True)
class Owner:
    """The innermost module a node was called in, and which call of it ("", "@1", ...)."""

    path: str
    call: str
    kind: str = ""


def owner_of(node: fx.Node) -> Owner:
    """The module call that a node comes from."""
    source = node.args[0] if op_name(node) == "getitem" else node
    mark = source if isinstance(source, fx.Node) and kind_of([source]) in _OWN_KINDS else None
    stack = (mark or node).meta.get("nn_module_stack") or {}
    own = kind_of([mark]) if mark else ""
    if not stack:
        return Owner("", "", own)
    key, (path, kind) = list(stack.items())[-1]
    kind = own or kind
    call = "@" + key.rsplit("@", 1)[1] if "@" in key else ""
    return Owner(str(path).split("@")[0], call, str(kind))


# Ops that stand for code of the user's, each a layer of its own in whatever module it is called.
_OWN_KINDS = ("hooks", "function")


def _functional_parts(
    nodes: Sequence[fx.Node], parameters: frozenset[str], bound: frozenset[str]
) -> list[tuple[fx.Node, ...]]:
    """Runs of functional ops: an op with weights, a loss and what is bound to the batch stand alone, the rest by what
    is connected."""
    parts: list[tuple[fx.Node, ...]] = []
    own = [node for node in nodes if BOUNDARY not in node.meta]
    for alone, group in groupby(own, key=lambda node: node.name in bound or _stands_alone(node, parameters)):
        members = list(group)
        if alone:
            for node in (node for node in members if op_name(node) != "getitem" or node.args[0] not in own):
                parts.append((node, *(user for user in node.users if op_name(user) == "getitem" and user in own)))
        else:
            known = {node for part in parts for node in part}
            rest = [node for node in members if node not in known]
            front = _in_front_of_experts(rest, parameters)
            near = nx.Graph()
            near.add_nodes_from(rest)
            near.add_edges_from(
                (source, node)
                for node in rest
                for source in node.all_input_nodes
                if source in near and (source in front) == (node in front)
            )
            joined = [tuple(sorted(part)) for part in nx.connected_components(near)]
            parts += sorted(joined, key=lambda part: (part[0] not in front, part[-1]))
    if len(own) == len(nodes):
        return parts
    return [tuple(node for node in nodes if node in part or node.meta.get(BOUNDARY) in part) for part in parts]


def _in_front_of_experts(nodes: Sequence[fx.Node], parameters: frozenset[str]) -> set[fx.Node]:
    """Routing that is computed before all products with experts, up to views: it mixes experts, which they do not."""
    behind, front = set[fx.Node](), set[fx.Node]()
    for node in nodes:
        routed = op_name(node) in _EXPERT_OPS and any(axis.routed_by for axis in axes_of(node))
        if routed or _multiplies_experts(node, parameters) or not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    for node in reversed(nodes) if behind else ():
        view = kind_of([node]) == "reshape" or op_name(node) in ("repeat", "repeat_interleave", "to_copy")
        if node not in behind and (not view or not front.isdisjoint(node.users)):
            front.add(node)
    return front


def _stands_alone(node: fx.Node, parameters: frozenset[str]) -> bool:
    weighted = any(source.name in parameters for source in node.all_input_nodes)
    mixes = op_name(node) == "batch_norm"
    kind = kind_of([node])
    alone = mixes or kind == "function" or is_loss_op(node) or is_batch_reduction(node)
    return alone or (weighted and kind not in _LIGHT and not _multiplies_experts(node, parameters))


_LIGHT = ("add", "experts", "multiply", "other", "reshape")


def _layer(
    run: _Run,
    names: Counter[str],
    parameters: frozenset[str],
    buffers: frozenset[str],
    samples: dict[str, int],
    batch_bound: frozenset[str],
    batch_size: int,
) -> tuple[Layer, bool]:
    """A layer, and whether samples are merged behind another axis in what leaves it."""
    inside = {node.name for node in run.nodes}
    outside = list(dict.fromkeys(s.name for n in run.nodes for s in n.all_input_nodes if s.name not in inside))
    inputs = tuple(name for name in outside if name not in parameters and name not in buffers)
    outputs = tuple(
        node.name for node in run.nodes if is_tensor(node) and any(user.name not in inside for user in node.users)
    )
    own = tuple(name for name in outside if name in parameters)
    state = tuple(name for name in outside if name in buffers)
    kind = kind_of(run.nodes)
    axes = layer_axes(run.nodes, outputs, (*own, *state), samples, kind, batch_size, state)
    samples.update(axes.batch_dims)
    kind = "experts" if any(axis.name == "experts" for axis in axes.others) else kind
    spread = axes.batch is not None and batch_bound.isdisjoint(inside) and not why_whole(run.nodes)
    base = run.owner.path + run.owner.call
    if not run.leaf:
        first = next(node for node in run.nodes if BOUNDARY not in node.meta)
        site = site_of(first)
        word = site.name if site else kind if kind in ("attention", "experts", "loss") else op_name(first)
        named = kind == "experts" and f".{base}".endswith(".experts")
        base = base if named else ".".join(part for part in (base, word) if part)
    count = names[base]
    names[base] += 1
    layer = Layer(
        name=base if count == 0 else f"{base}_{count}",
        kind=kind,
        nodes=run.nodes,
        inputs=inputs,
        outputs=outputs,
        parameters=own,
        buffers=state,
        batch=axes.batch if spread else None,
        mixes_batch=axes.mixed and spread,
        axes=() if kind in _OWN_KINDS else axes.others,
    )
    return layer, axes.merged
