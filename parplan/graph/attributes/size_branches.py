"""Python branches on sizes of tensors: recorded while a model is captured, evaluated for other numbers of samples.

A capture takes every branch of the forward once. Where `if x.shape[0] > 20` decides otherwise for another number of
samples, the graph is that of another model, and nothing in the graph says so. So the sizes that a forward reads are
integers that know how they were calculated, and comparisons of them are kept. Of two captures with different numbers of
samples it follows how each size grows, and with it each comparison for any number.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from parplan.compat import pytree
from parplan.graph.attributes.input_checks import model_frame
from parplan.graph.user_line import source_line

__all__ = ["SIZE_READS", "SizeBranches", "SizeReads", "without_sizes"]

_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]
SIZE_READS = frozenset([_SHAPE, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, torch.numel])
_LINEAR = (operator.add, operator.sub, operator.neg, operator.pos)
_LEN = len
_MANY = 1 << 40


@dataclass(frozen=True)
class _Read:
    """The size that was read at a place of the forward, by number."""

    number: int


@dataclass(frozen=True)
class _Result:
    """The result of an operation on sizes and plain numbers."""

    operation: Callable[..., Any]
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class _Noted:
    """A comparison of sizes, or a number that a size becomes and that a graph may have as a constant.

    Args:
        formula: of the number, or the comparison.
        value: at the captured number of samples; of a comparison the side that was taken.
        seen: it is known how it is calculated for others.
        place: file and line of the model's code.
    """

    formula: Any
    value: Any
    seen: bool
    place: tuple[str, int]

    @property
    def line(self) -> str:
        """The line of the model's code."""
        return source_line(*self.place)


class SizeReads:
    """Sizes that one forward reads, and the branches that it takes on them.

    Attributes:
        on: whether reads count now.
        values: the sizes in the order of the reads.
        branches: comparisons.
        numbers: sizes that leave Python's arithmetic (`int(size)`, `str(size)`), and results of operations that are not
            linear.
    """

    def __init__(self) -> None:
        self.on = False
        self.values: list[int] = []
        self.branches: list[_Noted] = []
        self.numbers: list[_Noted] = []

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """While it lasts, reads count, or do not."""
        before, self.on = self.on, on
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def of_one_forward(self) -> Iterator[None]:
        """While it lasts, reads count; `len` of a tensor, of which Python makes a plain integer, is one of them."""

        def length(container: Any) -> int:
            if self.on and isinstance(container, Tensor) and container.dim():
                return container.size(0)
            return _LEN(container)

        builtins.len = length
        try:
            with self.switched(on=True):
                yield
        finally:
            builtins.len = _LEN

    def seen(self, sizes: Any) -> Any:
        """Sizes that one of `SIZE_READS` gives, as integers that know where they are from."""
        if not self.on:
            return sizes
        if isinstance(sizes, tuple):
            made = [self._read(size) if type(size) is int else size for size in sizes]
            return torch.Size(made) if isinstance(sizes, torch.Size) else tuple(made)
        return self._read(sizes) if type(sizes) is int else sizes

    def _read(self, size: int) -> Any:
        self.values.append(size)
        return _Integer.of(size, self, _Read(len(self.values) - 1))

    def note(self, formula: Any, value: Any, seen: bool = True) -> None:
        """Keep a branch, or a number."""
        frame = model_frame() if self.on else None
        if frame is not None:
            noted = _Noted(formula, value, seen, (frame.f_code.co_filename, frame.f_lineno))
            (self.branches if isinstance(value, bool) else self.numbers).append(noted)


class _Size:
    """A number calculated from sizes of tensors."""

    reads: SizeReads
    formula: Any

    @classmethod
    def of(cls, value: Any, reads: SizeReads, formula: Any) -> Any:
        """The number with its formula."""
        made = cls(value)  # type: ignore[call-arg]
        made.reads, made.formula = reads, formula
        return made

    def __reduce__(self) -> Any:
        """Copies are plain numbers."""
        return _plain(self).__class__, (_plain(self),)


class _Integer(_Size, int):
    """An integer calculated from sizes."""


class _Float(_Size, float):
    """A fraction calculated from sizes."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Integer):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, _Float) else value


def without_sizes(value: Any) -> Any:
    """Nested values with plain numbers in the place of those that know how they were calculated."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=lambda leaf: isinstance(leaf, torch.Size))
    if not any(isinstance(part, _Size) for leaf in leaves for part in (leaf if type(leaf) is torch.Size else [leaf])):
        return value
    made = [torch.Size(map(_plain, leaf)) if type(leaf) is torch.Size else _plain(leaf) for leaf in leaves]
    return pytree.tree_unflatten(made, spec)


def _calculated(own: _Size, operation: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """The result of an operation on sizes, with its formula; a truth value is a branch."""
    value = operation(*map(_plain, operands))
    terms = (one.formula if isinstance(one, _Size) and one.reads is own.reads else _plain(one) for one in operands)
    formula = _Result(operation, tuple(terms))
    if isinstance(value, bool) or operation not in _LINEAR:
        own.reads.note(formula, value)
    if isinstance(value, bool):
        return value
    if type(value) not in (int, float) or not own.reads.on:
        return value
    return (_Integer if type(value) is int else _Float).of(value, own.reads, formula)


def _method(operation: Callable[..., Any], turned: bool = False) -> Callable[..., Any]:
    def method(self: _Size, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        return _calculated(self, operation, (*others, self) if turned else (self, *others))

    return method


def _taken_out(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion to a plain number, text or hash, of which nothing more is seen."""

    def method(self: _Size, *others: Any) -> Any:
        self.reads.note(self.formula, _plain(self), seen=False)
        return plain(_plain(self), *others)

    return method


def _operators() -> dict[str, Callable[..., Any]]:
    """The methods of numbers that keep formulas, by name."""
    two = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"]
    one = ["neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"]
    rounded: dict[str, Callable[..., Any]] = {
        "round": round,
        "ceil": math.ceil,
        "floor": math.floor,
        "trunc": math.trunc,
        "bool": operator.truth,
    }
    out: dict[str, Callable[..., Any]] = {
        "int": int,
        "float": float,
        "hash": hash,
        "str": str,
        "repr": repr,
        "format": format,
    }
    return {
        **{f"__{name}__": _method(getattr(operator, f"__{name}__")) for name in [*two, *one]},
        **{f"__r{name}__": _method(getattr(operator, f"__{name}__"), turned=True) for name in two},
        **{f"__{name}__": _method(function) for name, function in rounded.items()},
        **{f"__{name}__": _taken_out(function) for name, function in out.items()},
        "__divmod__": lambda self, other: (self // other, self % other),
        "__rdivmod__": lambda self, other: (other // self, other % self),
    }


for _kind in (_Integer, _Float):
    for _name, _operator in _operators().items():
        if hasattr(_kind, _name):
            setattr(_kind, _name, _operator)


@dataclass(frozen=True)
class SizeBranches:
    """The branches of a captured forward that may decide otherwise for another number of samples.

    Args:
        batch: samples of the capture.
        twin: samples of the other capture, by which a graph's constants grow.
        sizes: what the forward reads, by number: at no samples, and how much more with each.
        branches: comparisons.
        bent: numbers that are not linear in the samples, which a capture takes its constants to be.
        taken_out: lines that make plain numbers of sizes, of which it is not known what they decide.
        ops: a digest of what does not change with the samples, where there are such numbers.
    """

    batch: int = 0
    twin: int = 1
    sizes: tuple[tuple[int, int], ...] = ()
    branches: tuple[_Noted, ...] = ()
    bent: tuple[_Noted, ...] = ()
    taken_out: tuple[str, ...] = ()
    ops: str = ""

    @staticmethod
    def of(first: SizeReads, batch: int, other: SizeReads, other_batch: int, ops: Callable[[], str]) -> SizeBranches:
        """The branches of a forward that was recorded with two different numbers of samples.

        Args:
            ops: gives the digest.
        """
        pairs = list(zip(first.values, other.values, strict=False))
        steps = [Fraction(b - a, other_batch - batch) for a, b in pairs]
        if len(first.values) != len(other.values) or any(step.denominator != 1 for step in steps):
            # It reads other sizes with another number of samples, or sizes that grow in steps.
            lines = tuple(dict.fromkeys(one.line for one in (*first.branches, *first.numbers)))
            return SizeBranches(batch, other_batch, taken_out=lines, ops=ops() if lines else "")
        sizes = tuple((a - int(step) * batch, int(step)) for (a, _), step in zip(pairs, steps, strict=True))
        kept = {one.formula: one for one in reversed(first.branches) if _turns(one.formula, sizes)}
        found = [(one, _affine(one.formula, sizes)) for one in first.numbers]
        lines = tuple(dict.fromkeys(one.line for one, line in found if not one.seen and (line is None or line[1])))
        bent = tuple({one.formula: one for one, line in found if one.seen and line is None}.values())
        return SizeBranches(
            batch, other_batch, sizes, tuple(reversed(kept.values())), bent, lines, ops() if lines or bent else ""
        )

    @property
    def any(self) -> bool:
        """Whether there are such branches, or numbers."""
        return bool(self.branches or self.bent or self.taken_out)

    @property
    def line(self) -> str:
        """The first line of the forward with such a branch; empty without one."""
        return next(iter([*(one.line for one in (*self.branches, *self.bent)), *self.taken_out]), "")

    def turned(self, batch: int) -> str:
        """The line of a branch that is taken otherwise with `batch` samples; empty without one."""
        for one in self.branches if batch != self.batch else ():
            try:
                same = _value(one.formula, self.sizes, batch) is one.value
            except ArithmeticError:
                same = False
            if not same:
                return one.line
        return ""

    def hold(self, batch: int) -> bool | None:
        """Whether the graph is that of a call with `batch` samples; None where that is not known."""
        if batch == self.batch or not self.any:
            return True
        if self.turned(batch):
            return False
        return None if self.taken_out or not all(self._is_linear(one, batch) for one in self.bent) else True

    def _is_linear(self, number: _Noted, batch: int) -> bool:
        """Whether a number is what the graph has in its place with `batch` samples."""
        try:
            twin, found = (_value(number.formula, self.sizes, samples) for samples in (self.twin, batch))
            grown = (twin - number.value) / (self.twin - self.batch) * (batch - self.batch)
            return math.isclose(found, number.value + grown, rel_tol=1e-9)
        except (ArithmeticError, TypeError):
            return False


def _value(term: Any, sizes: Sequence[tuple[int, int]], batch: int) -> Any:
    if isinstance(term, _Read):
        at_none, step = sizes[term.number]
        return at_none + step * batch
    if isinstance(term, _Result):
        return term.operation(*(_value(operand, sizes, batch) for operand in term.operands))
    return term


def _affine(term: Any, sizes: Sequence[tuple[int, int]]) -> tuple[Any, Any] | None:
    """A number at no samples, and how much more it is with each; None where it grows otherwise."""
    if isinstance(term, _Read):
        return sizes[term.number]
    if not isinstance(term, _Result):
        return term, 0
    parts = [_affine(operand, sizes) for operand in term.operands]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    constants, steps = [part[0] for part in known], [part[1] for part in known]
    if not any(steps):
        return term.operation(*constants), 0
    if term.operation in _LINEAR:
        return term.operation(*constants), term.operation(*steps)
    if term.operation is operator.mul and not all(steps):
        factor = constants[steps.index(0)]
        return constants[0] * constants[1], sum(steps) * factor
    return None


def _turns(comparison: _Result, sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether a comparison gives the other truth value for some number of samples, as far as that is known."""
    sides = [_affine(operand, sizes) for operand in (*comparison.operands, 0)[:2]]
    known = [side for side in sides if side is not None]
    if len(known) < 2:
        return True
    at_none, step = (a - b for a, b in zip(*known, strict=True))
    if not step:
        return False
    if comparison.operation in (operator.eq, operator.ne, operator.truth):
        if isinstance(at_none, float) or isinstance(step, float):
            return True
        samples = Fraction(-at_none, step)
        return samples >= 1 and samples.denominator == 1
    return bool(comparison.operation(at_none + step, 0)) != bool(comparison.operation(at_none + step * _MANY, 0))
