"""Calls the user's module hooks: once per replica, with that replica's own inputs and results.

Every call of a module with hooks is a site in the captured graph, with a mark in front of the module and one behind it.
Here marks get the code that calls the hooks; backward hooks are torch's own machinery, put around the module's tensors
by the two marks of a replica.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from parplan.compat import BackwardHook
from parplan.errors import PlanError, ReplicaHookWarning, RuntimeFailure
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.sites import site_of
from parplan.graph.user_code.gradient_hooks import GRADIENT_HOOK, HookSite
from parplan.graph.user_code.module_hooks import MARKS, Site, Template, own_hooks
from parplan.layout import Grid
from parplan.lowering.program import Program
from parplan.plan import Scheme, Strategy
from parplan.runtime.preserve_state import preserved_generators

__all__ = ["HookCalls", "with_whole_hooks"]

_PRE, _POST = MARKS


def with_whole_hooks(
    graph: LayerGraph, strategies: Mapping[str, Strategy], scheme: Scheme, processes: int, groups: Grid | None = None
) -> dict[str, Strategy]:
    """Strategies in which hooks that are marked `parplan.whole` see all samples of a process.

    Raises:
        PlanError: the layers run in passes, or what the hook sees has no samples that processes could have apart.
    """
    found = dict(strategies)
    for name, layer in graph.layers.items() if graph.sites else ():
        sites = [graph.sites[str(node.args[-1])] for node in layer.nodes if node.target in MARKS]
        if not any(site.whole for site in sites):
            continue
        if scheme is not Scheme.GATHER:
            raise PlanError(f"{name}: parplan.whole(hook) needs a plan without passes; this one is {scheme.value}")
        if groups is not None and groups.shards > 1:
            raise PlanError(
                f'{name}: parplan.whole(hook) sees the rows that a process works on, and with inputs="group" these are '
                'not those it brought; compile with inputs="own", or return the tensor from forward'
            )
        if processes == 1:
            found[name] = Strategy(devices=strategies[name].devices[:1])
        elif layer.batch is None:
            raise PlanError(
                f"{name}: parplan.whole(hook) sees a process's own samples under torchrun, and here samples depend on "
                "each other; put the hook on a layer whose results have samples, or return the tensor from forward"
            )
        else:
            found[name] = Strategy(processes, 1, None, tuple(range(processes)))
    return found


@dataclass(frozen=True)
class _Visit:
    """One replica's call of a site, in one of the passes if there are several."""

    site: str
    row: int
    micro_batch: int | None


class HookCalls:
    """The hooks of one captured graph.

    Args:
        graph: its `sites` say what the marks stand for.
        program: how its layers are spread, and how often they run.
        processes: how many processes share the devices.
        silent: marks hand their tensors on and call nothing.

    Raises:
        PlanError: a module with backward hooks begins and ends with different numbers of replicas, or of passes, or on
            different processes.
    """

    def __init__(self, graph: LayerGraph, program: Program, processes: int = 1, silent: bool = False) -> None:
        self._sites: Mapping[str, Site] = graph.sites
        self._silent = silent
        self._backward: dict[_Visit, tuple[BackwardHook, _GradientWatch]] = {}
        nodes = [node for layer in graph.layers.values() for node in layer.nodes if node.target is GRADIENT_HOOK]
        self._tensors = {str(node.args[-1]): s for node in nodes if isinstance(s := site_of(node), HookSite)}
        self._batch_dims, self._apart = graph.batch_dims, dict[tuple[str, bool], dict[Any, int]]()
        self._spread = {
            str(node.args[-1])
            for name, layer in graph.layers.items()
            for node in layer.nodes
            if node.target is _POST and program.strategies[name].replicas > 1
        }
        self._spread_backward = set(self._spread)
        self._parted = {} if silent or not self._sites else _parted(graph, program, processes)
        if self._sites:
            _check(graph, program, processes)

    def apply(self, code: fx.GraphModule, row: int, micro_batch: int | None = None) -> None:
        """Let the marks in one device's code call hooks, as the replica `row` in one micro-batch."""
        own = [node for node in code.graph.nodes if node.target is GRADIENT_HOOK] if self._tensors else []
        for node in own:
            node.target, node.args = _bound(HookSite.attach, self._tensors[str(node.args[-1])]), node.args[:-1]
        marks = [node for node in code.graph.nodes if node.target in MARKS] if self._sites else []
        for node in marks:
            visit = _Visit(str(node.args[-1]), row, micro_batch)
            parts = ((user.args[1], self._batch_dims.get(user.name)) for user in node.users)
            sampled = {index: dim for index, dim in parts if dim is not None}
            self._apart.setdefault((visit.site, node.target is _POST), sampled)
            node.target = _bound(self._before if node.target is _PRE else self._after, visit)
            node.args = node.args[:-1]
        if marks or own:
            code.recompile()

    def guard(self, leaves: Sequence[Tensor]) -> None:
        """Refuse a backward that begins at what a hook has kept: it would end at these tensors, and not go on."""
        for leaf in leaves if self._sites and not self._silent else ():
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(_refuse)

    def _before(self, visit: _Visit, inputs: Sequence[Tensor]) -> list[Tensor]:
        if self._silent:
            return list(inputs)
        site = self._sites[visit.site]
        module, template = site.module, _known(site.inputs)
        args, kwargs = template.filled(inputs)
        for key, hook in own_hooks(module, module._forward_pre_hooks).items():
            if key in module._forward_pre_hooks_with_kwargs:
                args, kwargs = _first(hook(module, args, kwargs), (args, kwargs))
            else:
                given = _first(hook(module, args), args)
                args = given if isinstance(given, tuple) else (given,)
        hooks, pre = list(module._backward_hooks.values()), list(module._backward_pre_hooks.values())
        if hooks or pre:
            watch = _GradientWatch(site.path, visit.site, self._spread_backward)
            watch.inputs = _places(args, (args, kwargs), self._apart[visit.site, False])
            around = BackwardHook(module, [*map(watch.around, hooks)], [*map(watch.around, pre)])
            self._backward[visit] = around, watch
            args = around.setup_input_hook(args)
        return _tensors(site, "a forward pre-hook", template, (args, kwargs), inputs)

    def _after(self, visit: _Visit, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        if self._silent:
            return list(outputs)
        site = self._sites[visit.site]
        module, template = site.module, _known(site.outputs)
        args, kwargs = _known(site.inputs).filled(inputs)
        result = template.filled(outputs)
        for key, hook in own_hooks(module, module._forward_hooks).items():
            named = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
            changed = hook(module, args, *named, result)
            if changed is None:  # it reads
                self._warn_parted(visit.site)
            result = _first(changed, result)
        tensors = _tensors(site, "a forward hook", template, result, outputs)
        if visit.site in self._spread and any(tensor.requires_grad for tensor in tensors):
            for index, dim in self._apart[visit.site, True].items():
                if tensors[index] is not outputs[index] and _mixes(tensors[index], dim, outputs[index], dim):
                    raise RuntimeFailure(_MIXES.format(site.path or "the model", "forward"))
            self._spread.discard(visit.site)  # once is enough
        if visit not in self._backward:
            return tensors
        around, watch = self._backward.pop(visit)
        watch.outputs = _places(result, result, self._apart[visit.site, True])
        return _tensors(site, "a forward hook", template, around.setup_output_hook(result), outputs)

    def _warn_parted(self, site: str) -> None:
        """Say once that a hook which reads sees a part of the samples."""
        where = self._parted.pop(site, "")
        if where:
            _warn(self._sites[site], where)


def _warn(site: Site, where: str) -> None:
    warnings.warn(
        f"{site.path or 'the model'}: a hook of this module is called {where}; mark a hook that only reads "
        "with parplan.whole(hook), which then sees all samples of its process, once per call",
        ReplicaHookWarning,
        stacklevel=2,
    )


_MIXES = (
    "{}: a {} hook mixes samples, and would see those of one of several replicas; pin the layer to one replica, or do "
    "this in the model's own forward"
)


def _mixes(left: Tensor, along: int, given: Tensor, dim: int) -> bool:
    """Whether the first sample of what a hook left depends on other samples of what it was given, by its gradient.

    Samples of `left` lie along its dimension `along`, those of `given` along `dim`.
    """
    if left.is_complex() or not (left.requires_grad and given.requires_grad):
        return False
    if given._backward_hooks or left._backward_hooks:  # they would be called
        return False
    (found,) = torch.autograd.grad(left.select(along, 0).sum(), given, retain_graph=True, materialize_grads=True)
    return bool(found.narrow(dim, 1, found.shape[dim] - 1).count_nonzero())


def _places(values: Any, all_values: Any, dims: Mapping[Any, int]) -> dict[int, int]:
    """The dimension of samples by place in the tuple `values`, from that by number of tensor in `all_values`."""
    number = {id(tensor): index for index, tensor in enumerate(Template.of(all_values)[1])}
    places = enumerate(values if isinstance(values, tuple) else (values,))
    return {place: dims[number[id(t)]] for place, t in places if number.get(id(t)) in dims}


@dataclass
class _GradientWatch:
    """The backward hooks of one call of a module, looked at for mixed samples where they change gradients.

    Attributes:
        path: of the module, for a message.
        site: of the call.
        unseen: sites with several replicas whose hooks have not been looked at.
        inputs, outputs: the dimension of samples by place in the module's arguments and results.
    """

    path: str
    site: str
    unseen: set[str]
    inputs: Mapping[int, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)

    def around(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that is called once more, the first time that it returns gradients, with tensors that record them."""

        def call_hook(module: nn.Module, *gradients: Any) -> Any:
            result = hook(module, *gradients)
            if result is not None and self.site in self.unseen:
                self._look(hook, module, gradients)
            return result

        return call_hook

    def _look(self, hook: Callable[..., Any], module: nn.Module, gradients: Sequence[Any]) -> None:
        dims = (self.inputs, self.outputs)[-len(gradients) :]  # a pre-hook gets those of the results alone
        with torch.enable_grad(), preserved_generators():
            given: list[tuple[Any, ...]] = [
                tuple(g if g is None else g.detach().requires_grad_() for g in group) for group in gradients
            ]
            result = hook(module, *given)
            groups = zip(given, dims, strict=True)
            sampled = [(group[at], dim) for group, own in groups for at, dim in own.items() if group[at] is not None]
            for place, left in enumerate(result if isinstance(result, tuple) else (result,)):
                along = dims[0].get(place) if left is not None else None
                if along is not None and any(_mixes(left, along, *gradient) for gradient in sampled):
                    raise RuntimeFailure(_MIXES.format(self.path or "the model", "backward"))
        self.unseen.discard(self.site)


def _bound(function: Callable[..., Any], first: object) -> Callable[..., Any]:
    """A function of the other arguments; generated code calls it by its name, which `partial` has none of."""

    def call_hooks(*tensors: Any) -> Any:
        return function(first, *tensors)

    return call_hooks


def _known(template: Template | None) -> Template:
    assert template is not None  # a site's two marks are made in one capture
    return template


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given


def _tensors(site: Site, who: str, wanted: Template, values: Any, before: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in what a hook left, which has to be built like what it was given."""
    found, tensors = Template.of(values)
    shapes, known = [tuple(t.shape) for t in tensors], [tuple(t.shape) for t in before]
    if found.spec != wanted.spec or shapes != known:
        raise RuntimeFailure(
            f"{site.path or 'the model'}: {who} returned tensors of shapes {shapes} in place of {known}; what a hook "
            "returns has to have the structure and shapes it was given, as the rest of the step is made for those"
        )
    if not found.matches(wanted):
        raise RuntimeFailure(
            f"{site.path or 'the model'}: {who} returned {list(found.leaves.values())} in place of "
            f"{list(wanted.leaves.values())}, which are no tensors and constants of the captured model; let it change "
            "tensors alone"
        )
    return tensors


@dataclass(frozen=True)
class _Calls:
    """The replicas, passes and devices that pass a mark."""

    replicas: int
    passes: int
    devices: tuple[int, ...] | None

    def __str__(self) -> str:
        where = f" on devices {', '.join(map(str, self.devices))}" if self.devices is not None else ""
        return f"{self.replicas} replicas" + where + (f" in {self.passes} passes" if self.passes > 1 else "")


def _parted(graph: LayerGraph, program: Program, processes: int) -> dict[str, str]:
    """How often forward hooks that are not marked whole are called, by site, where that is not once per process.

    Under torchrun, where a hook may never be called in a process, that is said here.
    """
    passes = Counter(name for step in program.computes for name in step.layers)
    found: dict[str, str] = {}
    for name, layer in graph.layers.items():
        strategy = program.strategies[name]
        for node in layer.nodes:
            if node.target is not _POST or not graph.sites[str(node.args[-1])].module._forward_hooks:
                continue
            key = str(node.args[-1])
            if processes > 1 and strategy.replicas != processes:
                ranks = ", ".join(map(str, strategy.devices))
                _warn(graph.sites[key], f"on rank {ranks} alone, with the samples of all processes")
            elif processes == 1 and (strategy.replicas > 1 or passes[name] > 1):
                often = f"{strategy.replicas * passes[name]} times per call"
                found[key] = f"{often}, each time with the samples of one replica"
    return found


def _check(graph: LayerGraph, program: Program, processes: int) -> None:
    """Backward hooks need both ends of a module on the same replicas, in the same passes, each in one process."""
    passes = Counter(name for step in program.computes for name in step.layers)
    begins: dict[str, _Calls] = {}
    for name, layer in graph.layers.items():
        for node in layer.nodes:
            module = graph.sites[str(node.args[-1])].module if node.target in MARKS else None
            if module is not None and (module._backward_hooks or module._backward_pre_hooks):
                strategy = program.strategies[name]
                own = _Calls(strategy.replicas, passes[name], strategy.devices if processes > 1 else None)
                first = begins.setdefault(str(node.args[-1]), own)
                if own != first:
                    raise PlanError(
                        f"{name}: {own}, but {first} where this module with backward hooks begins; give "
                        "both ends the same, so that a hook sees one replica's gradients"
                    )


def _refuse(leaf: Tensor) -> None:
    leaf.grad = None
    raise RuntimeFailure(
        "a backward began at a tensor that a hook has kept; within a compiled model it cannot go on to the parameters. "
        "Return the tensor from forward and use it from there, or keep its detach()"
    )
