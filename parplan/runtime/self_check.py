"""Compares the planned program of every new capture with the plain module, before its first step.

Both run one step on the call's own samples, or on a few of them where the capture serves any number: results, gradients
of a fixed projection of the results, and buffers have to agree. A difference beyond rounding is looked at again in
float64, on a copy of the module, before it is an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parplan.errors import PlanError, SelfCheckError, UncheckedWarning
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.packed import RNN_PACKED
from parplan.graph.user_line import user_line
from parplan.runtime.calls import Call
from parplan.runtime.captures import Captures, bound_to_batch
from parplan.runtime.checked_step import StepValues, executed_step, isolated, plain_step
from parplan.runtime.comparison import GroupDifference, compare_group, largest_of
from parplan.runtime.double_copy import double_call, double_casts, double_copy
from parplan.runtime.first_difference import first_difference
from parplan.runtime.programs import Captured, Options
from parplan.runtime.transport import Transport

__all__ = ["CHECKS", "CheckRecord", "SelfCheck"]

CHECKS = ("first", "always", "off")

# Samples per replica, and at least, of a step whose capture serves any number of samples.
_PER_REPLICA, _FEWEST = 4, 8


@dataclass(frozen=True)
class _Precision:
    """How far two runs in one type may be apart by rounding.

    Args:
        tolerance: relative to a tensor's largest element.
        floor: the share of the largest element of all tensors of its group that is the least to measure against.
    """

    tolerance: float
    floor: float


# A difference beyond these is repeated in float64, so they need not be wide; those of float64 are final.
_PRECISIONS = {
    torch.float64: _Precision(1e-7, 1e-4),
    torch.float32: _Precision(1e-4, 0.1),
    torch.float16: _Precision(1e-2, 0.1),
    torch.bfloat16: _Precision(5e-2, 0.1),
}
# Beyond this a difference is no rounding in this type, where it cannot be repeated in float64.
_GROSS = {torch.float64: 1e-7, torch.float32: 1e-2, torch.float16: 0.5, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class CheckRecord:
    """What one check found.

    Args:
        training: of the capture.
        samples: how many were compared, and `of` how many the call brought; None without samples.
        gradients: whether gradients were compared.
        differences: by group; none where nothing was compared.
        unchecked: why nothing was compared; "" where it was.
        left_out: what was not compared, or not as the model runs it.
        note: how a difference beyond the tolerance of the model's type was settled.
    """

    training: bool
    samples: int | None
    of: int | None
    gradients: bool
    differences: tuple[GroupDifference, ...] = ()
    unchecked: str = ""
    left_out: tuple[str, ...] = ()
    note: str = ""


class SelfCheck:
    """The checks of one compiled model.

    Args:
        module: the user's module.
        captures: its captured graphs, and what they are lowered to.
        transport: which devices there are.
        options: how the model runs.
        mode: "first": each capture once; "always": every call; or "off".

    Attributes:
        records: what was found, in order.
    """

    def __init__(
        self, module: nn.Module, captures: Captures, transport: Transport, options: Options, mode: str
    ) -> None:
        if mode not in CHECKS:
            raise PlanError(f'check is {mode!r}; it is "first", "always" or "off"')
        self._module = module
        self._captures = captures
        self._transport = transport
        self._options = options
        self._mode = mode
        self._warned: set[str] = set()
        self.records: list[CheckRecord] = []

    def before(self, call: Call, captured: Captured, training: bool) -> None:
        """Compare, if this capture was not yet, or every call is to be.

        Raises:
            SelfCheckError: the planned program computes something else.
        """
        gradients = torch.is_grad_enabled()
        known = self._mode == "first" and gradients in captured.checked
        if self._mode == "off" or known or self._transport.processes > 1:
            return
        record = self._checked(call, captured, training, gradients)
        captured.checked |= {gradients, False}  # what holds with gradients holds without
        if record.unchecked and record.unchecked not in self._warned:
            self._warned.add(record.unchecked)
            warnings.warn(f"{captured.graph.model} runs unchecked: {record.unchecked}", UncheckedWarning, stacklevel=4)
        if self._mode == "first" or record.unchecked:
            self.records.append(record)
        else:
            self.records[:] = [record]

    def _checked(self, call: Call, captured: Captured, training: bool, gradients: bool) -> CheckRecord:
        samples = call.batch if self._mode == "always" else part_of(call, captured)
        try:
            return self._compared(call, samples, captured, training, gradients)
        except _PlainFailure as failure:
            if samples == call.batch:
                return _unchecked(call, captured, gradients, str(failure))
        try:
            return self._compared(call, call.batch, captured, training, gradients)
        except _PlainFailure as failure:
            return _unchecked(call, captured, gradients, str(failure))

    def _compared(
        self, call: Call, samples: int | None, captured: Captured, training: bool, gradients: bool
    ) -> CheckRecord:
        part = call.first(samples if samples != call.batch else None)
        side = _Side(self._module, self._captures, captured, training, gradients)
        try:
            found = side.compare(part, keep=samples == call.batch)
        except torch.OutOfMemoryError as error:
            reason = f"there is no room to run it beside the plain module ({str(error).splitlines()[0]})"
            return _unchecked(call, captured, gradients, reason)
        record = CheckRecord(
            captured.graph.training,
            part.batch,
            call.batch,
            gradients,
            found.differences,
            left_out=_left_out(self._options, captured.graph, found.unknown),
        )
        if found.unknown and not found.agrees:
            ops = ", ".join(sorted(found.unknown))
            return _unchecked(call, captured, gradients, f"{ops} draws random numbers that two runs cannot draw alike")
        return record if found.agrees else self._repeated(record, part, side, found)

    def _repeated(self, record: CheckRecord, part: Call, side: _Side, found: _Found) -> CheckRecord:
        """Settle a difference: what float64 shows too is an error."""
        if found.precision is torch.float64:
            raise self._error(record, part, side, found, "in float64")
        type_name = str(found.precision).removeprefix("torch.")
        try:
            twin = self._twin(side, part)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip(": ")
            if any(group.difference > _GROSS[found.precision] for group in found.differences):
                how = f"in {type_name} (a copy in float64 cannot be made: {reason})"
                raise self._error(record, part, side, found, how) from error
            return _with_note(record, f"differs by rounding of {type_name}; a copy in float64 cannot be made: {reason}")
        again = twin.side.compare(twin.call, keep=False, double=True)
        if again.agrees:
            return _with_note(record, f"differs by rounding of {type_name}; agrees in float64")
        how = f"in {type_name}, and in float64 on a copy"
        raise self._error(record, twin.call, twin.side, again, how, double=True)

    def _twin(self, side: _Side, part: Call) -> _Twin:
        """A copy of the module in float64, captured anew under the same plan."""
        module, call, plan = double_copy(self._module), double_call(part), self._captures.plan
        assert plan is not None  # else nothing was captured
        options = Options(dim=self._options.dim, output=self._options.output, groups=self._options.groups)
        captures = Captures(module, lambda graph: plan, self._transport, options)
        with double_casts():
            captured = captures.find(call, side.training)
        return _Twin(_Side(module, captures, captured, side.training, side.gradients), call)

    def _error(
        self, record: CheckRecord, part: Call, side: _Side, found: _Found, how: str, double: bool = False
    ) -> SelfCheckError:
        with double_casts(double):
            place = first_difference(side.module, side.captures.programs, side.captured, part, found.plain, found.off)
        lines = [
            f"{side.captured.graph.model}: the planned program does not compute what the module computes "
            f"({_told(record)}, {how}):",
            *(f"  {_line(group, found.limits[group.group])}" for group in found.differences),
            *(f"  {text}" for text in place.text),
            "  This is a defect of parplan, or code of the model's that a captured graph cannot hold: please report it "
            'with the model\'s code. compile(check="off") runs the plan anyway; what differs can also be kept out of '
            "the compiled model and called in front of it or behind it.",
        ]
        return SelfCheckError("\n".join(lines), place.layer)


@dataclass(frozen=True)
class _Found:
    """The comparison of two steps."""

    differences: tuple[GroupDifference, ...]
    limits: Mapping[str, float]
    precision: torch.dtype
    plain: StepValues
    unknown: frozenset[str]

    @property
    def off(self) -> frozenset[str]:
        """Names of tensors that differ."""
        found = ((name, value, self.limits[g.group]) for g in self.differences for name, value in g.differences.items())
        return frozenset(name for name, value, limit in found if not value <= limit)

    @property
    def agrees(self) -> bool:
        return all(group.difference <= self.limits[group.group] for group in self.differences)


@dataclass(frozen=True)
class _Side:
    """A module, and a capture of it."""

    module: nn.Module
    captures: Captures
    captured: Captured
    training: bool
    gradients: bool

    def compare(self, part: Call, keep: bool, double: bool = False) -> _Found:
        """Run the plain module and its planned program on the same samples.

        Args:
            keep: the executor may serve the step itself.
            double: casts to shorter types are casts to float64.
        """
        graph = self.captured.graph
        samples = (part.batch if part.batch is not None else 1,)
        unknown: set[str] = set()
        with double_casts(double):
            plain = self._plain(part, unknown)
        with isolated(self.module, graph, self.gradients) as draws:
            executor = self.captures.programs.checking_executor(self.captured, samples, keep)
            planned = executed_step(self.module, executor, part.first(None), self.gradients)
            unknown |= draws.unknown if draws is not None else set()
        return _compared(plain, planned, _precision(graph), unknown)

    def _plain(self, part: Call, unknown: set[str]) -> StepValues:
        """The plain module's step; names ops whose random draws could not be replaced."""
        for accumulated in (False, True):
            try:
                with isolated(self.module, self.captured.graph, self.gradients) as draws:
                    found = plain_step(self.module, part.first(None), self.training, self.gradients, accumulated)
                unknown |= draws.unknown if draws is not None else set()
                return found
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if accumulated or not self.gradients:
                    raise _PlainFailure(error) from error
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class _Twin:
    """The same in float64."""

    side: _Side
    call: Call


class _PlainFailure(Exception):
    """The plain module itself fails on what it is given."""

    def __init__(self, error: Exception) -> None:
        line = user_line(error)
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        where = f" at {line}" if line else ""
        super().__init__(f"the plain module fails on these inputs with {type(error).__name__}: {first}{where}")


def part_of(call: Call, captured: Captured) -> int | None:
    """How many samples are compared: all, or a few for every replica where the capture serves any number."""
    if call.batch is None or bound_to_batch(captured.graph) or _reads_lengths(captured.graph):
        return call.batch
    replicas = max((strategy.replicas for strategy in captured.strategies.values()), default=1)
    few = max(_FEWEST, _PER_REPLICA * replicas)
    return few if call.batch > 2 * few else call.batch


def _reads_lengths(graph: LayerGraph) -> bool:
    """Whether results are as long as the longest sequence, which a part of the samples may lack."""
    return any(node.target is RNN_PACKED for layer in graph.layers.values() for node in layer.nodes)


def _precision(graph: LayerGraph) -> torch.dtype:
    """The shortest floating-point type that anything is computed in."""
    types = {spec.dtype for spec in graph.values.values()}
    found = [dtype for dtype in reversed(_PRECISIONS) if dtype in types]
    complex_types = {torch.complex64: torch.float32, torch.complex32: torch.float16}
    found += [real for dtype, real in complex_types.items() if dtype in types]
    return max(found, key=lambda dtype: _PRECISIONS[dtype].tolerance, default=torch.float32)


def _compared(plain: StepValues, planned: StepValues, precision: torch.dtype, unknown: set[str]) -> _Found:
    limits = _PRECISIONS[precision]
    wanted, given = _tensors(plain.results), _tensors(planned.results)
    pulled = largest_of(plain.gradients, plain.input_gradients)
    groups = [
        ("results", wanted, given, largest_of(wanted)),
        ("gradients", plain.gradients, planned.gradients, pulled),
        ("input gradients", plain.input_gradients, planned.input_gradients, pulled),
        ("buffers", plain.buffers, planned.buffers, largest_of(plain.buffers)),
    ]
    alike = _alike(plain.results, planned.results)
    found = [compare_group(n, a, b, limits.floor * largest) for n, a, b, largest in groups[0 if alike else 1 :] if a]
    if not alike:
        found.insert(0, GroupDifference("results", len(plain.results), float("inf"), "structure", {}))
    return _Found(
        tuple(found),
        {group.group: limits.tolerance for group in found},
        precision,
        plain,
        frozenset(unknown),
    )


def _alike(plain: Sequence[object], planned: Sequence[object]) -> bool:
    """Whether results have as many leaves, with tensors in the same places, and the same values in the others."""
    return len(plain) == len(planned) and all(
        isinstance(b, Tensor) if isinstance(a, Tensor) else (not isinstance(b, Tensor) and _equal(a, b))
        for a, b in zip(plain, planned, strict=True)
    )


def _equal(a: object, b: object) -> bool:
    simple = (bool, int, float, str, bytes)
    return a == b or (a != a and b != b) if isinstance(a, simple) and isinstance(b, simple) else type(a) is type(b)


def _tensors(results: Sequence[object]) -> dict[str, Tensor | None]:
    return {f"result {i}": leaf for i, leaf in enumerate(results) if isinstance(leaf, Tensor)}


def _left_out(options: Options, graph: LayerGraph, unknown: frozenset[str]) -> tuple[str, ...]:
    """What is not compared as the model runs it, by name."""
    found = []
    if not options.global_statistics and any(layer.mixes_batch for layer in graph.layers.values()):
        found.append('batch_norm="local": compared with the statistics of the whole batch')
    if options.per_replica:
        found.append('scalars="per_replica": compared with numbers of the whole batch')
    if not options.dropout:
        found.append("dropout=False: compared with dropout that keeps everything")
    if graph.sites:
        found.append("module hooks: they are not called")
    return (*found, *(f"{op} draws random numbers" for op in sorted(unknown)))


def _unchecked(call: Call, captured: Captured, gradients: bool, reason: str) -> CheckRecord:
    return CheckRecord(captured.graph.training, None, call.batch, gradients, unchecked=reason)


def _with_note(record: CheckRecord, note: str) -> CheckRecord:
    return CheckRecord(**{**record.__dict__, "note": note})


def _told(record: CheckRecord) -> str:
    mode = "training" if record.training else "evaluation"
    if record.samples is None:
        return mode
    return f"{mode}, {record.samples} samples" + (f" of {record.of}" if record.of != record.samples else "")


def _line(group: GroupDifference, limit: float) -> str:
    if group.difference <= limit:
        return f"{group.group}: {group.count} agree"
    off = sum(not difference <= limit for difference in group.differences.values())
    if group.difference == float("inf"):
        return f"{group.group}: {group.worst} has another shape or structure, or infinities elsewhere"
    return (
        f"{group.group}: {off} of {group.count} differ, most {group.worst}: {group.difference:.2g} of its largest "
        f"element (tolerance {limit:.0e})"
    )
