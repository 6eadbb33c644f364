"""Undocumented parts of PyTorch that parplan uses, all in one place, each with a test.

When a new release changes one of these, it is mended here and nowhere else (tests/test_compat.py says
which). The runtime's own two, which are about autograd, are in parplan/runtime/compat.py.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from traceback import FrameSummary
from types import FrameType
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._decomp import decompositions
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram, _trace
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.experimental.symbolic_shapes import DynamicDimConstraintPrinter
from torch.fx.graph import _PyTreeCodeGen
from torch.nn.modules import module
from torch.overrides import _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import BackwardHook

__all__ = [
    "HOOK_FIELDS", "BackwardHook", "FakeTensor", "bent_sizes", "conversion_of", "expression_of", "guards_of",
    "hooks_of_all_modules", "in_functional_transform", "intercepted_functions", "intercepted_modules", "is_composite",
    "lazy_code", "memory_of", "mended_export", "overload_name", "own_buffer_assignments", "parallel_wrapper",
    "pytree", "schema_of", "symbolic_sizes", "traced_node", "unrecorded", "value_of", "warn_if_newer",
    "without_modes",
]  # fmt: skip

NEWEST = (2, 15)
"""The newest release of torch that the tests were run with."""


def warn_if_newer(version: str) -> None:
    """Warn of a release of torch that no test was run with: what is used here may have changed."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) > NEWEST:
        warnings.warn(
            f"parplan was tested with torch up to {NEWEST[0]}.{NEWEST[1]}, this is torch {version}; compare a "
            'step with the plain model (parplan.compile(..., check="always"), parplan verify)',
            stacklevel=2,
        )


warn_if_newer(torch.__version__)

# Where a module keeps its hooks; the dictionaries say what was registered, by number.
HOOK_FIELDS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)


def conversion_of(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """The device and the type that the arguments of `Module.to` ask for."""
    found: Any = torch._C._nn._parse_to(*args, **kwargs)
    return found[0], found[1]


def in_functional_transform() -> bool:
    """Whether the caller is inside a transform of torch.func (grad, vmap, jvp, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def hooks_of_all_modules() -> int:
    """How many hooks there are that every module calls (`torch.nn.modules.module.register_module_forward_hook`)."""
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return sum(len(getattr(module, f"_global_{kind}")) for kind in kinds)


def parallel_wrapper(module: nn.Module) -> str:
    """The name of torch's wrapper for several devices that a module is, such as DistributedDataParallel; else empty.

    Told by where the class lives, as importing FSDP to ask for its class takes longer than most plans.
    """
    homes = ("torch.nn.parallel.", "torch.distributed.fsdp.")
    return next((kind.__name__ for kind in type(module).__mro__ if f"{kind.__module__}.".startswith(homes)), "")


def schema_of(target: Any) -> Any:
    """The schema of an op (`name`, `arguments`, `is_mutable`), None for a target that is no op."""
    return getattr(target, "_schema", None)


def overload_name(target: Any) -> str:
    """Name of an op's overload: "Tensor" of `aten.add.Tensor`."""
    return str(target._overloadname)


def is_composite(target: Any) -> bool:
    """Whether an op is made of other ops, for autograd too, into which an exported program takes it apart."""
    known = getattr(target, "has_kernel_for_dispatch_key", None)
    return known is None or bool(known(torch._C.DispatchKey.CompositeImplicitAutograd))


def memory_of(tensor: Tensor) -> int:
    """A number that tensors which share memory have in common, fake tensors (without memory) too."""
    return int(tensor.untyped_storage()._cdata)


Handler = Callable[[Callable[..., Any], type, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def intercepted_functions(handler: Handler) -> Iterator[None]:
    """While it lasts, `apply` of every autograd Function calls `handler(plain, cls, args, kwargs)`.

    `plain` does what the call does otherwise; its first argument is the class. Users also hold `apply` by names of
    their own (`clamp = Clamp.apply`), which nothing on the class can change: such a call is met where torch looks up
    the class's `forward`. torch has switched gradients off there, and gives the results the class's backward.
    """
    base: Any = torch.autograd.Function
    own = vars(base)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return handler(lambda cls, *args, **kwargs: own.__get__(None, cls)(*args, **kwargs), cls, args, kwargs)

    def forward_of(cls: Any) -> Callable[..., Any]:
        forward, context = cls.forward, cls.setup_context is base.setup_context  # the first argument

        @functools.wraps(forward)  # torch fills in defaults by the signature of `cls.forward`
        def met(*args: Any, **kwargs: Any) -> Any:
            first = args[: int(context)]

            def plain(_: type, *given: Any, **named: Any) -> Any:
                with _gradients(False):
                    return forward(*first, *given, **named)

            with _gradients(True):
                return handler(plain, cls, args[int(context) :], kwargs)

        return met

    kinds = [kind for kind in _below(base) if not kind.__module__.startswith(("torch.", "parplan."))]
    forwards = {kind: staticmethod(forward_of(kind)) for kind in kinds}  # of all, before any is replaced
    with ExitStack() as stack:
        for kind, forward in forwards.items():
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        stack.enter_context(mock.patch.object(base, "apply", classmethod(apply)))
        yield


def _below(kind: Any) -> set[Any]:
    """The subclasses of a class, and theirs."""
    return {each for one in kind.__subclasses__() for each in (one, *_below(one))}


@contextmanager
def _gradients(enabled: bool) -> Iterator[None]:
    """`torch.set_grad_enabled` that a running export does not record."""
    before = torch.is_grad_enabled()
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


@contextmanager
def intercepted_modules(handler: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a call of a module runs `handler(plain, module, args, kwargs)` in the place of hooks and forward;
    `plain` is the method that does these."""
    plain: Any = nn.Module._call_impl

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return handler(plain, self, args, kwargs)

    with mock.patch.object(nn.Module, "_call_impl", call):
        yield


@contextmanager
def lazy_code() -> Iterator[None]:
    """While it lasts, graph modules write their Python code when they are first called, and not after every change.

    torch.export writes it some 15 times per model and calls none of it: a fifth of its time.
    """
    plain = fx.GraphModule.recompile

    def recompile(self: fx.GraphModule) -> None:
        if isinstance(self.graph._codegen, _PyTreeCodeGen):  # which decompositions read without a call
            info = self.graph._codegen.pytree_info
            self._in_spec, self._out_spec = info.in_spec, info.out_spec

        def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            plain(module)
            return module(*args, **kwargs)

        type(self).forward = forward

    with mock.patch.object(fx.GraphModule, "recompile", recompile):
        yield


@contextmanager
def mended_export() -> Iterator[None]:
    """While it lasts, torch < 2.13 exports conditions on numbers of tensors and states of LSTM layers as later ones do.

    It raised where it wrote the former, and squeezed the latter in the dimension of the samples.
    """
    written: Any = DynamicDimConstraintPrinter._print_Symbol
    lstm: Any = decompositions.one_layer_lstm

    def text(self: Any, symbol: sympy.Symbol) -> str:
        return str(written(self, symbol) if symbol in self.symbol_to_source else symbol)

    def layer(given: Tensor, before: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        made, states = lstm(given, before, *args, **kwargs)
        return made, tuple(state.view(like.shape) for state, like in zip(states, before, strict=True))

    with (
        mock.patch.object(DynamicDimConstraintPrinter, "_print_Symbol", text),
        mock.patch.object(decompositions, "one_layer_lstm", layer),
    ):
        yield


def traced_node(tensor: Tensor) -> tuple[fx.Node, nn.Module] | None:
    """The node of a running export that stands for a tensor, and the module that has the graph's constants.

    None outside of an export, and for a tensor that it does not know.
    """
    mode: Any = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else (slot.proxy.node, mode.tracer.root)


@contextmanager
def own_buffer_assignments() -> Iterator[None]:
    """While it lasts, torch.export leaves assignments to buffers of the root module to the caller.

    It would copy every one into the buffer, also of another shape, and fails for a buffer that is new.
    """
    name = "register_buffer_assignment_hook"
    plain = getattr(_trace, name)
    # On a module that nobody assigns to.
    with mock.patch.object(_trace, name, lambda root, assigned: plain(nn.Module(), assigned)):
        yield


@contextmanager
def unrecorded(traced: FakeTensor) -> Iterator[None]:
    """While it lasts, ops on tensors like `traced`, one of a running export, compute shapes and leave no record."""
    held = []
    while torch._C._len_torch_function_stack() > 0:
        held.append(_pop_mode())
    try:
        with _disable_current_modes(), traced.fake_mode:
            yield
    finally:
        for mode in reversed(held):
            _push_mode(mode)


def without_modes() -> AbstractContextManager[Any]:
    """A context in which ops run on real tensors as always, also while a model is being traced."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


@contextmanager
def symbolic_sizes(is_asking: Callable[[FrameType], bool]) -> Iterator[None]:
    """While it lasts, torch.export takes a symbolic size for any number, and as it is where code makes text of it.

    torch takes sizes of 2 and more for others than 1, of which a graph for one sample is no part; and the text of a
    symbol is its name.

    Args:
        is_asking: whether a frame is of code that gets a plain number, and not torch's own.
    """
    config: Any = _config
    kinds: dict[Any, Any] = {torch.SymInt: int, torch.SymFloat: float}

    def text(own: Callable[[Any], str], number: Callable[[Any], Any]) -> Callable[[Any], str]:
        return lambda self: str(number(self)) if is_asking(sys._getframe(1)) else own(self)

    with ExitStack() as stack:
        for kind, number in kinds.items():
            for name in (name for name in ("__str__", "__repr__") if name in vars(kind)):
                stack.enter_context(mock.patch.object(kind, name, text(vars(kind)[name], number)))
        stack.enter_context(config.patch(backed_size_oblivious=True))
        yield


def expression_of(size: Any) -> Any:
    """The formula of a symbolic number, by which it can be compared and hashed; a plain number is its own."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) else size


def value_of(expression: Any, size: int) -> Any:
    """The number, or truth value, that a formula has where all symbols are `size`; None where it has none."""
    found = expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.Integer(size)))
    if found.is_Boolean:
        return bool(found) if found in (sympy.true, sympy.false) else None
    return float(found) if found.is_number else None


def guards_of(program: ExportedProgram) -> list[tuple[Any, bool, tuple[str, int] | None]]:
    """The conditions on symbolic sizes that an export was traced under.

    Returns:
        Each condition as a formula, whether it makes a plain number of a symbol, and the file and line of the code
        (None where that is not known).
    """
    values = [node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"]
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    env: Any = next((mode.shape_env for mode in modes if mode.shape_env is not None), None)
    found = []
    for guard in env.guards if env is not None else ():
        place, expression = guard.sloc.framework_loc, guard.expr
        is_fixed = isinstance(expression, sympy.Eq) and not expression.free_symbols.isdisjoint(env.replacements)
        known = isinstance(place, FrameSummary) and place.filename != __file__
        found.append((expression, is_fixed, (place.filename, place.lineno or 0) if known else None))
    return found


def bent_sizes(program: ExportedProgram) -> list[Any]:
    """The formulas of those symbolic numbers of an export, sizes of its values among them, that are not linear."""
    found: dict[Any, None] = {}
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            numbers = value.shape if isinstance(value, Tensor) else [value]
            found |= {expression_of(one): None for one in numbers if isinstance(one, (torch.SymInt, torch.SymFloat))}
    return [one for one in found if not one.is_polynomial() or sympy.total_degree(one, *one.free_symbols) > 1]
