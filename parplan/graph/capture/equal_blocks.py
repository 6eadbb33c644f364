"""Export of a model in which one of several equal blocks is traced, and the others are copied from it.

A deep network has many blocks that an export traces to the same ops. One of them is traced, and an op stands for each
other one until its ops are copied in. This is done where a block cannot be traced otherwise than the one that was: its
modules are of the same types, with equal parameters, buffers and settings; whatever attribute the forward has read of
the one has the same value in the other; and both are called with tensors of the same shapes, types and aliases and with
equal numbers.

Exports with other sizes than the first have its program to compare with: with another number of samples, which tells
sizes only, and for other lengths of sequences, which run. The first one traces the second and the last block, too
(first_blocks.py). Where anything does not fit, the model is exported in full. The known exception is state that nobody
records, such as `next()` on a module-level counter in a block's forward: a copied block does not call it, so a
difference is seen in those two blocks only, or not at the other size.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, is_autocast_enabled, is_grad_enabled, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from parplan.compat import HOOK_FIELDS, expression_of, intercepted_modules, memory_of, pytree
from parplan.graph.attributes.held_values import PLAIN
from parplan.graph.attributes.recording import Recorder
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node
from parplan.graph.export.functionalise import rename_output

__all__ = [
    "Block", "EarlierExport", "EqualBlocks", "Traced", "UnequalBlocks",
    "alike", "copied", "equal_blocks", "tensor_facts",
]  # fmt: skip

# Equal blocks from which tracing one of them is worth the search.
LEAST_COPIES = 3

_Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
_results: dict[str, Sequence[_Meta]] = {}
_keys = count()


@torch.library.custom_op("parplan::equal_block", mutates_args=())
def equal_block(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    """Results of a block that is not traced."""
    return [torch.empty_strided(shape, stride, dtype=dtype, device=on) for shape, stride, dtype, on in _results[key]]


@equal_block.register_fake
def _(inputs: Sequence[Tensor], key: str) -> list[Tensor]:
    return [torch.empty_strided(shape, stride, dtype=dtype, device=on) for shape, stride, dtype, on in _results[key]]


# What a traced block takes and makes is read off an op that nobody uses.
fx.node.has_side_effect(torch.ops.parplan.equal_block.default)


class UnequalBlocks(Exception):
    """Two programs differ, or a block does what cannot be copied: the model has to be exported in full."""


@dataclass(frozen=True, eq=False)
class Block:
    """A module that is called once, and the ops of that call in an exported program, if there is one.

    Args:
        kind: the same for blocks of the same structure and the same ops.
    """

    module: nn.Module
    nodes: tuple[fx.Node, ...]
    kind: Hashable


@dataclass
class EarlierExport:
    """The ops of an export in full, by which equal blocks are found when the same call comes with other sizes.

    Attributes:
        graph: before anything of it is changed; None as long as there is none.
        inputs: of its signature.
        unlike: a later export had other ops, so that no further one is tried.
        compiling: whether the model's code for compilers was exported.
    """

    graph: fx.Graph | None = None
    inputs: Sequence[InputSpec] = ()
    unlike: bool = False
    compiling: bool | None = None

    def keep(self, program: ExportedProgram) -> None:
        """Take a copy of an export's ops."""
        self.graph, self.inputs = copied(program.graph), program.graph_signature.input_specs


def alike(model: nn.Module, least: int) -> dict[str, Hashable]:
    """Structures of the outermost modules of which at least so many have the same, by path."""
    alike: dict[Hashable, list[str]] = defaultdict(list)
    kinds: dict[str, Hashable] = {}
    for path, module in model.named_modules():
        if path and any(True for _ in module.children()) and (kind := _structure(module)) is not None:
            kinds[path] = kind
            alike[kind].append(path)
    found: dict[str, Hashable] = {}
    for path, kind in kinds.items():  # outer modules come first
        inside = any(path[:at] in found for at, letter in enumerate(path) if letter == ".")
        if len(alike[kind]) >= least and not inside:
            found[path] = kind
    return found


def equal_blocks(model: nn.Module, graph: fx.Graph, inputs: Sequence[InputSpec]) -> dict[nn.Module, Block]:
    """The outermost modules of which several have the same structure and were traced to the same ops.

    Args:
        graph, inputs: of an export in full, and of its signature.
    """
    kinds = alike(model, LEAST_COPIES)
    calls = [node for node in graph.nodes if node.op != "placeholder"]
    places: dict[str, list[int]] = defaultdict(list)
    for number, node in enumerate(calls):
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path in kinds:
                places[path].append(-1 if "@" in key else number)
    constants = {spec.arg.name for spec in inputs if spec.kind is InputKind.CONSTANT_TENSOR}
    written = {memory_of_node(node) for node in calls if is_inplace(node) and is_tensor(node)}
    found: dict[str, Block] = {}
    for path, own in places.items():
        if own == list(range(own[0], own[-1] + 1)):
            nodes = tuple(calls[own[0] : own[-1] + 1])
            text = _described(nodes, constants, written)
            if text is not None:
                found[path] = Block(model.get_submodule(path), nodes, (kinds[path], text))
    several: dict[Hashable, list[Block]] = defaultdict(list)
    for block in found.values():
        several[block.kind].append(block)
    return {block.module: block for own in several.values() if len(own) >= LEAST_COPIES for block in own}


def _structure(module: nn.Module) -> Hashable | None:
    """Types, settings and state of a module and its parts; None where one has hooks."""
    found = []
    for name, part in module.named_modules(remove_duplicate=False):
        if any(getattr(part, hooks, None) for hooks in HOOK_FIELDS if hooks != "_is_full_backward_hook"):
            return None
        state = [
            (key, tensor_facts(tensor)) for held in (part._parameters, part._buffers) for key, tensor in held.items()
        ]
        found.append((name, type(part), part.training, tuple(state)))
    return tuple(found)


def tensor_facts(tensor: Tensor | None) -> Hashable:
    """All that a trace depends on but aliases and values."""
    if tensor is None:
        return None
    sizes = (tuple(map(expression_of, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return type(tensor), *sizes, tensor.dtype, tensor.device, tensor.requires_grad


def _described(nodes: Sequence[fx.Node], constants: set[str], written: set[int]) -> Hashable | None:
    """Ops with their arguments and results, operands by number; None where there are regions, writes or constants."""
    inside = {node: number for number, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}

    def word(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return ("own", inside[argument]) if argument in inside else ("", outside.setdefault(argument, len(outside)))
        if isinstance(argument, (list, tuple)):
            return tuple(map(word, argument))
        return type(argument), repr(argument)

    found = []
    for node in nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        tensors = [value for value in values if isinstance(value, Tensor)]
        plain = node.op == "call_function" and not isinstance(node.target, torch._ops.HigherOrderOperator)
        if not plain or is_inplace(node) or any(memory_of(tensor) in written for tensor in tensors):
            return None
        named = tuple((key, word(value)) for key, value in node.kwargs.items())
        found.append((node.target, tuple(map(word, node.args)), named, tuple(map(tensor_facts, tensors))))
    return None if any(node.name in constants for node in outside) else tuple(found)


@dataclass(frozen=True)
class Traced:
    """A block that was traced, and how it makes its results.

    Args:
        spec: of its results.
        leaves: per result the number of the argument that it is, of the tensor that it makes, or a plain value.
        made: tensors that it makes.
    """

    block: Block
    spec: Any
    leaves: tuple[tuple[str, Any], ...]
    made: tuple[Tensor, ...]


@dataclass
class EqualBlocks:
    """One export in which equal blocks are traced once.

    Args:
        blocks: of the program of an export in full.
    """

    blocks: dict[nn.Module, Block]
    _traced: dict[Hashable, list[Traced]] = field(default_factory=lambda: defaultdict(list))
    _called: set[nn.Module] = field(default_factory=set)
    _copied: dict[str, tuple[Block, Block]] = field(default_factory=dict)

    @contextmanager
    def traced_once(self, recorder: Recorder) -> Iterator[None]:
        """While it lasts, calls of blocks that are equal to a traced one leave an op."""

        def call(plain: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
            block = self.blocks.get(module)
            if block is None:
                return plain(module, *args, **kwargs)
            return self._call(plain, block, args, kwargs, recorder)

        try:
            with intercepted_modules(call):
                yield
        finally:
            for key in self._copied:
                _results.pop(key, None)

    def _call(self, plain: Any, block: Block, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        module = block.module
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = _arguments(leaves, spec)
        if module in self._called or not recorder.is_untouched(module):
            raise UnequalBlocks
        self._called.add(module)
        if given is None:
            return plain(module, *args, **kwargs)
        known = self._traced[block.kind, given]
        for traced in known:
            if recorder.reads_alike(traced.block.module, module) and not self._is_compared(traced, block):
                recorder.read_like(traced.block.module, module)
                return self._copy(traced, block, leaves)
        self._mark(block, block, _taken(block, leaves))
        result = plain(module, *args, **kwargs)
        again, same_spec = pytree.tree_flatten((args, kwargs))
        same = len(again) == len(leaves) and all(a is b for a, b in zip(again, leaves, strict=True))
        made = _results_of(block, result, leaves)
        if made is not None and same and spec == same_spec and recorder.is_untouched(module):
            self._mark(block, block, made.made)
            if self._may_be_copied(made):
                known.append(made)
        return result

    def _is_compared(self, traced: Traced, block: Block) -> bool:
        """Whether a block that could be copied from a traced one is traced, to compare the two."""
        return False

    def _may_be_copied(self, traced: Traced) -> bool:
        """Whether other blocks may be copied from a traced one."""
        return True

    def _mark(self, traced: Block, block: Block, tensors: Sequence[Tensor], made: Sequence[_Meta] = ()) -> list[Tensor]:
        """An op on what a block takes or makes, with results of shapes `made`."""
        key = f"{next(_keys)}"
        _results[key], self._copied[key] = made, (traced, block)
        found: list[Tensor] = equal_block(list(tensors), key)
        return found

    def _copy(self, traced: Traced, block: Block, leaves: Sequence[Any]) -> Any:
        """The results of a block as those of one op."""
        shapes = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in traced.made]
        made = self._mark(traced.block, block, _taken(block, leaves), shapes)
        if [tensor.requires_grad for tensor in made] != [tensor.requires_grad for tensor in traced.made]:
            raise UnequalBlocks
        sources = {"argument": leaves, "made": made}
        results = [sources[how][value] if how in sources else value for how, value in traced.leaves]
        return pytree.tree_unflatten(results, traced.spec)

    def copied(self, model: nn.Module) -> tuple[str, ...]:
        """Paths of the blocks that were not traced."""
        blocks = {block.module for traced, block in self._copied.values() if traced is not block}
        return tuple(path for path, module in model.named_modules() if module in blocks)

    def fill_in(self, first: fx.Graph, program: ExportedProgram) -> None:
        """Put the ops of copied blocks into a program, whose ops get the names that an export in full gives them.

        Args:
            first: the graph of the export in full, in which the blocks were found.

        Raises:
            UnequalBlocks: beside the blocks the programs differ in their ops or how these are connected.
        """
        graph = program.graph
        pairs: dict[fx.Node, fx.Node] = {}
        results: dict[fx.Node, fx.Node] = {}  # of copied blocks, and what replaces them
        ends = defaultdict[Block, list[list[fx.Node]]](list)  # of traced blocks: what they take, what they make
        ones, marks = iter(first.nodes), list[fx.Node]()
        for node in list(graph.nodes):
            if node.target is torch.ops.parplan.equal_block.default:
                marks.append(node)
                listed = list(node.args[0])
                traced, block = self._copied[str(node.args[1])]
                if traced is block:
                    ends[block].append(listed)
                else:
                    _match([next(ones, None) for _ in block.nodes] == list(block.nodes))
                    taken, made = ends[traced]
                    copies = _copy_nodes(graph, node, (traced, block), pairs, (taken, listed))
                    _match(copies.keys() >= set(made))
                    for user in list(node.users):
                        results[user] = copies[made[int(user.args[1])]]
                        user.replace_all_uses_with(results[user])  # at once: blocks behind are copied, too
            elif node not in results:
                one = next(ones, None)
                if one is None:
                    raise UnequalBlocks
                _match(one.op == node.op and one.target == node.target)
                _match([pairs[source] for source in one.all_input_nodes] == node.all_input_nodes)
                pairs[one] = node
        _match(next(ones, None) is None)
        for old, new in results.items():
            rename_output(program, old.name, new.name)
        for mark in reversed(marks):
            for user in list(mark.users):
                graph.erase_node(user)
            graph.erase_node(mark)
        named = {node.name: one.name for one, node in pairs.items()}
        for spec in program.graph_signature.output_specs:
            spec.arg.name = named.get(name := getattr(spec.arg, "name", ""), name)
        for one, node in pairs.items():
            node.name = one.name
        program.graph_module.graph = copied(graph)  # which knows these names as taken


def copied(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have the same names: fx gives those that are Python's (`input`) another one."""
    made = copy.deepcopy(graph)
    for node, twin in zip(graph.nodes, made.nodes, strict=True):
        twin.name = node.name
    return made


def _copy_nodes(
    graph: fx.Graph,
    mark: fx.Node,
    copied: tuple[Block, Block],
    pairs: dict[fx.Node, fx.Node],
    given: tuple[Sequence[fx.Node], Sequence[fx.Node]],
) -> dict[fx.Node, fx.Node]:
    """Copies of a traced block's ops in front of the op that stands for another block.

    Args:
        copied: the traced block and the other one.
        pairs: by node of the first program, its twin; copies are added.
        given: what the two take, in order.

    Returns:
        Nodes of the other block by those of the traced one.
    """
    own: dict[fx.Node, fx.Node] = {}
    places = [defaultdict[fx.Node, list[int]](list) for _ in given]
    for found, nodes in zip(places, given, strict=True):
        for number, node in enumerate(nodes):
            found[node].append(number)
    for one, other in zip(*(block.nodes for block in copied), strict=True):
        for a, b in zip(one.all_input_nodes, other.all_input_nodes, strict=True):
            taken = places[0].get(pairs[a])
            _match(own[pairs[a]] is pairs[b] if pairs[a] in own else taken is not None and taken == places[1][pairs[b]])
            own[pairs[a]] = pairs[b]
        with graph.inserting_before(mark):
            made = graph.node_copy(pairs[one], own.__getitem__)
        made.meta = {**other.meta, "val": pairs[one].meta.get("val")}
        own[pairs[one]] = pairs[other] = made
    return own


def _match(fits: bool) -> None:
    if not fits:
        raise UnequalBlocks


def _taken(block: Block, arguments: Sequence[Any]) -> list[Tensor]:
    """All tensors that the call of a block takes."""
    module, given = block.module, [argument for argument in arguments if isinstance(argument, Tensor)]
    state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [*given, *(tensor for _, tensor in state)]


def _arguments(leaves: Sequence[Any], spec: Any) -> Hashable | None:
    """The facts about arguments that a trace depends on; None where there are others than tensors and plain values."""
    kinds = {type(leaf) for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))}
    if kinds or not _is_plain(spec):
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    objects, memories = dict[int, int](), dict[int, int]()
    aliases = tuple(
        (
            objects.setdefault(id(x), len(objects)),
            memories.setdefault(memory_of(x), len(memories)),
            expression_of(x.storage_offset()),
        )
        for x in tensors
    )
    words = tuple(tensor_facts(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) for leaf in leaves)
    modes = is_grad_enabled(), is_autocast_enabled("cpu"), is_autocast_enabled("cuda")  # torch's are being recorded
    return str(spec), words, aliases, modes


def _is_plain(spec: Any) -> bool:
    """Whether a tree is one of tuples, lists and dictionaries."""
    return spec.is_leaf() or (spec.type in (tuple, list, dict) and all(map(_is_plain, spec.children())))


def _results_of(block: Block, result: Any, arguments: Sequence[Any]) -> Traced | None:
    """How a traced block makes its results; None where they share memory with what they are not."""
    leaves, spec = pytree.tree_flatten(result)
    if not _is_plain(spec) or not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
        return None
    given = {id(leaf): number for number, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
    state = [*block.module.parameters(), *block.module.buffers()]
    memories = {memory_of(tensor) for tensor in (*arguments, *state) if isinstance(tensor, Tensor)}
    found: list[tuple[str, Any]] = []
    made: list[Tensor] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            found.append(("plain", leaf))
        elif id(leaf) in given:
            found.append(("argument", given[id(leaf)]))
        elif memory_of(leaf) in memories:
            return None
        else:
            memories.add(memory_of(leaf))
            found.append(("made", len(made)))
            made.append(leaf)
    return Traced(block, spec, tuple(found), tuple(made))
