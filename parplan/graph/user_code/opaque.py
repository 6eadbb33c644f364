"""Python code of the user's inside a backward pass: autograd Functions, tensor hooks, checkpoints.

torch.export records a forward and differentiates the record, so it would lose what such code makes of a gradient. While
a model is captured these calls are intercepted: Functions (graph/user_code/functions.py) and hooks
(graph/user_code/gradient_hooks.py) become ops that stand for them, a checkpoint becomes the function it runs, and what
no record can hold is refused.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import get_ident
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram

from parplan.compat import FakeTensor, in_functional_transform, intercepted_functions
from parplan.errors import CaptureError
from parplan.graph.axes.call import is_inplace, is_tensor, memory_of_node
from parplan.graph.batch_changes import BatchChanges
from parplan.graph.export.late_writes import NO_GRAD
from parplan.graph.sites import set_site
from parplan.graph.user_code.function_probe import probe
from parplan.graph.user_code.functions import CUSTOM_FUNCTION, FunctionSite, known_sites
from parplan.graph.user_code.gradient_hooks import GRADIENT_HOOK, Handle, HookCode, HookSite
from parplan.graph.user_code.hook_routing import route_through_hooks
from parplan.graph.user_code.module_hooks import Template, is_torchs
from parplan.graph.user_line import calling_line

__all__ = ["OpaqueCalls"]

_CHECKPOINT = torch.utils.checkpoint.CheckpointFunction
_OPS = (CUSTOM_FUNCTION, GRADIENT_HOOK)


class OpaqueCalls:
    """The calls in one capture of a model that put code into the backward pass.

    Attributes:
        sites: what their ops stand for, by the name that is an op's last argument; named by count, so the same in every
            capture of a model.
        checkpoints: the user's lines that call torch.utils.checkpoint, and how often; no record keeps these.
    """

    def __init__(self) -> None:
        self.sites: dict[str, FunctionSite | HookSite] = {}
        self.checkpoints: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._probed: dict[Hashable, list[FunctionSite]] = defaultdict(list)
        self._model: nn.Module | None = None
        self._thread = get_ident()
        self._probing = False

    @property
    def _aside(self) -> bool:
        """Whether code that runs is no part of the forward: a Function that is probed, or another thread's."""
        return self._probing or get_ident() != self._thread

    @contextmanager
    def intercepted(self, model: nn.Module) -> Iterator[None]:
        """While it lasts, calls leave ops in what is recorded.

        Raises:
            CaptureError: of a call that no record can hold.
        """
        self._model, plain_enter = model, saved_tensors_hooks.__enter__

        def enter(hooks: saved_tensors_hooks) -> Any:
            if not self._aside and type(hooks).__module__ == _CHECKPOINT.__module__:
                self.checkpoints[calling_line()] += 1
            if not self._aside and not is_torchs(hooks.pack_hook):
                _refuse(
                    "the forward changes what is saved for the backward (saved_tensors_hooks)",
                    "put the call of the compiled model under these hooks, or use torch.utils.checkpoint",
                )
            return plain_enter(hooks)

        with ExitStack() as patches:
            patches.enter_context(intercepted_functions(self._apply))
            patches.enter_context(known_sites(self.sites))
            patches.enter_context(mock.patch.object(Tensor, "register_hook", self._registering(Tensor.register_hook)))
            patches.enter_context(mock.patch.object(Tensor, "grad_fn", property(self._grad_fn)))
            patches.enter_context(mock.patch.object(saved_tensors_hooks, "__enter__", enter))
            for owner, name in _REFUSED:
                patches.enter_context(mock.patch.object(owner, name, self._refusing(owner, name)))
            yield

    def _named(self, base: str, site: FunctionSite | HookSite) -> str:
        name = f"{base}#{self._counts[base]}"
        self._counts[base] += 1
        self.sites[name] = site
        return name

    def _apply(self, plain: Callable[..., Any], cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `cls.apply`."""
        if cls is _CHECKPOINT and not self._aside:
            # What a checkpoint saves is memory; without a differentiable input it gives no gradient.
            self.checkpoints[calling_line()] += 1
            function, _, *inputs = args
            differentiable = any(isinstance(one, Tensor) and one.requires_grad for one in inputs)
            with torch.set_grad_enabled(torch.is_grad_enabled() and differentiable):
                return function(*inputs)
        if self._aside or is_torchs(cls):
            return plain(cls, *args, **kwargs)
        if in_functional_transform():
            _refuse(f"{cls.__name__}.apply is called inside of torch.func", "call it outside of the transform")
        template, tensors = Template.of((args, kwargs))
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return plain(cls, *args, **kwargs)
        site = FunctionSite(cls, calling_line(), template)
        # Calls of a Function are traced alike that have this in common, arguments that are no tensors aside.
        first = {id(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        shapes = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad, first[id(t)]) for t in tensors)
        kind = (cls, torch.is_grad_enabled(), shapes)
        alike = self._probed[kind]
        known = next((other for other in alike if other.inputs.matches(template)), None)
        if known is not None:
            site.outputs, site.results, site.aliases = known.outputs, known.results, known.aliases
            site.followed = replace(known.followed)
        else:
            self._probing = True  # while the Function is probed, nothing is intercepted
            try:
                probe(site, tensors, self._model)
            finally:
                self._probing = False
            alike.append(site)
        return site.outputs.filled(CUSTOM_FUNCTION(tensors, self._named(cls.__name__, site)))

    def _registering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
            if self._aside or not isinstance(tensor, FakeTensor) or not tensor.requires_grad:
                return plain(tensor, hook)
            if isinstance(tensor, nn.Parameter):
                _refuse(
                    "the forward registers a hook on a parameter, one more in every call",
                    "register it once, outside of the forward",
                )
            site = HookSite(HookCode.of(hook), calling_line())
            GRADIENT_HOOK(tensor, site.hook.tensors, self._named("hook", site))
            return Handle(site)

        return register_hook

    def _grad_fn(self, tensor: Tensor) -> Any:
        """A tensor's node of the backward graph; the user's code gets one that takes no hooks."""
        node = _GRAD_FN.__get__(tensor)
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return node if node is None or self._aside or asking.split(".")[0] == "torch" else _Node(node)

    def _refusing(self, owner: Any, name: str) -> Callable[..., Any]:
        plain, (what, remedy) = getattr(owner, name), _REFUSED[owner, name]

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if self._aside:
                return plain(*args, **kwargs)
            _refuse(f"the forward {what}", remedy)

        return refuse

    def settle(self, exported: ExportedProgram) -> None:
        """Put hooks where they belong in an exported program, and refuse what its ops cannot stand for."""
        for site in self.sites.values():
            if isinstance(site, HookSite):
                site.captured = True
                if not site.hook.is_as_registered:
                    raise CaptureError(
                        f"what a hook reads is changed by the forward after it is registered\n  at {site.line}\n"
                        "  bind it as an argument: functools.partial(hook, value)"
                    )
        for node in _opaque(exported.graph_module):
            site = self.sites[str(node.args[-1])]
            if isinstance(site, HookSite) and NO_GRAD in node.meta:
                raise CaptureError(
                    f"a hook is registered on a tensor under torch.no_grad(), behind which there is no gradient\n  at "
                    f"{site.line}\n  leave it out, or register it on the tensor outside of no_grad"
                )
        route_through_hooks(exported, self.sites)
        _check_aliases(exported.graph, self.sites)

    def changes(self, graph: fx.GraphModule, other: OpaqueCalls) -> BatchChanges:
        """The calls that change with the batch size, by comparison with the same calls in another capture."""
        found = set[str]()
        for node in _opaque(graph):
            one, twin = self.sites[str(node.args[-1])], other.sites.get(str(node.args[-1]))
            if not isinstance(one, FunctionSite):
                continue
            # Another capture calls it with the same arguments, but for tensors.
            same = isinstance(twin, FunctionSite) and one.inputs.matches(twin.inputs)
            if not isinstance(twin, FunctionSite) or not same or not one.outputs.matches(twin.outputs):
                found.add(node.name)
                one.followed.bar(f"an argument of {one.name} changes with the number of samples")
            else:
                one.followed.compare(twin.followed, one.name)
        return BatchChanges(all=frozenset(found), unexplained=frozenset(found))

    def mark(self, graph: fx.Graph) -> None:
        """Tell the ops of a graph what they stand for."""
        for node in graph.nodes:
            if node.target in _OPS:
                set_site(node, self.sites[str(node.args[-1])])


_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"]


class _Node:
    """A node of the backward graph that is no part of what a capture records."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            _refuse(f"the forward puts a hook on a node of the backward ({name})", "use register_hook of a tensor")
        return getattr(self._node, name)


def _opaque(graph: fx.GraphModule) -> list[fx.Node]:
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return [node for module in modules for node in module.graph.nodes if node.target in _OPS]


def _check_aliases(graph: fx.Graph, sites: Mapping[str, Any]) -> None:
    """Refuse later changes in place of a Function's argument, or of its result, where one is a view of the other."""
    shared: dict[int, FunctionSite] = {}
    for node in graph.nodes:
        if is_tensor(node) and is_inplace(node) and memory_of_node(node) in shared:
            found = shared[memory_of_node(node)]
            raise CaptureError(
                f"{found.name}.apply returns a view of its argument, and one of the two is changed in place\n  at "
                f"{found.line}\n  use the op that returns a new tensor (relu instead of relu_)"
            )
        site = sites.get(str(node.args[-1])) if node.target is CUSTOM_FUNCTION else None
        if isinstance(site, FunctionSite) and site.aliases:
            held = [*node.all_input_nodes, *(user for user in node.users if is_tensor(user))]
            shared |= {memory_of_node(tensor): site for tensor in held}


_REFUSED: dict[tuple[Any, str], tuple[str, str]] = {
    (Tensor, "register_post_accumulate_grad_hook"): (
        "registers a hook on a leaf tensor",
        "register it once, outside of the forward",
    ),
    (Tensor, "retain_grad"): (
        "keeps the gradient of an intermediate tensor, which stays inside the step of a compiled model",
        "return the tensor from the forward and call retain_grad() on the result, or record it in register_hook",
    ),
    (torch.autograd, "_engine_run_backward"): (
        "computes gradients, and would need second derivatives",
        "call it outside, on what the forward returns",
    ),
    (torch.autograd.graph, "register_multi_grad_hook"): (
        "registers a hook on several tensors",
        "register a hook on each of them",
    ),
}


def _refuse(what: str, remedy: str) -> NoReturn:
    line = calling_line()
    raise CaptureError(f"{what}\n" + (f"  at {line}\n" if line else "") + f"  {remedy}")
