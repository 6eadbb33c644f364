"""Export of a model with many blocks of one structure, of which few are traced and the others are copied from these.

A deep network has many blocks that an export traces to the same ops. One of them is traced, and an op stands for each
other one until its ops are copied in. This is done where a block cannot be traced otherwise than the one that was: its
modules are of the same types, with equal parameters, buffers and settings; whatever attribute the forward has read of
the one has the same value in the other; and both are called with tensors of the same shapes, types and aliases and with
equal numbers. Nothing that blocks take or make may be written in place; and all that their ops use is an argument, a
parameter or a buffer of the block, or made in it.

The second block and the last one are traced, too, and have to have the same ops with the same operands. An export with
another number of samples, which tells sizes only, traces one. Where anything does not fit, the model is exported in
full. The ops are those of an export in full, and so are their names. The known exception is state that nobody records,
such as `next()` on a module-level counter in a block's forward: a copied block does not call it, so a difference is
seen in the blocks that are traced only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

from torch import Tensor, fx, is_autocast_enabled, is_grad_enabled, nn
from torch.export import ExportedProgram

from parplan.accelerators import autocast_types
from parplan.compat import HOOK_FIELDS, expression_of, intercepted_modules, memory_of, pytree, traced_node
from parplan.graph.attributes.held_values import PLAIN
from parplan.graph.attributes.recording import Recorder
from parplan.graph.attributes.stored_results import Stored
from parplan.graph.axes.call import is_tensor, memory_of_node, written_memories
from parplan.graph.capture.block_copies import (
    MARK,
    RESULTS,
    Span,
    UnequalBlocks,
    listed,
    name_in_order,
    tensor_facts,
)

__all__ = ["EqualBlocks"]

LEAST_ALIKE, LEAST_PARTS = 4, 8
"""Blocks of one structure, and modules in each, from which on it is faster to trace three of them instead of all."""

_keys = count()


@dataclass(frozen=True, eq=False)
class Block:
    """A module that is called once.

    Args:
        path: as its model names it.
        kind: the same for blocks of the same structure.
    """

    path: str
    module: nn.Module
    kind: Hashable


def _alike(model: nn.Module) -> dict[str, Hashable]:
    """Structures of the outermost modules of which many have the same, by path."""
    alike: dict[Hashable, list[str]] = defaultdict(list)
    kinds: dict[str, Hashable] = {}
    for path, module in model.named_modules():
        if path and any(True for _ in module.children()) and (kind := _structure(module)) is not None:
            kinds[path] = kind
            alike[kind].append(path)
    found: dict[str, Hashable] = {}
    for path, kind in kinds.items():  # outer modules come first
        inside = any(path[:at] in found for at, letter in enumerate(path) if letter == ".")
        if len(alike[kind]) >= LEAST_ALIKE and not inside:
            found[path] = kind
    return found


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


class EqualBlocks:
    """One export in which few of many blocks of one structure are traced.

    Args:
        known: paths of blocks that another export of the same call has copied: of each structure one is traced then.
    """

    def __init__(self, model: nn.Module, known: Collection[str] = ()) -> None:
        kinds = _alike(model)
        wanted = {kinds.get(path) for path in known}
        blocks = (Block(path, model.get_submodule(path), kind) for path, kind in kinds.items())
        self.blocks = {
            block.module: block
            for block in blocks
            if sum(1 for _ in block.module.modules()) >= LEAST_PARTS and (not known or block.kind in wanted)
        }
        self._compares = not known
        self._waiting = Counter(kinds.values())
        self._called: set[nn.Module] = set()
        self._known: dict[Hashable, list[Traced]] = defaultdict(list)  # from which others may be copied
        self._made: dict[Block, Traced] = {}
        self._pairs: list[tuple[Traced, Block]] = []  # to compare
        self._marks: dict[str, tuple[Block, Block]] = {}

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
            for key in self._marks:
                RESULTS.pop(key, None)

    def _call(self, plain: Any, block: Block, args: Any, kwargs: Any, recorder: Recorder) -> Any:
        module = block.module
        self._waiting[block.kind] -= 1
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = _arguments(leaves, spec)
        if module in self._called or not recorder.is_untouched(module):
            raise UnequalBlocks
        self._called.add(module)
        if given is None:
            return plain(module, *args, **kwargs)
        known = self._known[block.kind, given]
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
        """Whether a block is the second of those that are like a traced one, or the last of its structure."""
        others = [one for one, _ in self._pairs]
        compared = self._compares and (self._waiting[block.kind] == 0 or traced not in others)
        self._pairs += [(traced, block)] * compared
        return compared

    def _may_be_copied(self, traced: Traced) -> bool:
        """Whether a traced block is none to compare with, and has plain ops on what is its own only."""
        self._made[traced.block] = traced
        found = traced_node(traced.made[0]) if traced.made else None
        if found is None or any(block is traced.block for _, block in self._pairs):
            return False
        if not self._compares:
            return True
        nodes = iter(reversed(found[0].graph.nodes))  # torch 2.11: no iterator
        end = next(nodes)
        own = list(takewhile(lambda node: node.target is not MARK, nodes))
        return Span(own[-1].prev, own[::-1], end).described() is not None if own else False

    def _mark(
        self, traced: Block, block: Block, tensors: Sequence[Tensor], made: Sequence[Tensor] = ()
    ) -> list[Tensor]:
        """An op on what a block takes or makes, with results that look like `made`."""
        key = f"{next(_keys)}"
        RESULTS[key], self._marks[key] = made, (traced, block)
        found: list[Tensor] = MARK(list(tensors), key)
        return found

    def _copy(self, traced: Traced, block: Block, leaves: Sequence[Any]) -> Any:
        """The results of a block as those of one op."""
        made = self._mark(traced.block, block, _taken(block, leaves), traced.made)
        if [tensor.requires_grad for tensor in made] != [tensor.requires_grad for tensor in traced.made]:
            raise UnequalBlocks
        sources = {"argument": leaves, "made": made}
        results = [sources[how][value] if how in sources else value for how, value in traced.leaves]
        return pytree.tree_unflatten(results, traced.spec)

    @property
    def copied(self) -> tuple[str, ...]:
        """Paths of the blocks that were not traced."""
        return tuple(block.path for traced, block in self._marks.values() if traced is not block)

    def stores_alike(self, stored: Sequence[Stored]) -> bool:
        """Whether blocks of one structure leave the same on their modules, and no tensors: copied ones leave none."""
        found: dict[Hashable, set[Hashable]] = defaultdict(set)
        for block in self.blocks.values():
            parts = {id(part): name for name, part in block.module.named_modules()}
            own = [one for one in stored if id(one.module) in parts]
            words = ((parts[id(one.module)], one.keys, one.count, repr(one.template)) for one in own)
            found[block.kind].add(frozenset(words))
        return not any(one.count for one in stored) and all(len(words) == 1 for words in found.values())

    def fill_in(self, program: ExportedProgram) -> None:
        """Put the ops of copied blocks into a program, whose ops get the names that an export in full gives them.

        Raises:
            UnequalBlocks: blocks that were to be compared differ, or a copied one uses what is not its own.
        """
        graph = program.graph
        spans, stand_ins = self._spans(graph)
        copies = {mark: self._marks[str(mark.args[1])] for mark in stand_ins}
        sources = {traced for traced, _ in copies.values()}
        words = {block: span.described() for block, span in spans.items()}
        for traced, block in self._pairs:
            again = self._made.get(block)
            if traced.block in sources and (again is None or words[traced.block] != words[block]):
                raise UnequalBlocks
            if again is not None and (traced.spec, traced.leaves) != (again.spec, again.leaves):
                raise UnequalBlocks
        near = [node for mark in stand_ins for node in (*listed(mark), *mark.users)]
        for span in (spans[block] for block in sources):
            near += [*listed(span.begin), *span.nodes]
        if written_memories(graph.nodes) & {memory_of_node(node) for node in near if is_tensor(node)}:
            raise UnequalBlocks
        for mark, (source, block) in copies.items():
            if words[source] is None:
                raise UnequalBlocks
            made = spans[source].copied_to(mark, source.path, block.path)
            for user in list(mark.users):
                user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]  # at once: blocks behind are copied, too
                graph.erase_node(user)
            graph.erase_node(mark)
        for node in [node for node in graph.nodes if node.target is MARK]:
            graph.erase_node(node)
        name_in_order(program.graph_module)
        results: Any = program.graph.output_node().args[0]
        for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
            if isinstance(node, fx.Node):
                spec.arg.name = node.name

    def _spans(self, graph: fx.Graph) -> tuple[dict[Block, Span], list[fx.Node]]:
        """Traced blocks, and the ops that stand for copied ones."""
        spans: dict[Block, Span] = {}
        stand_ins, running = [], None
        for node in graph.nodes:
            if node.target is not MARK:
                if running is not None:
                    running.nodes.append(node)
                continue
            traced, block = self._marks[str(node.args[1])]
            if traced is not block:
                stand_ins.append(node)
            elif block not in spans:
                running = spans[block] = Span(node)
            else:
                spans[block].end, running = node, None
        return spans, stand_ins


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
    modes = is_grad_enabled(), *map(is_autocast_enabled, autocast_types())  # torch's are being recorded
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
