"""torch.export of one call of a model: its program, and what the forward reads, writes and hands back beside it."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules.batchnorm import _BatchNorm

from parplan.compat import expression_of, lazy_code, pytree
from parplan.errors import CaptureError
from parplan.graph.attributes.containers import ContainerResults, returned_containers
from parplan.graph.attributes.first_call import Change, refusal
from parplan.graph.attributes.input_checks import asserted_in
from parplan.graph.attributes.number_inputs import Number
from parplan.graph.attributes.recording import Recorder, recorded
from parplan.graph.attributes.surroundings import compiling_branches
from parplan.graph.axes.bags import join_bags
from parplan.graph.capture.block_copies import UnequalBlocks
from parplan.graph.capture.equal_blocks import EqualBlocks
from parplan.graph.export.assigned_buffers import assigned_buffers
from parplan.graph.export.batched_lookup import gather_batched_lookups
from parplan.graph.export.expert_routing import unsort_experts
from parplan.graph.export.functionalise import inline_grad_regions
from parplan.graph.export.plain_forms import plain_forms
from parplan.graph.export.stand_ins import DataDetached, RegionsDetached, idle_conversions, missing_devices, stand_ins
from parplan.graph.packed_sequences import packed_sequences
from parplan.graph.user_code.module_hooks import Site, marked_hooks
from parplan.graph.user_code.opaque import OpaqueCalls
from parplan.graph.user_line import failing_module, library_line, user_line

__all__ = ["ExportRequest", "Exported", "FirstCallChanges", "export_call"]


@contextlib.contextmanager
def quiet(said: list[str]) -> Iterator[None]:
    """Hold back warnings, log lines of this thread and prints, of which the text is added to `said`."""
    held, thread = io.StringIO(), get_ident()

    def is_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    handlers = {handler for logger in loggers for handler in (*logger.handlers, logging.lastResort) if handler}
    for handler in handlers:
        handler.addFilter(is_others)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(held), contextlib.redirect_stdout(held):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_others)
    said.append(held.getvalue())


@dataclass(frozen=True)
class ExportRequest:
    """The call to capture: a model, the leaves of its arguments, and the dimension of the samples.

    `compiling` says whether the code that the model has for compilers is taken; None: where its code for Python fails.
    `symbolic` are the leaves of which the samples are a symbol, in an export that shows guards and never runs; `said`
    is the text that the model prints, per export.
    """

    model: nn.Module
    leaves: Sequence[Any]
    in_spec: Any
    batch: int | None
    dim: int
    training: bool
    numbers: Sequence[Number] = ()
    compiling: bool | None = None
    symbolic: frozenset[int] = frozenset()
    said: list[str] = field(default_factory=list)

    @property
    def alike(self) -> frozenset[int]:
        """Leaves of the batch's size."""
        sized = [(i, x) for i, x in enumerate(self.leaves) if isinstance(x, torch.Tensor) and x.dim() > self.dim]
        return frozenset(i for i, leaf in sized if leaf.shape[self.dim] == self.batch)

    def resized(self, samples: frozenset[int], wanted: int | None) -> Any:
        """(args, kwargs) of the same shapes with `wanted` samples; memory of large tensors is never touched."""
        made = list(self.leaves)
        for index in self.alike:
            leaf, shape = made[index], list(made[index].shape)
            shape[self.dim] = wanted if index in samples and wanted is not None else shape[self.dim]
            make = torch.empty if leaf.is_floating_point() else torch.zeros
            try:
                made[index] = make(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
            except (RuntimeError, MemoryError) as error:
                raise CaptureError(
                    f"there is no room for an input of shape {shape} to capture with: {str(error).splitlines()[0]}; "
                    "use a smaller batch"
                ) from error
        return pytree.tree_unflatten(made, self.in_spec)

    def symbols(self, given: Any) -> Any:
        """The sizes of a call's arguments that are symbols; None without one."""
        shapes, leaves = torch.export.ShapesCollection(), pytree.tree_leaves(given)
        for index in self.symbolic:
            shapes[leaves[index]] = {self.dim: torch.export.Dim.AUTO}
        return shapes if self.symbolic else None


_VMAP = "torch._functorch.predispatch"


@dataclass(frozen=True)
class Exported:
    """An exported call.

    Args:
        program: as torch.export gives it, with lookups in step with the samples rewritten.
        recorder: attributes that the forward reads and writes.
        sites: calls of modules with hooks, by the name their marks carry.
        opaque: calls of the user's code that have to do with the backward.
        ops: with the modules that they are in, in their order.
        copied: the blocks that were not traced.
        containers: caches among the arguments that it returns or changes.
        compiling: the model's lines that ask whether they are compiled, where they were told so.
    """

    program: ExportedProgram
    recorder: Recorder
    sites: dict[str, Site]
    opaque: OpaqueCalls
    containers: ContainerResults
    ops: tuple[tuple[str, Any], ...]
    copied: tuple[str, ...] = ()
    compiling: tuple[str, ...] = ()

    def has_ops_of(self, other: Exported) -> bool:
        """Whether it has the ops of another one, in the same modules, but for blocks that it has copied."""
        blocks = tuple(f"{path}." for path in self.copied)
        own, others = ([(at, op) for at, op in one.ops if not f"{at}.".startswith(blocks)] for one in (self, other))
        return own == others


class FirstCallChanges(CaptureError):
    """The error for a forward that changes state which is no tensor of the graph, perhaps at its first call only.

    Args:
        changes: those that one call makes.
        program: of a call that makes them.
    """

    def __init__(self, changes: Sequence[Change], program: ExportedProgram) -> None:
        super().__init__(str(refusal(changes[0].path, changes[0].what)))
        self.changes = tuple(changes)
        self.program = program


def export_call(call: ExportRequest, given: Any, equal: EqualBlocks | None = None) -> Exported:
    """Export `call` with the arguments `given`, a resized copy of its own.

    A forward may have code of its own for compilers (`torch.compiler.is_compiling()`). Captured is the code that runs
    in Python, and only where that cannot be exported the other, of which the caller is warned.

    Args:
        equal: blocks of which few are traced. The ops of the others are filled in, but not where sizes are symbols.

    Raises:
        CaptureError: the model cannot be exported; the text names the line.
        FirstCallChanges: it changes its own state.
        UnequalBlocks: of `equal`, it has to be exported in full.
    """
    with compiling_branches(taken=bool(call.compiling)) as lines:
        try:
            made = _export(call, given, equal)
            return replace(made, compiling=tuple(lines) if call.compiling else ())
        except FirstCallChanges:
            raise
        except CaptureError as error:
            if not lines or call.compiling is not None or call.numbers:
                raise
            reason = error
    again = EqualBlocks(call.model) if equal is not None else None
    with compiling_branches(taken=True) as lines:
        try:
            made = _export(call, given, again)
        except FirstCallChanges:
            raise
        except CaptureError:
            raise reason from None
    warnings.warn(
        f"{type(call.model).__name__}: captured is the code that it runs for compilers, which may compute something "
        f"else than the code that it runs in Python; it asks at {next(iter(lines), 'a line that is not known')}\n  the "
        f"code for Python cannot be captured: {reason}",
        stacklevel=2,
    )
    return replace(made, compiling=tuple(lines))


def _export(call: ExportRequest, given: Any, equal: EqualBlocks | None) -> Exported:
    model, training = call.model, call.training
    sites, opaque = dict[str, Site](), OpaqueCalls()
    args, kwargs = given
    modes = {module: module.training for module in model.modules()}
    if training != model.training:
        model.train(training)
    try:
        # Statistics over all batches so far weigh each batch by how many there were, which no graph has as a constant.
        for name, module in model.named_modules():
            averages = isinstance(module, _BatchNorm) and module.momentum is None and module.track_running_stats
            if averages and module.training:
                raise CaptureError(
                    f"{name or type(model).__name__}: batch norm with momentum=None averages over all batches so far, "
                    "which parplan does not capture in training; give it a momentum, such as 0.1 "
                    "(torch.optim.swa_utils.update_bn sets None: run it on the plain model, `module` of a compiled "
                    "one, under torchrun with the same samples in every process)"
                )
        with (
            quiet(call.said),
            lazy_code(),
            stand_ins(model),
            missing_devices(),
            idle_conversions(),
            DataDetached(),
            RegionsDetached(),
            packed_sequences(),
            marked_hooks(model, sites),
            assigned_buffers(model) as replaced,
            opaque.intercepted(model),
            returned_containers(model) as containers,
            recorded(model, call.numbers) as recorder,
            equal.traced_once(recorder) if equal is not None else contextlib.nullcontext(),
        ):
            exported = torch.export.export(model, args, kwargs, strict=False, dynamic_shapes=call.symbols(given))
            inline_grad_regions(exported)
            copied = equal.copied if equal is not None else ()
            if equal is not None and not call.symbolic:
                equal.fill_in(exported)
            ops = tuple(_calls(exported))
            if call.symbolic:
                return Exported(exported, recorder, sites, opaque, ContainerResults(), ops, copied)
            if any(getattr(node.target, "__module__", "") == _VMAP for node in exported.graph.nodes):
                exported = exported.run_decompositions({})  # of `torch.vmap`, plain batched ops
            recorder.check(exported)
            checks, recorder.host_reads.unchecked = asserted_in(exported)
            recorder.host_reads.checks += checks
    except (CaptureError, UnequalBlocks):
        raise
    except Exception as error:
        line, layer = user_line(error) or library_line(error, model), failing_module(error, model)
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        reason = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
        if isinstance(error, GuardOnDataDependentSymNode):
            reason = _branch(error, model.get_submodule(layer), line)
        where = f"{layer}: " if layer else ""
        text = f"{type(model).__name__} cannot be captured: {where}{reason}\n"
        kind = _UNKNOWN_TYPE.search(str(error))
        # A wrong call or a wrong shape raises plain Python errors or a RuntimeError.
        in_tracing = (
            type(error).__module__.startswith("torch") or "export" in str(error) or "fake" in str(error).lower()
        )
        hint = _UNTRACEABLE if in_tracing else _unfit(model, args, kwargs)
        if kind is not None:
            hint = _UNREGISTERED.format(kind=kind[1] or kind[2])
        raise CaptureError(text + (f"  at {line}\n" if line else "") + hint) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    lifted = exported.graph_signature.inputs_to_lifted_tensor_constants
    plain_forms(exported.graph, {name: exported.constants.get(path) for name, path in lifted.items()})
    gather_batched_lookups(exported.graph)
    join_bags(exported.graph)
    unsort_experts(exported.graph)
    if changes := [*replaced, *recorder.changes]:
        raise FirstCallChanges(changes, exported)
    return Exported(exported, recorder, sites, opaque, containers(), ops, copied)


def _calls(program: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """The ops of a program, without those that calculate sizes, and the modules that they are in."""
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            if not isinstance(node.target, OpOverload) or node.target.overloadpacket in _OF_SIZES:
                continue
            if node.target in _PARTS and _shape(node) == _shape(node.args[0]):
                continue  # of all there is: left out, or an alias, where sizes are numbers
            paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            yield paths[-1] if paths else "", node.target


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(map(expression_of, node.meta["val"].shape))


_ATEN = torch.ops.aten
_PARTS = (_ATEN.slice.Tensor, _ATEN.alias.default)
_OF_SIZES = frozenset(
    (_ATEN.sym_size, _ATEN.sym_numel, _ATEN.sym_stride, _ATEN._assert_scalar, torch.ops.parplan.equal_block)
)


def _unfit(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The hint of a forward that fails on its example inputs, with the names among them that it does not have."""
    known = inspect.signature(model.forward).parameters
    unknown = [name for name in kwargs if name not in known]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return f"{_UNFIT}; it has no argument {', '.join(unknown)}, its arguments are {', '.join(known) or 'none'}"
    return _UNFIT + (_DICT if any(isinstance(a, dict) for a in args) else "")


def _branch(error: Exception, module: nn.Module, line: str) -> str:
    """The reason of an error at a branch on a tensor's value, told by the frame or the buffer that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "_detect_is_causal_mask" for frame in frames):
        return _MASK
    if any("torch/distributions/" in frame.filename for frame in frames):
        return "torch.distributions checks values of tensors; pass it validate_args=False"
    own = dict(module.named_buffers(recurse=False))
    buffer = next((name for name in re.findall(r"\bself\.(\w+)", line) if name in own), None)
    if buffer is not None:
        return (
            f"a branch is data-dependent: the buffer {buffer!r} decides it, whose value may change; keep a flag as a "
            "Python attribute, and a position as a tensor (self.queue.index_copy_)"
        )
    return "a branch is data-dependent: values of tensors decide it, which differ from call to call"


_UNTRACEABLE = (
    "  torch.export must be able to trace the forward; branches on tensor values are the usual cause "
    "(use torch.where, or move them out of the model)"
)
_MASK = (
    "nn.Transformer looks at a mask's values to see whether it is causal; say so in the call, for every mask: "
    "src_is_causal=False, tgt_is_causal=True (is_causal=... of TransformerEncoder, tgt_is_causal=... of the decoder)"
)
# An object among the arguments or the results of which pytree does not know that it holds tensors.
_UNKNOWN_TYPE = re.compile(r"Found <class '([^']+)'> in output|nsupported input type <class '([^']+)'>")
_UNREGISTERED = (
    "  {kind} is a class whose tensors torch.export cannot find; if it is a dataclass register it once, "
    "torch.export.register_dataclass({kind}), any other class with torch.utils._pytree.register_pytree_node; "
    "or use a tuple or a dict in its place"
)
_DICT = "; a dict among them is one argument: keyword arguments go into kwargs={...}"
_UNFIT = "  the forward itself fails on the example inputs; check their number, names, shapes and types"
