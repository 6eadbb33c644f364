"""Assertions on inputs: branches of a forward of which one side only raises, kept as checks in front of every step.

`assert (ids >= 0).all()` and `if mask.any(): raise ValueError(...)` decide nothing but whether a step runs. A graph has
no branches, so the ops that lead from the inputs to the condition are kept beside it, and run at every call.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from parplan.compat import traced_node
from parplan.graph.attributes.constant_values import constant_nodes, formula, needed_nodes, writes
from parplan.graph.user_line import code_line, frame_line

__all__ = ["InputCheck", "asserted", "asserted_in", "input_check", "model_frame"]

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


@dataclass(frozen=True)
class InputCheck:
    """A condition on the inputs of a model without which its forward raises.

    Args:
        line: of the model's code.
        condition: computes it from some of the inputs.
        formula: its text.
        inputs: those, as leaves of the call, by number.
        expected: the truth value that it must have.
        fixed: it has sizes that change with the number of samples.
    """

    line: str
    condition: fx.GraphModule
    formula: str
    inputs: tuple[int, ...]
    expected: bool
    fixed: bool = False

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the condition holds for the leaves of one call, as far as they have values."""
        given = [leaves[index] for index in self.inputs]
        if any(tensor.is_meta for tensor in given):
            return True
        with torch.no_grad():
            return bool(self.condition(*given)) is self.expected

    def is_like(self, other: InputCheck) -> bool:
        """Whether another check, captured with other sizes, is the same computation."""
        same = (self.line, self.inputs, self.expected) == (other.line, other.inputs, other.expected)
        return same and self.formula == other.formula


def input_check(tensor: Tensor, inputs: Mapping[fx.Node, int], frame: FrameType, expected: bool) -> InputCheck | None:
    """The check of a condition of a running export; None where more than the inputs decides it.

    Args:
        inputs: the leaf of the call that a node stands for.
        frame: of the model's code, at the branch.
    """
    found = traced_node(tensor)
    if found is None:
        return None
    node, root = found
    known = constant_nodes(node.graph, root, inputs)
    if node not in known.last:
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    needed = needed_nodes([node], known.order)
    given = [one for one in needed if one in inputs]
    for one in [*given, *(one for one in needed if one not in inputs)]:
        for like in one.all_input_nodes:
            if like not in copies:  # of which an op takes the shape alone
                made = like.meta["val"]
                sizes = (list(made.shape),)
                copies[like] = graph.call_function(torch.ops.aten.empty.memory_format, sizes, {"dtype": made.dtype})
        copies[one] = graph.node_copy(one, copies.__getitem__)
    graph.output(copies[node])
    text = formula([one for one in needed if one not in inputs], root)
    condition, leaves = fx.GraphModule(root, graph), tuple(inputs[one] for one in given)
    return InputCheck(frame_line(frame), condition, text, leaves, expected)


def asserted_in(program: ExportedProgram) -> tuple[list[InputCheck], list[str]]:
    """The assertions that torch.export has put into a graph without gradient regions (`torch._check`, say).

    No graph of ours runs them: they are taken out, with the numbers that only they read, which torch 2.11 cannot trace
    once more.

    Returns:
        Those that inputs alone decide, and the lines of the others.
    """
    specs, graph = program.graph_signature.input_specs, program.graph
    given_by_users = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
    checks, others = list[InputCheck](), list[fx.Node]()
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule) and part.graph is not graph:
            others += [node for node in part.graph.nodes if node.target in _ASSERTS]
    for node in (node for node in graph.nodes if node.target in _ASSERTS):
        known, waiting = {node}, [node]
        while waiting:
            new = [one for one in waiting.pop().all_input_nodes if one not in known]
            known.update(new)
            waiting += new
        given = [one for one in graph.nodes if one in known and one.op == "placeholder"]
        ops = [one for one in graph.nodes if one in known and one.op != "placeholder" and one is not node]
        drawn = (torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ()) for one in ops)
        plain = all(one.op == "call_function" and not any(map(writes, one.users)) for one in ops)
        if not plain or any(drawn) or not all(one.name in given_by_users for one in given) or not given:
            others.append(node)
            continue
        condition, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for one in (*given, *ops):
            copies[one] = condition.node_copy(one, copies.__getitem__)
        condition.output(fx.map_arg(node.args[0], copies.__getitem__))
        leaves = tuple(given_by_users.index(one.name) for one in given)
        line, code = code_line(node, installed=True), fx.GraphModule({}, condition)
        checks.append(InputCheck(line, code, str(condition), leaves, True))
    unread = [node for node in graph.nodes if node.target in _ASSERTS]
    for node in unread:  # which grows
        sources = node.all_input_nodes
        graph.erase_node(node)
        unread += [one for one in sources if not one.users and isinstance(one.meta.get("val"), _NUMBERS)]
    lines = (code_line(node, installed=True) for node in others)
    return checks, list(dict.fromkeys(filter(None, lines)))  # without a line it is torch's own


_NUMBERS = (int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
_ASSERTS = (
    torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg,
)  # fmt: skip


def model_frame() -> FrameType | None:
    """The innermost frame that is being run and is neither torch's nor parplan's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return frame


def asserted(frame: FrameType) -> bool | None:
    """The truth value of the branch at a frame without which the code raises; None where that is no such branch."""
    code = _instructions(frame.f_code)
    here = max((i for i, one in enumerate(code) if one.offset <= frame.f_lasti), default=0)
    # A condition that a call has returned (`.item()`) is branched on by the next instruction.
    here += "CALL" in code[here].opname
    expected = True
    while code[here].opname in ("TO_BOOL", "UNARY_NOT", "NOT_TAKEN", "EXTENDED_ARG"):
        expected ^= code[here].opname == "UNARY_NOT"
        here += 1
    jump = code[here]
    if "POP_JUMP" not in jump.opname or not jump.opname.endswith(("_IF_TRUE", "_IF_FALSE")):
        return None
    offsets = {one.offset: i for i, one in enumerate(code)}
    stays, jumps = _raises(code, here + 1), _raises(code, offsets[jump.argval])
    if stays == jumps:
        return None
    return expected == (jump.opname.endswith("_IF_TRUE") == stays)


def _instructions(code: CodeType) -> list[dis.Instruction]:
    return [one for one in dis.get_instructions(code) if one.opname not in ("CACHE", "PRECALL")]


def _raises(code: Sequence[dis.Instruction], start: int) -> bool:
    """Whether all that is done from an instruction on, without a branch, is to raise an error."""
    for one in code[start:]:
        if one.opname == "RAISE_VARARGS":
            return True
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs or one.opname.startswith(("RETURN", "YIELD")):
            return False
    return False
