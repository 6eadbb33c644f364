"""The user's module hooks, kept as marks in the captured graph.

torch.export would call hooks once, on tensors without values, and forget them. So while a model is captured each module
that has hooks gets marks instead: ops that hand their tensors on unchanged, in front of the module and behind it. A
mark is a layer like any other; it can have replicas but no shards, so hooks see whole tensors of their own samples,
however the module itself is cut. At run time the marks call the hooks (parplan/runtime/execution/module_hooks.py).

Hooks that torch itself puts on modules (spectral_norm, prune) compute weights, and hooks that a library puts on modules
of its own collect parts of its result; those are traced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parplan.compat import HOOK_FIELDS, hooks_of_all_modules, pytree
from parplan.errors import CaptureError, RuntimeFailure
from parplan.graph.attributes.stored_results import Template
from parplan.graph.axes.row_syntax import OpAxis
from parplan.graph.axes.table import OWN_ROWS, Call, own_op
from parplan.graph.packed_sequences import Packed
from parplan.graph.user_line import is_users

__all__ = [
    "MARKS", "HookWatch", "Site", "Template", "is_torchs", "marked_hooks", "own_hooks", "whole", "without_hooks",
]  # fmt: skip


class _Whole:
    """A hook that only reads, and is called once with all samples of the process."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hook(*args) is not None:
            raise RuntimeFailure(
                f"the hook {getattr(self._hook, '__qualname__', self._hook)} is marked parplan.whole, which is for "
                "hooks that only read, and it returned a value; let it return None, or register it unmarked"
            )


def whole(hook: Callable[..., Any]) -> Callable[..., None]:
    """Mark a module hook that only reads, so that it sees whole results however the module's layers are spread.

        model.body.register_forward_hook(parplan.whole(lambda module, args, result: kept.append(result.detach())))

    In one process it is called once, with the samples of all replicas; under torchrun once in every process with that
    process's samples, as with DistributedDataParallel. The results are gathered for it in every step. Works for forward
    hooks, pre-hooks and full backward (pre-)hooks, and on a plain model changes nothing.
    """
    return _Whole(hook)


def pre_hooks(inputs: Sequence[Tensor], site: str) -> list[Tensor]:
    """The inputs of a module with hooks, unchanged."""
    return [tensor.clone() for tensor in inputs]


def hooks(inputs: Sequence[Tensor], outputs: Sequence[Tensor], site: str) -> list[Tensor]:
    """The results of a module with hooks, unchanged; hooks are shown `inputs` as well."""
    return [tensor.clone() for tensor in outputs]


MARKS = PRE_HOOKS, HOOKS = own_op("pre_hooks", pre_hooks), own_op("hooks", hooks)


def _axes(call: Call) -> tuple[OpAxis, ...]:
    """Dimensions at one position are one axis where they are of one size."""
    names: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    shapes = {tensor.name: tuple(tensor.meta["val"].shape) for tensor in call.tensors()}
    results = call.node.meta["val"]
    shapes |= {name: tuple(results[index].shape) for index, name in call.results.items()}
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            names[dim, size][name] = dim
    return tuple(OpAxis(dims) for dims in names.values())


OWN_ROWS.update(dict.fromkeys(MARKS, _axes))


@dataclass
class Site:
    """One call of a module that has hooks.

    Attributes:
        inputs: of (args, kwargs), as its forward hooks see them; None before the call.
        outputs: of what it returns.
    """

    module: nn.Module
    path: str
    inputs: Template | None = None
    outputs: Template | None = None

    @property
    def whole(self) -> bool:
        """Whether a hook of the module wants all samples of a process."""
        return _has_whole(self.module)


def own_hooks(module: nn.Module, registered: Mapping[int, Callable[..., Any]]) -> dict[int, Callable[..., Any]]:
    """Hooks of `module` that are the user's, neither torch's nor of the installed library that the module is from.

    A library's hooks on its own modules are a part of the forward (they collect hidden states for its result).
    """
    libraries = {kind.__module__.split(".")[0] for kind in type(module).__mro__}
    return {key: hook for key, hook in registered.items() if not is_torchs(hook) and not _is_of(hook, libraries)}


def _is_of(hook: Callable[..., Any], libraries: Set[str]) -> bool:
    """Whether a hook is a function of one of these packages, and that is installed."""
    code = getattr(hook, "__code__", None)
    return code is not None and hook.__module__.split(".")[0] in libraries and not is_users(code.co_filename)


def is_torchs(code: Any) -> bool:
    """Whether a class, a function or a callable object is torch's own."""
    return (getattr(code, "__module__", None) or type(code).__module__).split(".")[0] == "torch"


@contextmanager
def marked_hooks(model: nn.Module, sites: dict[str, Site]) -> Iterator[None]:
    """While it lasts, modules with hooks leave marks, and `sites` says what each stands for.

    Raises:
        CaptureError: hooks for all modules, or a backward hook of the kind that torch has given up.
    """
    if hooks_of_all_modules():
        raise CaptureError(
            "there are hooks for all modules (register_module_forward_hook and its like), which a captured model would "
            "not call; register them on the modules they are for, or remove them before the model is called"
        )
    calls: Counter[str] = Counter()
    marks = []
    for path, module in model.named_modules():
        if module._backward_hooks and module._is_full_backward_hook is False:
            raise CaptureError(
                f"{type(module).__name__} has a hook of register_backward_hook, which torch has given up; "
                "use register_full_backward_hook"
            )
        if any(_kinds(module)):
            marks.append((module, _Marks(module, path, calls, sites)))
    with without_hooks(model):
        for module, own in marks:
            module.register_forward_pre_hook(own.enter, with_kwargs=True)
            module.register_forward_hook(own.leave, with_kwargs=True)
        yield


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """While it lasts, no module has hooks of the user's; torch's own (weight_norm, prune) stay."""
    saved: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for module in model.modules():
            if any(_kinds(module)):
                saved.append((module, {name: module.__dict__[name] for name in HOOK_FIELDS}))
                own = {**own_hooks(module, module._forward_pre_hooks), **own_hooks(module, module._forward_hooks)}
                for name, value in saved[-1][1].items():
                    if isinstance(value, dict):
                        kept = {} if "backward" in name else {k: hook for k, hook in value.items() if k not in own}
                        module.__dict__[name] = type(value)(kept)
        yield
    finally:
        for module, fields in saved:
            module.__dict__.update(fields)


def _kinds(module: nn.Module) -> tuple[bool, bool, bool]:
    """Whether it has hooks of the user's before its forward, behind it, and around its backward."""
    back = bool(module._backward_hooks or module._backward_pre_hooks)
    return bool(own_hooks(module, module._forward_pre_hooks)), bool(own_hooks(module, module._forward_hooks)), back


def _has_whole(module: nn.Module) -> bool:
    registered = (vars(module)[field] for field in HOOK_FIELDS if field.endswith("_hooks"))
    return any(isinstance(hook, _Whole) for hooks in registered for hook in hooks.values())


class _Marks:
    """Stands in for the hooks of one module while it is captured."""

    def __init__(self, module: nn.Module, path: str, calls: Counter[str], sites: dict[str, Site]) -> None:
        self._path = path
        self._calls = calls
        self._sites = sites
        self._open: list[str] = []
        before, after, back = _kinds(module)
        self._before, self._after = before or back, after or back

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook of the module; its mark is named by place and count, the same in every capture of the model."""
        name = f"{self._path}#{self._calls[self._path]}"
        self._calls[self._path] += 1
        self._open.append(name)
        _refuse_packed(self._path, (args, kwargs))
        site = self._sites[name] = Site(module, self._path)
        site.inputs, tensors = Template.of((args, kwargs))
        return site.inputs.filled(PRE_HOOKS(tensors, name)) if self._before and tensors else None

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Hook of the module, behind its forward."""
        name = self._open.pop()
        _refuse_packed(self._path, output)
        inputs = Template.of((args, kwargs))[1]
        self._sites[name].outputs, tensors = template, outputs = Template.of(output)
        return template.filled(HOOKS(inputs, outputs, name)) if self._after and tensors else None


def _refuse_packed(path: str, values: Any) -> None:
    if any(isinstance(leaf, Packed) for leaf in pytree.tree_leaves(values)):
        raise CaptureError(
            f"{path} has hooks, and takes or returns a packed sequence, which a captured model cannot show them; "
            "put them on the module that packs and unpacks"
        )


class HookWatch:
    """Which modules of a model have hooks: what was captured without them no longer serves once there are some."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        fields = [field for field in HOOK_FIELDS if field != "_is_full_backward_hook"]
        self._registered = [vars(module).get(field) for module in self._modules for field in fields]

    @property
    def marks(self) -> Hashable:
        """Differs between calls that need different marks."""
        if hooks_of_all_modules():
            return "hooks of all modules"
        if not any(self._registered):
            return ()
        own = ((i, module, _kinds(module)) for i, module in enumerate(self._modules))
        return tuple((i, kinds, _has_whole(module)) for i, module, kinds in own if any(kinds))
