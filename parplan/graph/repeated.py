"""Runs of layers: repeated blocks, such as those of a deep transformer, so that equal ones are planned once; and units,
the layers that are replayed together.

Two layers are equal where nothing that a price depends on differs: ops with their arguments, shapes and types, axes,
and wiring. An input is wired alike where it comes from as many layers before, or is the same value (a mask, positions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from parplan.graph.kinds import op_name, writes_statistics
from parplan.graph.layer_graph import Axis, Layer, LayerGraph, once_per_graph
from parplan.graph.sites import site_of

__all__ = ["Blocks", "Fold", "fold", "gather_groups", "group_of", "repeated_blocks", "unit_of", "units", "why_kept"]

LEAST_LAYERS = 64
"""Layers of all copies of a block from which planning them alike is worth losing some plans."""


@dataclass(frozen=True)
class Blocks:
    """Equal blocks one after another: layer `begin + b * period + i` is the same for all b < `copies`, i < `period`."""

    begin: int
    period: int
    copies: int

    @property
    def end(self) -> int:
        """The place of the first layer behind them."""
        return self.begin + self.period * self.copies


@dataclass(frozen=True)
class Fold:
    """Equal blocks with one strategy per layer for all copies: nodes of first and last, and one for all others.

    Args:
        blocks: all repeated blocks, in forward order.
        kept: by layer, the one that stands for it (often itself).
        times: by kept layer, how many layers it stands for, where they are several.
        alike: kept layers that have one strategy: first, middle and last copy.
    """

    blocks: tuple[Blocks, ...]
    kept: Mapping[str, str]
    times: Mapping[str, int] = field(default_factory=dict)
    alike: tuple[tuple[str, str, str], ...] = ()

    @cached_property
    def first(self) -> Mapping[str, str]:
        """By layer of a repeated block, its copy in the first one."""
        first = {name: group[0] for group in self.alike for name in group}
        return {name: first[kept] for name, kept in self.kept.items() if kept in first}

    def treated_alike(self, said: Mapping[str, object]) -> bool:
        """Whether the same is said of every copy of a layer."""
        return all(said.get(layer) == said.get(first) for layer, first in self.first.items())

    @cached_property
    def last(self) -> Mapping[str, str]:
        """By the middle copy of a layer, the last one."""
        return {middle: last for _, middle, last in self.alike}

    @cached_property
    def first_block(self) -> Mapping[str, str]:
        """By the first copy of a layer, the middle one."""
        return {first: middle for first, middle, _ in self.alike}

    def describe(self, graph: LayerGraph) -> str:
        """Words for a report: `32 equal blocks of 16 layers from model.layers.0.input_layernorm on`."""
        names = tuple(graph.layers)
        each = (f"{own.copies} equal blocks of {own.period} layers from {names[own.begin]} on" for own in self.blocks)
        return " and ".join(each)


@once_per_graph
def fold(graph: LayerGraph, least_layers: int = LEAST_LAYERS) -> Fold | None:
    """The repeated blocks of a graph as layers that stand for others; None where there are too few to gain by it."""
    blocks = [own for own in repeated_blocks(graph) if own.copies > 4 and own.copies * own.period >= least_layers]
    if not blocks:
        return None
    names = tuple(graph.layers)
    kept, times = {name: name for name in names}, dict[str, int]()
    alike = []
    for own in blocks:
        for place in range(own.begin, own.begin + own.period):
            first, *others, last = names[place : own.end : own.period]
            kept.update(dict.fromkeys(others, others[0]))
            times[others[0]] = len(others)
            alike.append((first, others[0], last))
    return Fold(tuple(blocks), kept, times, tuple(alike))


@once_per_graph
def repeated_blocks(graph: LayerGraph) -> tuple[Blocks, ...]:
    """Disjoint runs of at least three equal blocks, in forward order, those that leave fewest layers first found."""
    search = _Search(graph)
    found: list[Blocks] = []
    spans = [(0, len(graph.layers))]
    while spans:
        low, high = spans.pop()
        best = max(
            (own for period in search.periods for own in search.runs(period, low, high)),
            key=lambda own: ((own.copies - 1) * own.period, -own.period),
            default=None,
        )
        if best is not None:
            found.append(best)
            spans += [(low, best.begin), (best.end, high)]
    return tuple(sorted(found, key=lambda own: own.begin))


class _Search:
    """Layers of a graph by what they are, and by where their inputs come from."""

    def __init__(self, graph: LayerGraph) -> None:
        layers = list(graph.layers.values())
        self.names = tuple(graph.layers)
        place = {layer.name: number for number, layer in enumerate(layers)}
        known: dict[object, int] = {}
        self.kinds: list[int] = []
        self.inputs: list[list[tuple[str, int | None, int]]] = []
        last: dict[int, int] = {}
        gaps: Counter[int] = Counter()
        for number, layer in enumerate(layers):
            # Weights that several layers share are held and updated once: such layers stand for themselves only.
            shared = any(len(graph.users[name]) > 1 for name in layer.parameters)
            kind = known.setdefault((number if shared else -1, _signature(graph, layer)), len(known))
            self.kinds.append(kind)
            wires = []
            for value in layer.inputs:
                maker = graph.producer.get(value)
                output = graph.layers[maker].outputs.index(value) if maker is not None else 0
                wires.append((value, place[maker] if maker is not None else None, output))
            self.inputs.append(wires)
            if kind in last:
                gaps[number - last[kind]] += 1
            last[kind] = number
        self.periods = tuple(gaps)

    def runs(self, period: int, low: int, high: int) -> list[Blocks]:
        """Runs of at least three blocks of `period` layers between two places."""
        found, begin = [], low
        for place in range(low, high):
            if place + period < high and self.equal(place, place + period):
                continue
            # The first block may take what it takes from other layers than the ones behind it do.
            firsts = range(max(low, begin - period + 1), begin) if place > begin else ()
            loose = (first for first in firsts if all(self.equal(k, k + period, first) for k in range(first, begin)))
            first, end = next(loose, begin), place + period
            copies = (end - first) // period
            # Of the places where as many copies could begin, one where a module does.
            begin = min(range(first, end - copies * period + 1), key=self.shared_path)
            if copies >= 3 and self.inside(begin, period):
                found.append(Blocks(begin, period, copies))
            begin = place + 1
        return found

    def shared_path(self, place: int) -> int:
        """The length of the module path that a layer has in common with the one before it."""
        pair = [self.names[k].split(".") for k in (place - 1, place)] if place else [[""], ["."]]
        return next((n for n, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), min(map(len, pair)))

    def equal(self, one: int, other: int, outside: int = 0) -> bool:
        """Whether two layers are the same, with inputs from as many layers before or the same inputs.

        Args:
            outside: inputs of the first that come from before this layer may come from any.
        """
        if self.kinds[one] != self.kinds[other]:
            return False
        return all(
            value == again
            or (a is not None and b is not None and ((b - a == other - one and output == number) or a < outside <= b))
            for (value, a, output), (again, b, number) in zip(self.inputs[one], self.inputs[other], strict=True)
        )

    def inside(self, begin: int, period: int) -> bool:
        """Whether the second block takes from itself, the first block, and what all blocks take."""
        return all(
            maker is None or maker >= begin or again == value
            for place in range(begin, begin + period)
            for (again, _, _), (value, maker, _) in zip(self.inputs[place], self.inputs[place + period], strict=True)
        )


@once_per_graph
def gather_groups(graph: LayerGraph) -> tuple[tuple[str, ...], ...]:
    """Runs of layers, in forward order and together all of them, whose weights are gathered from slices together while
    the run before computes.

    A run ends where one value with a gradient is all that later layers, or the user, take of it and of what is before:
    behind the sum of a residual branch, say. A group is such a run with at least two layers with matrices, else several
    of them in a row until they have as many: a small one would hide little of the gathers for a large one behind it.
    None crosses the border of equal blocks that are planned alike.
    """
    if graph.profiled:
        return tuple((name,) for name in graph.layers)  # of a profile's layers nobody knows what they hand on
    names, open_, found = list(graph.layers), set[str](), list[tuple[str, ...]]()
    last = {value: place for place, layer in enumerate(graph.layers.values()) for value in layer.inputs}
    last |= {value: len(names) for value in graph.results}
    alike = fold(graph)
    borders = {k for own in alike.blocks for k in range(own.begin, own.end + 1, own.period)} if alike else set()
    runs, run = list[list[str]](), list[str]()
    for place, (name, layer) in enumerate(graph.layers.items(), 1):
        run.append(name)
        open_ |= {value for value in layer.outputs if graph.values[value].requires_grad}
        open_ = {value for value in open_ if last.get(value, -1) >= place}
        if len(open_) <= 1 or place in borders or place == len(names):
            runs.append(run)
            run = []
    unit, place = list[str](), 0
    for run in [*runs, []]:
        enough = _matrices(graph, unit) >= _LEAST_MATRICES and _matrices(graph, run)
        if not run or place in borders or enough or _matrices(graph, run) >= _LEAST_MATRICES:
            found.append(tuple(unit))
            unit = []
        unit += run
        place += len(run)
    return tuple(own for own in found if own)


_LEAST_MATRICES = 2


@once_per_graph
def group_of(graph: LayerGraph) -> Mapping[str, int]:
    """The number of every layer's gather group."""
    return {name: number for number, own in enumerate(gather_groups(graph)) for name in own}


@once_per_graph
def units(graph: LayerGraph) -> tuple[tuple[str, ...], ...]:
    """Units of recomputation: gather groups that can run forward again from little that is kept.

    They have at least two layers with matrices, as of a single one nothing would be dropped, and none that cannot run
    again.
    """
    if graph.profiled:
        return ()  # of a profile's layers nobody knows what they keep
    return tuple(
        own
        for own in gather_groups(graph)
        if _matrices(graph, own) >= _LEAST_MATRICES and not any(_why_once(graph, name) for name in own)
    )


def _matrices(graph: LayerGraph, names: Iterable[str]) -> int:
    """How many of some layers have matrices."""
    own = ((graph.values[parameter].shape for parameter in graph.layers[name].parameters) for name in names)
    return sum(any(len(shape) > 1 for shape in shapes) for shapes in own)


@once_per_graph
def unit_of(graph: LayerGraph) -> Mapping[str, int]:
    """The number of its unit, by layer that is in one."""
    return {name: number for number, own in enumerate(units(graph)) for name in own}


def why_kept(graph: LayerGraph, name: str) -> str:
    """The reason for which a layer cannot be replayed; empty where it is in a unit."""
    if name in unit_of(graph):
        return ""
    return _why_once(graph, name) or "it is in no unit of layers with at least two matrices"


def _why_once(graph: LayerGraph, name: str) -> str:
    """The reason for which a layer runs forward no more than once in a step; empty where it may."""
    layer = graph.layers[name]
    if layer.mixes_batch or any(map(writes_statistics, layer.nodes)):
        return "it writes running statistics"
    if changing := [buffer for buffer in layer.buffers if buffer in graph.buffer_updates or buffer in graph.numbers]:
        return f"it reads {graph.label(changing[0])}, which a step changes"
    if any(
        op_name(node) in _RECURRENT and any(isinstance(a, float) and a > 0 for a in node.args) for node in layer.nodes
    ):
        return "it drops values between recurrent layers, which cuDNN does by numbers that it cannot draw again"
    code = next((site.name for node in layer.nodes if (site := site_of(node)) is not None), None)
    return "" if code is None else f"it runs {code}, code of its own"


_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "rnn_packed"})


def _signature(graph: LayerGraph, layer: Layer) -> str:
    """All that prices of a layer depend on, its values by their roles instead of their names."""
    roles: dict[str, str] = {}
    for word, names in (
        ("in", layer.inputs), ("weight", layer.parameters), ("buffer", layer.buffers), ("out", layer.outputs),
    ):  # fmt: skip
        roles.update((name, f"{word}{number}") for number, name in enumerate(names))
    roles.update((node.name, f"node{number}") for number, node in enumerate(layer.nodes))

    def role(name: str) -> str:
        return roles.get(name, name)

    def axis(own: Axis) -> tuple[object, ...]:
        dims = sorted((role(name), dim) for name, dim in own.dims.items())
        sections = sorted((role(name), part.sizes, part.limits) for name, part in own.sections.items())
        repeats = sorted((role(name), part.dim, part.limit) for name, part in own.repeats.items())
        sets = sorted(map(role, own.partial)), sorted(map(role, own.first_only))
        return own.name, own.units, dims, *sets, sections, repeats

    ops = [
        (str(node.target), repr(fx.node.map_arg((node.args, dict(node.kwargs)), lambda one: role(one.name))))
        for node in layer.nodes
    ]
    specs = [(own, graph.values.get(name), graph.batch_dims.get(name)) for name, own in roles.items()]
    flags = (
        layer.kind,
        graph.profiled.get(layer.name),
        layer.reached,
        layer.constant,
        layer.mixes_batch,
        [role(name) for name in layer.outputs],
    )
    axes = [axis(own) for own in ((layer.batch, *layer.axes) if layer.batch is not None else layer.axes)]
    return repr((flags, layer.batch is None, ops, specs, axes))
