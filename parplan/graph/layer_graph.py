"""The layers of a captured model, as data that planner, cost models and runtime share.

Values are known by the names of their fx nodes ("conv2d", "p_conv1_weight", "x"); parameters and
buffers are placeholders of the graph like any other input, with their dotted names beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from itertools import islice
from math import gcd, lcm, prod
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import networkx as nx
import torch
from torch import fx

from parplan.compat import pytree
from parplan.graph.attributes.containers import ContainerResults
from parplan.graph.attributes.guards import Guards
from parplan.graph.attributes.input_checks import InputCheck
from parplan.graph.attributes.number_inputs import Number
from parplan.graph.attributes.size_branches import SizeBranches
from parplan.graph.attributes.stored_results import Stored
from parplan.graph.axes.row_syntax import Repeats
from parplan.graph.axes.sample_indices import SampleIndex
from parplan.layout import Layout, Sections
from parplan.plan import Strategy

__all__ = [
    "CASTS",
    "UNCAST",
    "Axis",
    "Constant",
    "Layer",
    "LayerGraph",
    "TensorSpec",
    "Unplaced",
    "cast_name",
    "once_per_graph",
]

Given = ParamSpec("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one whole (uncut) tensor.

    `requires_grad` says whether a gradient flows back through it in training.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Axis:
    """A named direction in which a layer may be cut.

    Args:
        name: such as "out-features"; unique within its layer. The batch axis is called "batch".
        units: what the number of parts must divide (R5); heads and groups count whole.
        dims: for every tensor that has the axis (inputs, parameters, buffers, intermediates,
            outputs; by fx name) the dimension that is cut. Tensors not listed are needed whole.
        partial: outputs that become a term of a sum when this axis is cut.
        first_only: operands only the first shard may use, so that they count once (a bias).
        sections: for tensors whose dimension packs several ([q | k | v]), or has fewer parts than there may be shards
            (heads of keys), how; each section is cut by itself.
        repeats: intermediates that repeat what neighbouring shards share, where.
    """

    name: str
    units: int
    dims: Mapping[str, int]
    partial: frozenset[str] = frozenset()
    first_only: frozenset[str] = frozenset()
    sections: Mapping[str, Sections] = field(default_factory=dict)
    repeats: Mapping[str, Repeats] = field(default_factory=dict)

    def sharers(self, tensor: str, shards: int) -> int:
        """How many neighbouring shards hold the same part of a tensor that has the axis, of all its sections."""
        sections = self.sections.get(tensor)
        return shards // max(sections.parts(shards)) if sections is not None else 1


@dataclass(frozen=True)
class Layer:
    """One unit of planning: a leaf module's call, or a run of functional ops.

    Args:
        name: dotted path of the module, unique ("features.0", "layer1.0.relu@1", "layer1.0.add").
        kind: "conv", "linear", "batch_norm", "pool", ... (see graph/kinds.py); "loss" for losses.
        nodes: its fx nodes in execution order.
        inputs: values it takes from other layers or from the user, in order of first use.
        outputs: values other layers or the user take from it.
        parameters: placeholders of parameters it uses.
        buffers: placeholders of buffers it uses.
        batch: the batch axis where samples can be spread over replicas, else None.
        reached: whether samples reach it (not: positions, masks).
        constant: no sample reaches it, and every device may compute it redundantly.
        mixes_batch: training batch norm: replicas must share statistics to keep the numbers.
        axes: the other axes it may be cut along.
    """

    name: str
    kind: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    batch: Axis | None = None
    reached: bool = True
    constant: bool = False
    mixes_batch: bool = False
    axes: tuple[Axis, ...] = ()

    @property
    def is_loss(self) -> bool:
        """Whether rule R7 applies: by the strict rules it is never sharded."""
        return self.kind == "loss"

    def axis(self, name: str | None) -> Axis | None:
        """The axis called `name`, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)

    def layout(self, value: str, strategy: Strategy) -> Layout:
        """How `value` (an input, parameter, buffer or output of this layer) lies under `strategy`."""
        axis = self.axis(strategy.axis) if strategy.shards > 1 else None
        batch_dim = self.batch.dims.get(value) if self.batch and strategy.replicas > 1 else None
        partial = axis is not None and value in axis.partial
        shard_dim = axis.dims.get(value) if axis and not partial else None
        sections = axis.sections.get(value) if axis and shard_dim is not None else None
        sections = sections.over(strategy.shards) if sections is not None else None
        return Layout(strategy.grid, batch_dim, shard_dim, partial, sections)


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """A captured model as a directed graph of layers.

    Args:
        model: the model's class name.
        digraph: nodes are layer names; edge (a, b) has attribute `values`: tuple of value names.
        layers: by name, in forward order.
        values: spec of every tensor in the graph, by fx name (whole sizes at `batch`).
        producer: layer name that makes a value; user inputs, parameters, buffers are absent.
        batch: samples in one step the graph was captured at; None when no input has samples.
        batch_dims: for every value with samples, the dimension they lie along.
        user_inputs: placeholder per leaf of the flattened call; None for leaves baked in as constants.
        user_outputs: per leaf of the flattened result, a value name, or a constant wrapped in Constant.
        in_spec, out_spec: pytree specs of (args, kwargs) and of the result.
        parameters: dotted name per parameter placeholder; tied names share one placeholder.
        buffers: dotted name per placeholder of a module's buffer.
        constants: tensors made in the forward, by placeholder; layers list them among their buffers.
        buffer_updates: placeholder of a buffer -> value assigned to it after the step
            (running statistics of batch norm are updated in place by the layer itself and not listed).
        counters: placeholders of integer buffers that grow by a constant each training step -> step.
        checkpoints: lines of the forward that call torch.utils.checkpoint, and how often: what they would compute again
            is kept instead.
        late: placeholders of buffers that are written after everything that the backward needs.
        training: whether it was captured in training mode.
        fixed_batch: some layer's constants depend on the batch: capture again for another batch size.
        sized: it returns, or leaves on a module, a number that depends on the number of samples.
        grown: by value, the dimensions whose size is in proportion to the batch; None where one batch alone is known.
        one_batch: the error of the capture at another batch size, because of which no layer has replicas; else empty.
        flattened: results of which a dimension is flattened with the next one when they are handed out.
        sample_indices: ops that take positions along samples from an input.
        unplaced: results with an entry or more per sample, of which no dimension is known to hold the samples.
        reads: attributes of modules that the forward has read (graph/attributes/guards.py).
        numbers: by placeholder of a constant, the attribute whose value it takes before every run
            (graph/attributes/number_inputs.py).
        stored: attributes that the forward writes (graph/attributes/recording.py); their tensors are the last results.
        containers: caches among the arguments that the forward returns or changes.
        checks: assertions of the forward on its inputs, for the runtime to check before every step.
        size_branches: Python branches on the number of samples (graph/attributes/size_branches.py).
        unchecked: lines of assertions that weights or activations decide, and that nothing checks.
        settled: what the model's first call changes on it and was left so (graph/attributes/first_call.py), in words.
        compiling: lines of the model that ask whether they are compiled, where its code for compilers was captured.
        sites: calls of modules with hooks, by the name their marks carry (graph/user_code/module_hooks.py).
        profiled: of layers that only a layer profile tells of, all that it says but the name.
    """

    model: str
    digraph: nx.DiGraph
    layers: Mapping[str, Layer]
    values: Mapping[str, TensorSpec]
    producer: Mapping[str, str]
    batch: int | None
    batch_dims: Mapping[str, int]
    user_inputs: tuple[str | None, ...]
    user_outputs: tuple[str | Constant, ...]
    in_spec: Any
    out_spec: Any
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    buffer_updates: Mapping[str, str]
    counters: Mapping[str, int]
    training: bool
    fixed_batch: bool = False
    sized: bool = False
    grown: Mapping[str, tuple[int, ...]] | None = None
    one_batch: str = ""
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    reads: Guards = field(default_factory=Guards)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    stored: tuple[Stored, ...] = ()
    containers: ContainerResults = field(default_factory=ContainerResults)
    checks: tuple[InputCheck, ...] = ()
    size_branches: SizeBranches = field(default_factory=SizeBranches)
    unchecked: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    compiling: tuple[str, ...] = ()
    sites: Mapping[str, Any] = field(default_factory=dict)
    flattened: Mapping[str, int] = field(default_factory=dict)
    sample_indices: tuple[SampleIndex, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    profiled: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Digest of the layers that have parameters and of their shapes.

        Not of batch, dtype or weights, nor of layers that training and evaluation do not share.
        """
        parts = [
            (name, layer.kind, [(self.parameters[p], self.values[p].shape) for p in layer.parameters])
            for name, layer in self.layers.items()
            if layer.parameters
        ]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def parameter_count(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(self.values[name].elements for name in self.parameters)

    def serves(self, batch: int) -> bool:
        """Whether the forward with `batch` samples is this graph: its Python branches on sizes are taken as here, and
        sizes in proportion to the samples (half of them, say) are whole numbers."""
        return batch % self._multiple == 0 and bool(self.size_branches.hold(batch))

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The layers that use each parameter, in forward order, by placeholder."""
        found: dict[str, tuple[str, ...]] = {}
        for layer in self.layers.values():
            found |= {parameter: (*found.get(parameter, ()), layer.name) for parameter in layer.parameters}
        return found

    @cached_property
    def read_as(self) -> Mapping[str, torch.dtype]:
        """The narrower type that every reader of a parameter converts it to, itself or by autocast, by placeholder;
        parameters that are read as they are are left out."""
        found: dict[str, set[torch.dtype]] = {}
        for node in (node for layer in self.layers.values() for node in layer.nodes):
            for name in (operand.name for operand in node.all_input_nodes if operand.name in self.parameters):
                own = node.meta["val"].dtype if node.target in _CONVERSIONS else self.values[name].dtype
                found.setdefault(name, set()).add(node.meta.get(CASTS, {}).get(name, own))
        types = {name: next(iter(own)) for name, own in found.items() if len(own) == 1}
        return {name: t for name, t in types.items() if t in _NARROW and t.itemsize < self.values[name].dtype.itemsize}

    @cached_property
    def autocast(self) -> torch.dtype | None:
        """The 16-bit type that autocast casts to in it; None where it was captured without, or casts to none."""
        nodes = (node for layer in self.layers.values() for node in layer.nodes)
        casts = (dtype for node in nodes for dtype in node.meta.get(CASTS, {}).values())
        return next((dtype for dtype in casts if dtype in _NARROW), None)

    def cast_of(self, name: str) -> tuple[str, torch.dtype | None]:
        """The value that a name is of, or that of a cast (`cast_name`), and the type; None without one."""
        value, separator, cast = name.partition(_AS)
        spec = self.values.get(value)
        return value, getattr(torch, cast) if separator else spec.dtype if spec is not None else None

    @cached_property
    def _multiple(self) -> int:
        """The number of samples at whose multiples sizes in proportion are whole."""
        grown, captured = self.grown or {}, self.batch or 1
        sizes = [self.values[name].shape[dim] for name in grown.keys() & self.values.keys() for dim in grown[name]]
        return lcm(*(captured // gcd(captured, size) for size in sizes))

    def label(self, value: str) -> str:
        """A value's name in messages: the attribute that a parameter or buffer is, or the layer that makes it.

        Returns:
            Such as "net.4.bias", "the result of net.4", "result 2 of split", "input 'x'".
        """
        if path := self.parameters.get(value, self.buffers.get(value)):
            return path
        if value in self.constants:
            return f"{value}, a tensor made in the forward"
        if value not in self.producer:
            return f"input {value!r}" if value in self.user_inputs else value
        layer = self.layers[self.producer[value]]
        if len(layer.outputs) == 1:
            return f"the result of {layer.name}"
        return f"result {layer.outputs.index(value) + 1} of {layer.name}" if value in layer.outputs else layer.name

    def as_returned(self, value: str, result: torch.Tensor) -> torch.Tensor:
        """A result in the shape in which the model returns it."""
        dim = self.flattened.get(value)
        return result if dim is None else result.flatten(dim, dim + 1)

    def returned(self, results: Iterable[torch.Tensor], containers: Sequence[Any]) -> Any:
        """Results as the model returns them, nested.

        Args:
            results: of its values, in order; others that come behind them are left.
            containers: the caller's caches among the arguments of the call.
        """
        given = iter(results)
        leaves = [
            leaf.value if isinstance(leaf, Constant) else self.as_returned(leaf, next(given))
            for leaf in self.user_outputs
        ]
        nested = pytree.tree_unflatten(leaves, self.out_spec)
        nested, extra = nested if any(one.count for one in self.stored) else (nested, ())
        left = iter(extra)
        for one in self.stored:
            one.put(list(islice(left, one.count)))
        return self.containers.delivered(nested, containers)

    def of_pass(self, value: str, passes: int) -> TensorSpec:
        """A value as one of so many passes has it; whole where it has no samples."""
        spec, dim = self.values[value], self.batch_dims.get(value)
        if dim is None or passes == 1:
            return spec
        return replace(spec, shape=(*spec.shape[:dim], -(-spec.shape[dim] // passes), *spec.shape[dim + 1 :]))

    @property
    def results(self) -> tuple[str, ...]:
        """The values among the leaves that the model returns, in order; the others are constants."""
        return tuple(value for value in self.user_outputs if isinstance(value, str))

    @property
    def losses(self) -> list[str]:
        """Results of the model that it can be trained by: single numbers with a gradient, each once."""
        return [v for v in dict.fromkeys(self.results) if self.values[v].shape == () and self.values[v].requires_grad]

    def makers(self, layer: Layer) -> list[str]:
        """The layers that make a layer's inputs, in the order of these; inputs of the model have none."""
        return [self.producer[value] for value in layer.inputs if value in self.producer]

    def consumers(self, value: str) -> tuple[str, ...]:
        """Layers that take `value`, in forward order."""
        return tuple(name for name, layer in self.layers.items() if value in layer.inputs)


CASTS = "parplan_casts"
"""Meta entry of a node: by the name of an operand, the type in which autocast hands it to the op."""

UNCAST = "parplan_uncast"
"""Meta entry of a node: the kind of device whose autocast is not for the op, which is of a region of the forward that
switches it off or sets another type; the casts of that are ops of the graph."""

_NARROW = (torch.float16, torch.bfloat16)
_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)

_AS = " as "


def cast_name(value: str, dtype: torch.dtype) -> str:
    """The name of what autocast makes of a value for one of its readers."""
    return f"{value}{_AS}{str(dtype).removeprefix('torch.')}"


def once_per_graph(
    function: Callable[Concatenate[LayerGraph, Given], Found],
) -> Callable[Concatenate[LayerGraph, Given], Found]:
    """A cache of a function's results by graph, which end with it: a graph holds a model's weights."""
    known: WeakKeyDictionary[LayerGraph, dict[object, Found]] = WeakKeyDictionary()

    @wraps(function)
    def call(graph: LayerGraph, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        results, key = known.setdefault(graph, {}), (args, *kwargs.items())
        if key not in results:
            results[key] = function(graph, *args, **kwargs)
        return results[key]

    return call


@dataclass(frozen=True)
class Unplaced:
    """A result whose samples are not known to lie along a dimension.

    Args:
        result: leaf of what the model returns, by number.
        layer: makes it.
        unknown: ops of the layers behind which samples are lost that have no row in the axis table.
    """

    result: int
    layer: str
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A result leaf that is not a tensor (None, a number, a string)."""

    value: Any
