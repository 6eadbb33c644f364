"""Put an exported program into canonical form: plain ops, no asserts, updates of buffers set apart."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from parplan.compat import pytree
from parplan.errors import CaptureError
from parplan.graph.axes.call import call_like
from parplan.graph.export.functionalise import Functional
from parplan.graph.export.unread_norms import unread_norms
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Constant
from parplan.graph.user_line import code_line

__all__ = ["Canonical", "canonicalise"]

aten = torch.ops.aten
_COLLECTIVES = ("_c10d_functional", "c10d")  # namespaces of the ops that torch.distributed's functions are traced as


@dataclass
class Canonical:
    """A graph ready to be cut into layers.

    Args:
        functional: the program that it is of.
        parameters, buffers, constants, counters: see LayerGraph.
        users: placeholder per leaf of the flattened call; None for leaves baked in as constants.
        results: per leaf of the flattened result a constant, or None for the next one of the graph's results.
        updated: placeholders of buffers, which the graph's other results are assigned to.
    """

    functional: Functional
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    users: tuple[str | None, ...]
    results: tuple[Constant | None, ...] = ()
    updated: tuple[str, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """The program's."""
        found: fx.Graph = self.functional.program.graph
        return found

    @property
    def outputs(self) -> tuple[str | Constant, ...]:
        """Per leaf of the flattened result, the value as it is called now, or a constant."""
        values: Any = self.graph.output_node().args[0]
        names = (value.name for value in values)
        return tuple(next(names) if constant is None else constant for constant in self.results)

    @property
    def buffer_updates(self) -> dict[str, str]:
        """By placeholder of a buffer, the value that is assigned to it, as it is called now."""
        values: Any = self.graph.output_node().args[0]
        behind = values[len(values) - len(self.updated) :]
        return {buffer: value.name for buffer, value in zip(self.updated, behind, strict=True)}


def canonicalise(functional: Functional, model: nn.Module) -> Canonical:
    """Canonical form of a program without in-place changes; its graph is changed.

    Placeholders of one parameter of `model` are merged.

    Raises:
        CaptureError: the program changes its own inputs, or holds sub-graphs we do not inline.
    """
    program, graph = functional.program, functional.program.graph
    signature, users = program.graph_signature, _users(program)
    _refuse_unsupported(graph)
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    own_name = {id(parameter): name for name, parameter in model.named_parameters()}  # of the names of a tied parameter
    first: dict[str, str] = {}
    for placeholder, path in signature.inputs_to_parameters.items():
        known = first.setdefault(own_name[id(model.get_parameter(path))], placeholder)
        by_name[placeholder].replace_all_uses_with(by_name[known])
    tied = {placeholder: path for path, placeholder in first.items()}
    constants = {name: program.constants[path] for name, path in signature.inputs_to_lifted_tensor_constants.items()}
    found = Canonical(functional, tied, dict(signature.inputs_to_buffers), constants, users)
    found.counters |= functional.counters
    placeholders = {path: name for name, path in found.buffers.items()}
    running = _restore_plain_ops(graph)
    _copies(graph)
    # Read now: a result may have been one of the ops that were just replaced.
    ending = graph.output_node()
    output = ending.args[0]
    leaves: list[Any] = list(output) if isinstance(output, (tuple, list)) else [output]
    results: list[Constant | None] = []
    kept, updates = list[fx.Node](), dict[str, fx.Node]()
    for spec, leaf in zip(signature.output_specs, leaves, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            constant = isinstance(spec.arg, ConstantArgument) or not isinstance(leaf, fx.Node)
            results.append(Constant(getattr(spec.arg, "value", leaf)) if constant else None)
            kept += [] if constant else [leaf]
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            buffer = placeholders[str(spec.target)]
            if not by_name[buffer].meta["val"].numel():
                raise CaptureError(
                    f"the model fills the empty buffer {spec.target!r} at its first call, and no plan can say how "
                    f"large it will be; call the plain model once before it is compiled{_user_line(leaf)}"
                )
            step = _counter_step(leaf, buffer)
            if step is not None and _is_unread(leaf, buffer):
                found.counters[buffer] = step
            elif leaf.name not in running:
                updates[buffer] = leaf
        else:
            what = spec.target or str(getattr(spec.arg, "name", None))
            line = _user_line(leaf)
            raise CaptureError(f"the model changes {what!r} in place; compute a new tensor and return it instead{line}")
    updates |= unread_norms(graph, (*kept, *updates.values()))
    found.results, found.updated = tuple(results), tuple(updates)
    graph.erase_node(ending)
    graph.output((*kept, *updates.values()))
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and "assert" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    return found


def _users(program: ExportedProgram) -> tuple[str | None, ...]:
    """The placeholders of a call's arguments, None for constants."""
    found: list[str | None] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            found.append(None if isinstance(spec.arg, ConstantArgument) else spec.arg.name)
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise CaptureError(
                f"input {str(spec.target or spec.arg.name)!r} of kind {spec.kind.name} is not supported in a captured "
                "model"
            )
    return tuple(found)


def _refuse_unsupported(graph: fx.Graph) -> None:
    """Refuse sub-graphs, collectives, sparse gradients and sizes that depend on values."""
    sparse = {aten.embedding.default: 4, aten.embedding_bag.default: 5, aten.embedding_bag.padding_idx: 5}
    for node in graph.nodes:
        value, place = node.meta.get("val"), sparse.get(node.target, len(node.args))
        if node.op == "get_attr":
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{user.target} holds a sub-graph, which parplan does not plan yet; "
                "move autocast, cond or map out of the model's forward"
            )
        if getattr(node.target, "namespace", "").startswith(_COLLECTIVES):
            raise CaptureError(
                f"the forward calls a collective itself ({op_name(node)}); under parplan sums and means over the batch "
                "are those of all processes' samples already: leave the collective out, or call it in the script, on "
                f"the model's results{_user_line(node)}"
            )
        if len(node.args) > place and node.args[place]:
            raise CaptureError(
                "an embedding asks for a sparse gradient, and devices sum dense ones; make it with sparse=False"
                + _user_line(node)
            )
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise CaptureError(
                "the size of a result depends on the values of a tensor, so no plan can say what devices hold of it; "
                f"keep the shape: y[y > 0].sum() is torch.where(y > 0, y, 0).sum(){_user_line(node)}"
            )


def _user_line(node: fx.Node) -> str:
    """Where in the user's code a node comes from."""
    line = code_line(node, installed=True)
    return f"\n  at {line}" if line else ""


def _counter_step(node: Any, buffer: str) -> int | None:
    """The step of a counter (`self.steps += 1`, maybe several times): an integer buffer plus constants."""
    if node.target is not aten.add.Tensor or not isinstance(node.args[1], int):
        return None
    before = 0 if node.args[0].name == buffer else _counter_step(node.args[0], buffer)
    return None if before is None else before + int(node.args[1])


def _is_unread(node: fx.Node, buffer: str) -> bool:
    """Whether nothing but the counter itself reads any of its values: else the ops that do need the addition."""
    results = node.graph.output_node()
    readers = [leaf for leaf in pytree.tree_leaves(results.args) if leaf is node]
    chain = [node]
    while chain[-1].name != buffer:
        chain.append(chain[-1].all_input_nodes[0])
    behind = zip(chain[1:], chain, strict=False)
    return set(node.users) == {results} and len(readers) == 1 and all(set(a.users) == {b} for a, b in behind)


def _restore_plain_ops(graph: fx.Graph) -> set[str]:
    """Functionalised batch norms and dropouts in their plain form; names of the updates that are in place again."""
    running: set[str] = set()
    for node in list(graph.nodes):
        if node.target is aten._native_batch_norm_legit_functional.default:
            results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            # A module called again reads the statistics where its first call has updated them: in the buffer.
            for place in (3, 4):  # of mean and variance, among the arguments and among the results
                for user in list(results[place].users) if place in results else ():
                    if "batch_norm" in str(user.target) and user.args[place] is results[place]:
                        user.update_arg(place, node.args[place])
            with graph.inserting_before(node):
                plain = _like(graph, node, aten.batch_norm.default, (*node.args, False), results.get(0))
            if 0 in results:
                results[0].replace_all_uses_with(plain)
            running |= {results[index].name for index in (3, 4) if index in results}
        elif node.target is aten._native_batch_norm_legit_no_training.default:
            x, weight, bias, mean, var, momentum, eps = node.args
            _replace_first(
                graph, node, aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, False)
            )
        elif node.target is aten.native_dropout.default:
            _replace_first(graph, node, aten.dropout.default, tuple(node.args))
    return running


def _like(graph: fx.Graph, old: fx.Node, target: Any, args: tuple[Any, ...], result: fx.Node | None) -> fx.Node:
    new = graph.call_function(target, args)
    new.meta = {**old.meta, "val": result.meta["val"] if result is not None else None}
    return new


def _replace_first(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    """Put an op of one result in the place of an op's first result."""
    first = next((user for user in node.users if user.args[1] == 0), None)
    with graph.inserting_before(node):
        plain = _like(graph, node, target, args, first)
    if first is not None:
        first.replace_all_uses_with(plain)


def _copies(graph: fx.Graph) -> None:
    """`y[:, 0] = x` copies x to the shape and type of what it replaces; torch has no derivative for that op as such."""
    for node in list(graph.nodes):
        if node.target is not aten.copy.default:
            continue
        wanted, value = node.meta["val"], node.args[1]
        with graph.inserting_before(node):
            if value.meta["val"].dtype != wanted.dtype:
                value = call_like(node, aten._to_copy.default, value, dtype=wanted.dtype)
            if value.meta["val"].shape != wanted.shape:
                value = call_like(node, aten.expand.default, value, list(wanted.shape))
        node.replace_all_uses_with(value)
        graph.erase_node(node)
