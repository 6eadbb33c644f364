"""Compares the planned program of every new capture with the plain module, before its first step.

Both run one step on the call's own samples, or on a few of them where the capture serves any number: results, gradients
of a fixed projection of the results, and buffers have to agree. A difference beyond rounding is looked at again in
float64, on a copy of the module, before it is an error.

Under torchrun all processes compare together where they all come to a new capture, which they tell each other with
their numbers of samples, or where a first training step brings them together in its backward. A process that comes to
a capture alone checks it by itself, on logical devices of its own, as far as it holds the whole model.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import nn

from parplan.errors import PlanError, RuntimeFailure, SelfCheckError, UncheckedWarning
from parplan.graph.attributes.input_checks import InputCheck
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.packed_sequences import RNN_PACKED
from parplan.runtime.calls import ModelCall
from parplan.runtime.programs.captures import Captures
from parplan.runtime.programs.program_cache import Captured, Options, Programs
from parplan.runtime.programs.rank_agreement import Agreement
from parplan.runtime.self_check.checked_step import isolated, plain_step, with_callers_modes
from parplan.runtime.self_check.comparison import GroupDifference
from parplan.runtime.self_check.double_copy import double_call, double_casts, double_copy
from parplan.runtime.self_check.first_difference import first_difference
from parplan.runtime.self_check.gathered_batch import Batch, gather_batch, shared_digest
from parplan.runtime.self_check.step_comparison import GROSS, CheckedModel, PlainFailure, StepDifference
from parplan.runtime.transport.base import Transport
from parplan.runtime.transport.local import LocalTransport

__all__ = ["CHECKS", "CheckRecord", "SelfCheck"]

CHECKS = ("first", "always", "off")

_TYPE = re.compile(r"torch\.(b?float\d+|complex\d+)")

# Samples per replica, and at least, of a step whose capture serves any number of samples.
_PER_REPLICA, _FEWEST = 2, 4


@dataclass(frozen=True)
class CheckRecord:
    """The findings of one comparison with the plain module.

    Args:
        training: of the capture.
        samples: how many of this process's were compared, and `of` how many the call brought; None without samples.
        gradients: whether gradients were compared.
        differences: by group; none where nothing was compared.
        unchecked: why nothing was compared; "" where it was.
        left_out: the things that were not compared, or not as the model runs them.
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


class _Unchecked(Exception):
    """Nothing can be compared; the text says why."""


class SelfCheck:
    """The checks of one compiled model.

    Args:
        module: the user's module.
        captures: its captured graphs, and what they are lowered to.
        transport: which devices there are.
        options: how the model runs.
        mode: "first": each capture once; "always": every call; or "off".

    Attributes:
        records: the findings, in order.
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
        self._trained_together = False
        self.records: list[CheckRecord] = []

    def wants(self, captured: Captured) -> bool:
        """Whether a capture is to be compared before the step that is about to run."""
        return self._mode == "always" or (self._mode == "first" and torch.is_grad_enabled() not in captured.checked)

    def before(self, call: ModelCall, captured: Captured, training: bool, agreement: Agreement) -> None:
        """Compare a step of the planned program with the plain module's.

        Raises:
            SelfCheckError: the planned program computes something else.
        """
        gradients = torch.is_grad_enabled()
        record = CheckRecord(captured.graph.training, None, call.batch, gradients)
        try:
            record = self._checked(call, captured, training, agreement, record)
        except _Unchecked as reason:
            record = replace(record, unchecked=str(reason))
        captured.checked |= {gradients, False}  # what holds with gradients holds without
        if record.unchecked and record.unchecked not in self._warned:
            self._warned.add(record.unchecked)
            warnings.warn(f"{captured.graph.model} runs unchecked: {record.unchecked}", UncheckedWarning, stacklevel=4)
        if self._mode == "always" and not record.unchecked:
            self.records.clear()
        self.records.append(record)

    def raise_own_error(self, call: ModelCall, captured: Captured, check: InputCheck, training: bool) -> NoReturn:
        """Raise the plain module's error for inputs that it asserts not to get; no trace is left of its forward."""
        sharding = self._captures.programs.sharding
        if sharding is not None and sharding.cuts:
            raise RuntimeFailure(f"the model refuses these inputs\n  at {check.line}")
        with with_callers_modes(), isolated(self._module, captured.graph, torch.is_grad_enabled()):
            plain_step(self._module, call, training, None)
        raise RuntimeFailure(
            "the model was captured as if these inputs were refused, and its own code catches the error or raises it "
            f"under another condition; use torch.where, or check inputs in front of the model\n  at {check.line}"
        )

    def _checked(
        self, call: ModelCall, captured: Captured, training: bool, agreement: Agreement, record: CheckRecord
    ) -> CheckRecord:
        if self._captures.programs.cuts_start:
            raise _Unchecked(
                "it came on the meta device and is cut over processes, so that none holds the plain module to compare "
                "with; run a smaller model of the same blocks with the check"
            )
        subject = CheckedModel(
            self._module, self._captures.programs, self._transport, captured, training, record.gradients
        )
        trains = captured.graph.training and record.gradients
        if self._transport.processes == 1:
            together = True
        elif agreement.wishes is not None:
            together = all(agreement.wishes)
        else:
            # The backward of a training step waits for all processes, so all of them are at one.
            together = trains and (self._mode == "always" or not self._trained_together)
        if together:
            self._trained_together |= trains
            return self._compared(subject, call, agreement.samples, record)
        sharding = self._captures.programs.sharding
        if captured.groups is not None or (sharding is not None and sharding.cuts):
            why = (
                "processes do not wait for each other in this step, so this one cannot count on the others to compare"
                if agreement.wishes is None
                else "this process came to a new capture alone (other shapes or another mode than the others': let all "
                "meet new shapes in the same step)"
            )
            raise _Unchecked(f"{why}, and it holds only a part of the model")
        transport = LocalTransport([self._transport.physical(self._transport.rank)] * self._transport.processes)
        programs = Programs(self._module, transport, replace(self._options, threads=False, output=0))
        alone = replace(subject, programs=programs, transport=transport)
        found = self._compared(alone, call, None, record)
        return replace(found, left_out=(*found.left_out, "what processes send each other: it was checked in this one"))

    def _compared(
        self, subject: CheckedModel, call: ModelCall, step: tuple[int, ...] | None, record: CheckRecord
    ) -> CheckRecord:
        """Compare on a part of the samples, or on all where the module fails on a part.

        Args:
            step: samples per process of the step itself, which its executor serves.
        """
        few, graph, failure = call.batch, subject.captured.graph, ""
        # Results may be as long as the longest sequence, which a part of the samples may lack.
        packed = any(node.target is RNN_PACKED for layer in graph.layers.values() for node in layer.nodes)
        if call.batch is not None and self._mode != "always" and not packed and not graph.fixed_batch:
            # The capture serves any number of samples: a few for every replica are compared. In one process replicas
            # then have unequal parts where they have them of all samples.
            replicas = max((strategy.replicas for strategy in subject.captured.strategies.values()), default=1)
            few = -(-max(_FEWEST, _PER_REPLICA * replicas) // subject.transport.processes)
            few += (call.batch - few) % replicas if subject.transport.processes == 1 else 0
            few = min(call.batch, few)
            if not subject.captured.serves(few * subject.transport.processes):
                few = call.batch
        whole = (call.batch or 0) * subject.transport.processes
        if call.batch is not None and whole not in subject.captured.batches and not graph.size_branches.hold(whole):
            raise _Unchecked(
                f"processes are compared one by one, and with the {call.batch} samples of this one the model may take "
                f"another branch than with those of all processes, at {graph.size_branches.line}"
            )
        for samples in (few, call.batch):
            try:
                return self._compared_on(subject, call, samples, step, record)
            except PlainFailure as error:
                failure = str(error)
            if _all(subject.transport, few == call.batch):
                break
        raise _Unchecked(failure)

    def _compared_on(
        self,
        subject: CheckedModel,
        call: ModelCall,
        samples: int | None,
        step: tuple[int, ...] | None,
        record: CheckRecord,
    ) -> CheckRecord:
        part = call.first(samples if samples != call.batch else None)
        transport, graph, unknown = subject.transport, subject.captured.graph, set[str]()
        batch = Batch(part, part, (part.batch if part.batch is not None else 1,))
        if transport.processes > 1:
            told = transport.gather(batch.sizes[0], shared_digest(part))
            if len({digest for _, digest in told}) > 1:
                raise _Unchecked(
                    "processes brought inputs that differ in more than their samples: shapes, types or values"
                )
            batch = gather_batch(transport, part, [size for size, _ in told], subject.captured.groups)
        reason, failed, plain = "", False, None
        try:
            _check_room(subject, batch)
            plain = subject.plain(batch, unknown)
        except torch.OutOfMemoryError as error:
            reason = f"there is no room to run it beside the plain module ({str(error).splitlines()[0]})"
        except PlainFailure as error:
            reason, failed = str(error), True
        if first := _first(transport, f"{int(failed)}{reason}" if reason else ""):
            raise PlainFailure(first[1:]) if first[0] == "1" else _Unchecked(first[1:])
        assert plain is not None  # else there is a reason
        found = subject.compare(batch, plain, unknown, keep=batch.sizes == step)
        left_out, options = [], self._options  # the things that are not compared as the model runs them
        if not options.global_statistics and any(layer.mixes_batch for layer in graph.layers.values()):
            left_out.append('batch_norm="local": compared with the statistics of the whole batch')
        if options.per_replica:
            left_out.append('scalars="per_replica": compared with numbers of the whole batch')
        if not options.dropout:
            left_out.append("dropout=False: compared with dropout that keeps everything")
        if graph.sites:
            left_out.append("module hooks: they are not called")
        leaves = enumerate(batch.whole.leaves)
        shared = [i for i, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        left_out += [f"the gradient of input {i}, which all processes share" for i in shared if batch.shares_input(i)]
        left_out += [f"{op} draws random numbers" for op in sorted(found.unknown)]
        record = replace(record, samples=part.batch, differences=found.differences, left_out=tuple(left_out))
        if _all(transport, found.agrees):
            return record
        if found.unknown:
            raise _Unchecked(f"{', '.join(sorted(found.unknown))} draws random numbers that two runs cannot draw alike")
        return self._repeated(record, batch, subject, found)

    def _repeated(self, record: CheckRecord, batch: Batch, subject: CheckedModel, found: StepDifference) -> CheckRecord:
        """Settle a difference: one that float64 shows too is an error."""
        if not found.alike:
            raise _error(record, batch, subject, found, "in its results' types or structure")
        if found.precision is torch.float64:
            raise _error(record, batch, subject, found, "in float64")
        type_name = str(found.precision).removeprefix("torch.")
        twin, reason = None, ""
        try:
            with subject.whole():
                twin = double_copy(self._module)
        except Exception as error:
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        reason = _first(subject.transport, reason)
        gross = any(group.difference > GROSS[found.precision] for group in found.differences)
        if twin is None or reason:
            if not _all(subject.transport, not gross):
                how = f"in {type_name}; a copy in float64 cannot be made: {reason}"
                raise _error(record, batch, subject, found, how)
            return replace(record, note=f"differs by rounding of {type_name}; a copy cannot be made: {reason}")
        plan = self._captures.plan
        assert plan is not None  # else nothing was captured
        options = Options(dim=self._options.dim, output=self._options.output, groups=self._options.groups)
        captures = Captures(twin, lambda graph: plan, subject.transport, options)
        with double_casts():
            captured = captures.recaptured(double_call(batch.own), subject.training, subject.captured.graph, plan)
        double = replace(subject, module=twin, programs=captures.programs, captured=captured, double=True)
        exact, unknown = replace(batch, whole=double_call(batch.whole), own=double_call(batch.own)), set[str]()
        again = double.compare(exact, double.plain(exact, unknown), unknown, keep=False)
        if _all(subject.transport, again.agrees):
            if _all(subject.transport, not gross or _words(subject.captured.graph) == _words(captured.graph)):
                return replace(record, note=f"differs by rounding of {type_name}, and agrees in float64")
            raise _error(record, batch, subject, found, f"in {type_name}, by more than rounding")
        record = replace(record, differences=again.differences)
        raise _error(record, exact, double, again, f"in {type_name}, and in float64 on a copy")


def _words(graph: LayerGraph) -> list[str]:
    """Ops with their arguments, of which a graph and its cast to another type have the same."""
    nodes = (node for layer in graph.layers.values() for node in layer.nodes)
    return [_TYPE.sub("type", f"{node.target} {node.args} {node.kwargs}") for node in nodes]


def _error(record: CheckRecord, batch: Batch, subject: CheckedModel, found: StepDifference, how: str) -> SelfCheckError:
    """The error of a difference; every process of the comparison has to call this."""
    place = first_difference(subject, batch, found)
    lines = [*found.lines(), *place.text]
    own = "\n".join([place.layer or "", *lines]) if not found.agrees or place.layer else ""
    layer, *told = _first(subject.transport, own).splitlines()
    mode = "training" if record.training else "evaluation"
    if record.samples is not None:
        mode += f", {record.samples} samples" + (f" of {record.of}" if record.of != record.samples else "")
    text = [
        f"{subject.captured.graph.model}: the planned program does not compute what the module computes "
        f"({mode}, {how}):",
        *(f"  {line}" for line in told),
        "  This is a defect of parplan, or code of the model's that a captured graph cannot hold: please report it "
        'with the model\'s code. compile(check="off") runs the plan anyway; what differs can also be kept out of '
        "the compiled model and called in front of it or behind it.",
    ]
    return SelfCheckError("\n".join(text), layer or None)


def _first(transport: Transport, text: str) -> str:
    """This process's text, or that of the first one that has any."""
    texts = transport.gather_texts(text)
    return text or next(filter(None, texts), "")


def _all(transport: Transport, agrees: bool) -> bool:
    """Whether all processes say so."""
    return not transport.any([not agrees])[0]


def _check_room(subject: CheckedModel, batch: Batch) -> None:
    """Refuse to run the plain module where its weights, gradients and activations exceed what is free on its device.

    Raises:
        OutOfMemoryError: there is too little room.
    """
    place = subject.transport.physical(subject.transport.owned[0])
    if place.type == "cpu":
        return
    graph = subject.captured.graph
    held = sum(tensor.nbytes for tensor in (*subject.module.parameters(), *subject.module.buffers()))
    share = (batch.whole.batch or 1) / (graph.batch or 1)
    values = sum(graph.values[value].nbytes for layer in graph.layers.values() for value in layer.outputs)
    wanted = 3 * held + int(values * (share if graph.batch else 1))
    memory = torch.accelerator
    free = memory.get_memory_info(place)[0] + memory.memory_reserved(place) - memory.memory_allocated(place)
    if wanted > free:
        raise torch.OutOfMemoryError(f"about {wanted:,} bytes are needed and {free:,} are free on {place}")
