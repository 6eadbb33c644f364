"""The first export of a model with many blocks of one structure, of which three are traced: two and the last.

The others are copied from the first (equal_blocks.py says when they may be). As there is no export in full to compare
with, the second and the last one have to have been traced to the same ops with the same operands; nothing that blocks
take or make may be written in place; and all that their ops use is an argument, a parameter or a buffer of the block,
or made in it. The ops are those of an export in full, and so are their names, but for numbers behind regions without
gradients.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor, fx, nn, ops
from torch._ops import OpOverload
from torch.export import ExportedProgram

from parplan.compat import pytree, traced_node
from parplan.graph.attributes.recording import Recorder
from parplan.graph.attributes.stored_results import Stored
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node
from parplan.graph.capture.equal_blocks import Block, EqualBlocks, Traced, UnequalBlocks, alike, copied, tensor_facts

__all__ = ["FirstBlocks"]

LEAST_ALIKE, LEAST_PARTS = 12, 8
"""Blocks of one structure, and modules in each, from which on it is faster to trace three of them instead of all."""

MARK = ops.parplan.equal_block.default


@dataclass
class _Span:
    """A traced block in the program: the op on what it takes, its ops, and the op on what it makes."""

    begin: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    end: fx.Node | None = None

    def described(self) -> Hashable | None:
        """Ops with their arguments and results; None where an operand is from elsewhere, or one is no op or writes."""
        own: dict[fx.Node, Hashable] = {}
        for number, node in enumerate(_listed(self.begin)):
            own[node] = (*own.get(node, ("taken",)), number)  # type: ignore[misc]

        def word(argument: Any) -> Hashable:
            if isinstance(argument, fx.Node):
                return own[argument]
            if isinstance(argument, (list, tuple)):
                return tuple(map(word, argument))
            return type(argument), repr(argument)

        found: list[Hashable] = []
        for number, node in enumerate(self.nodes):
            if not _is_plain(node) or not own.keys() >= set(node.all_input_nodes):
                return None
            named = tuple((key, word(value)) for key, value in node.kwargs.items())
            made = pytree.tree_leaves(node.meta.get("val"))
            facts = (tensor_facts(one) if isinstance(one, Tensor) else repr(one) for one in made)
            found.append((node.target, word(node.args), named, *facts))
            own[node] = number
        results = _listed(self.end) if self.end is not None else None
        return None if results is None or not own.keys() >= set(results) else (*found, word(results))


class FirstBlocks(EqualBlocks):
    """A first export in which three of many blocks of one structure are traced."""

    def __init__(self, model: nn.Module) -> None:
        kinds = alike(model, LEAST_ALIKE)
        parts = ((path, model.get_submodule(path)) for path in kinds)
        self._paths = {block: path for path, block in parts if sum(1 for _ in block.modules()) >= LEAST_PARTS}
        super().__init__({module: Block(module, (), kinds[path]) for module, path in self._paths.items()})
        self._waiting = Counter(kinds.values())
        self._made: dict[Block, Traced] = {}
        self._pairs: list[tuple[Traced, Block]] = []

    def _call(self, plain: Any, block: Block, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        self._waiting[block.kind] -= 1
        return super()._call(plain, block, args, kwargs, recorder)

    def _is_compared(self, traced: Traced, block: Block) -> bool:
        """Whether it is the second of the blocks that are like a traced one, or the last of its structure."""
        compared = self._waiting[block.kind] == 0 or traced not in (one for one, _ in self._pairs)
        self._pairs += [(traced, block)] * compared
        return compared

    def _may_be_copied(self, traced: Traced) -> bool:
        """Whether it is none to compare with, and has plain ops on what is its own only."""
        self._made[traced.block] = traced
        found = traced_node(traced.made[0]) if traced.made else None
        if found is None or any(block is traced.block for _, block in self._pairs):
            return False
        nodes = reversed(found[0].graph.nodes)
        end = next(nodes)
        own = list(takewhile(lambda node: node.target is not MARK, nodes))
        return _Span(own[-1].prev, own[::-1], end).described() is not None if own else False

    def stores_alike(self, stored: Sequence[Stored]) -> bool:
        """Whether blocks of one structure leave the same on their modules, and no tensors: copied ones leave none."""
        found: dict[Hashable, set[Hashable]] = defaultdict(set)
        for block in self.blocks.values():
            parts = {id(part): name for name, part in block.module.named_modules()}
            own = [one for one in stored if id(one.module) in parts]
            words = ((parts[id(one.module)], one.keys, one.count, repr(one.template)) for one in own)
            found[block.kind].add(frozenset(words))
        return not any(one.count for one in stored) and all(len(words) == 1 for words in found.values())

    def fill_in_alike(self, program: ExportedProgram) -> None:
        """Put the ops of copied blocks into a program, whose ops get the names that an export in full gives them.

        Raises:
            UnequalBlocks: blocks that were to be compared differ, or a copied one uses what is not its own.
        """
        graph = program.graph
        spans, stand_ins = self._spans(graph)
        copies = {mark: self._copied[str(mark.args[1])] for mark in stand_ins}
        sources = {traced for traced, _ in copies.values()}
        words = {block: span.described() for block, span in spans.items()}
        for traced, block in self._pairs:
            again = self._made.get(block)
            if traced.block in sources and (again is None or words[traced.block] != words[block]):
                raise UnequalBlocks
            if again is not None and (traced.spec, traced.leaves) != (again.spec, again.leaves):
                raise UnequalBlocks
        near = [node for mark in stand_ins for node in (*_listed(mark), *mark.users)]
        for span in (spans[block] for block in sources):
            near += [*_listed(span.begin), *span.nodes]
        written = {memory_of_node(node) for node in graph.nodes if is_inplace(node) and is_tensor(node)}
        if written & {memory_of_node(node) for node in near if is_tensor(node)}:
            raise UnequalBlocks
        for mark, (source, block) in copies.items():
            if words[source] is None:
                raise UnequalBlocks
            made = self._copies(graph, mark, spans[source], (source, block))
            for user in list(mark.users):
                user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]  # at once: blocks behind are copied, too
                graph.erase_node(user)
            graph.erase_node(mark)
        for node in [node for node in graph.nodes if node.target is MARK]:
            graph.erase_node(node)
        _name_in_order(program.graph_module)
        results: Any = graph.output_node().args[0]
        for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
            if isinstance(node, fx.Node):
                spec.arg.name = node.name
        program.graph_module.graph = copied(graph)  # which knows these names as taken

    def _spans(self, graph: fx.Graph) -> tuple[dict[Block, _Span], list[fx.Node]]:
        """Traced blocks, and the ops that stand for copied ones."""
        spans: dict[Block, _Span] = {}
        stand_ins, running = [], None
        for node in graph.nodes:
            if node.target is not MARK:
                if running is not None:
                    running.nodes.append(node)
                continue
            traced, block = self._copied[str(node.args[1])]
            if traced is not block:
                stand_ins.append(node)
            elif block not in spans:
                running = spans[block] = _Span(node)
            else:
                spans[block].end, running = node, None
        return spans, stand_ins

    def _copies(self, graph: fx.Graph, mark: fx.Node, span: _Span, blocks: tuple[Block, Block]) -> list[fx.Node]:
        """Copies of a traced block's ops in front of the op that stands for another block; gives what they make."""
        own: dict[fx.Node, fx.Node] = {}
        for node, other in zip(_listed(span.begin), _listed(mark), strict=True):
            if own.setdefault(node, other) is not other:
                raise UnequalBlocks
        paths = tuple(self._paths[block.module] for block in blocks)
        for node in span.nodes:
            with graph.inserting_before(mark):
                own[node] = graph.node_copy(node, own.__getitem__)
            own[node].meta["nn_module_stack"] = _moved(node, span.begin, mark, paths)
        assert span.end is not None
        return [own[node] for node in _listed(span.end)]


def _listed(mark: fx.Node) -> list[fx.Node]:
    return list(mark.args[0])  # type: ignore[arg-type]


def _is_plain(node: fx.Node) -> bool:
    """Whether a node calls an op that writes nothing, or takes a part of a result."""
    return node.target is operator.getitem or (isinstance(node.target, OpOverload) and not is_inplace(node))


def _moved(node: fx.Node, begin: fx.Node, mark: fx.Node, paths: tuple[str, ...]) -> dict[str, tuple[str, Any]]:
    """The modules that a copied op is in: those around the op that stands for its block, then those of the block.

    Raises:
        UnequalBlocks: the traced op is in a module that is none of its block's.
    """
    old, new = paths
    found, around = dict(_stack(mark)), _stack(begin)
    for key, (path, kind) in _stack(node).items():
        if key in around:
            continue
        name, at, call = key.partition("@")  # of a module that is called again
        if not (path == old or path.startswith(f"{old}.")) or not name.endswith(path):
            raise UnequalBlocks
        moved = new + path[len(old) :]
        found[f"{name.removesuffix(path)}{moved}{at}{call}"] = moved, kind
    return found


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    return node.meta.get("nn_module_stack") or {}


def _calls(module: fx.GraphModule) -> Iterator[fx.Node]:
    """All calls of ops, those of regions (under `torch.no_grad()`, say) where the region is called."""
    for node in module.graph.nodes:
        for region in _regions(module, node):
            yield from _calls(region)
        if isinstance(node.target, OpOverload) or node.target is operator.getitem:
            yield node


def _regions(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    taken = [one.target for one in node.all_input_nodes if one.op == "get_attr"]
    found = [getattr(module, target, None) for target in taken if isinstance(target, str)]
    return [one for one in found if isinstance(one, fx.GraphModule)]


def _name_in_order(module: fx.GraphModule) -> None:
    """Names of all ops as tracing gives them: that of the op, with a number from the second on."""
    names, calls = fx.Graph(), dict.fromkeys(_calls(module))
    for node in module.graph.nodes:
        if node not in calls:
            names.create_node("call_function", operator.getitem, (), name=node.name)
    for node in calls:
        word = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else "getitem"
        word = word[2:-2] if word.startswith("__") and word.endswith("__") else word
        node.name = names.create_node("call_function", operator.getitem, (), name=word).name
