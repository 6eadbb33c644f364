"""Pins as constraints on a model's layers: the strategies each layer is left with, or why a pin cannot be kept.

Pins on one layer combine; where two say different things, the later one wins. A layer without a `gpu:` pin of its own
runs on the devices of the layer that its first input comes from, if those were pinned (directly or the same way).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, combinations, product

from parplan.cluster import Cluster
from parplan.errors import PinError, RuleError
from parplan.graph.axes.table import unknown_ops
from parplan.graph.kinds import is_split_off
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import unit_of, why_kept
from parplan.graph.sites import why_whole
from parplan.pins import Pin
from parplan.plan import SAVED, STATES, Strategy
from parplan.planner.search_space.rules import divisors, r1_batch, r5_axis, r6_devices, r7_loss
from parplan.planner.search_space.strategies import batch_units, cluster_blocks, spreads

__all__ = ["LayerPin", "Pinned", "named", "pinned", "pinned_blocks", "strategy_words"]

# Up to so many devices, layers that are not pinned beside layers that are may be placed on every subset of them.
MOST_SUBSETS = 4
MOST_REASONS = 3
FIELDS = tuple(one.name for one in fields(Strategy))


@dataclass(frozen=True)
class LayerPin:
    """All that pins say of one layer; None is left to the solver.

    Args:
        by: which pin decided each field that is decided.
        inherited: the layer whose devices it takes over, where none are pinned for it.
    """

    replicas: int | None = None
    shards: int | None = None
    axis: str | None = None
    devices: tuple[int, ...] | None = None
    update_period: int | None = None
    state: str | None = None
    saved: str | None = None
    by: Mapping[str, Pin] = field(default_factory=dict)
    inherited: str | None = None

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins that have a say, each once, by what they decide."""
        return tuple(dict.fromkeys(self.by.values()))


@dataclass(frozen=True)
class Pinned:
    """A model's layers under some pins.

    Args:
        layers: what is said of each layer that anything is said of.
        allowed: the strategies that those layers are left with, never none.
    """

    pins: tuple[Pin, ...]
    layers: Mapping[str, LayerPin]
    allowed: Mapping[str, tuple[Strategy, ...]]

    @property
    def periods(self) -> dict[str, int]:
        """The update period of every layer that has one pinned."""
        return {name: pin.update_period for name, pin in self.layers.items() if pin.update_period is not None}

    def kept_by(self, layers: Mapping[str, Strategy]) -> bool:
        """Whether a plan's layers are as pinned, update periods aside."""
        return all(replace(layers[name], update_period=None) in allowed for name, allowed in self.allowed.items())

    def words(self, layer: str, together: Collection[Pin] = ()) -> str:
        """Words for the report on the pins that decide about a layer; empty without any.

        Args:
            together: pins that are told without their patterns, so that layers of which the same is said are alike.
        """
        pin = self.layers.get(layer)
        if pin is None:
            return ""
        own = ", ".join(one.words if one in together else one.describe() for one in pin.pins if one.matches(layer))
        source = pin.by["devices"].describe() if pin.inherited else ""
        inherited = f"on the devices of its first input, {source}" if source else ""
        return ", ".join(part for part in (f"pinned by {own}" if own else "", inherited) if part)


def named(pins: Iterable[Pin]) -> str:
    """Words for pins in a message."""
    return ", ".join(f"{pin.describe()!r} ({pin.origin})" for pin in pins)


def pinned(pins: Sequence[Pin], graph: LayerGraph, cluster: Cluster, strict: bool = False) -> Pinned:
    """Check pins against model, devices and rules, one layer at a time.

    Args:
        strict: no replicas may have unequal parts of the batch; otherwise those of layers whose replicas are pinned,
            and of layers that the pins leave nothing else.

    Raises:
        PinError: a pattern names no layer; a layer's pins break R1, R5, R6, R7 or R8, whatever else is decided.
    """
    for one in pins:
        _check(one, graph, cluster)
    units = unit_of(graph)
    layers = _inherit({name: _combined(pins, layer, name in units) for name, layer in graph.layers.items()}, graph)
    said = {name: pin for name, pin in layers.items() if pin != LayerPin()}
    blocks = pinned_blocks(cluster, pins)
    batch = graph.batch or 1
    allowed = {
        name: _allowed(graph.layers[name], batch, pin, blocks, cluster, strict, name in units)
        for name, pin in said.items()
    }
    return Pinned(tuple(pins), said, allowed)


def pinned_blocks(cluster: Cluster, pins: Sequence[Pin], everywhere: bool = False) -> tuple[tuple[int, ...], ...]:
    """Blocks of devices for layers without devices of their own: where some layers are pinned, it matters which."""
    given = [pin.devices for pin in pins if pin.devices is not None]
    sizes = [pin.replicas * pin.shards for pin in pins if pin.replicas and pin.shards]
    firsts = [tuple(range(size)) for size in sizes if size <= cluster.count]
    blocks = [*cluster_blocks(cluster, everywhere or bool(given))]
    if given and cluster.count <= MOST_SUBSETS:
        blocks += [block for size in range(1, cluster.count) for block in combinations(range(cluster.count), size)]
    return tuple(dict.fromkeys((*blocks, *given, *(firsts if not set(map(len, blocks)).issuperset(sizes) else ()))))


def strategy_words(pin: LayerPin) -> str:
    """A layer's replicas, shards and axis as far as they are pinned: `4 replicas x 2 shards of heads`."""
    parts = [f"{pin.replicas} replicas" if pin.replicas else "", f"{pin.shards} shards" if pin.shards else ""]
    axis = f" of {pin.axis}" if pin.axis else ""
    return " x ".join(part for part in parts if part) + axis


def _check(pin: Pin, graph: LayerGraph, cluster: Cluster) -> None:
    """Refuse a pin that no layer, no device or no number of passes can keep."""
    matched = [layer for layer in graph.layers.values() if pin.matches(layer.name)]
    if not matched:
        modules = {prefix for name in graph.layers for prefix in accumulate(name.split("."), "{}.{}".format)}
        near = difflib.get_close_matches(pin.pattern, sorted(modules), 3)
        names = list(graph.layers)
        listed = ", ".join(names[:4]) + (f", ... ({len(names)} layers)" if len(names) > 4 else "")
        hint = f"did you mean {' or '.join(near)}?" if near else f"its layers are {listed}"
        raise PinError(f"pin {named([pin])}: {graph.model} has no layer or module {pin.pattern!r}; {hint}")
    if pin.devices is not None:
        try:
            r6_devices(matched[0].name, len(pin.devices), 1, pin.devices, cluster.count)
        except RuleError as error:
            more = f"; plan for {max(pin.devices) + 1} devices or more" if max(pin.devices) >= cluster.count else ""
            raise PinError(f"pin {named([pin])}: {error}{more}") from error
    if pin.saved == "replay" and not any(layer.name in unit_of(graph) for layer in matched):
        why = why_kept(graph, matched[0].name)
        raise PinError(f"pin {named([pin])}: {matched[0].name} cannot be replayed: {why}; leave out the pin")
    if pin.update_period is not None:
        first = next((layer.name for layer in matched if layer.parameters), None)
        if first is None:
            raise PinError(f"pin {named([pin])}: {matched[0].name} has no weights to update; leave out the update")
        if pin.update_period > cluster.count:
            passes = f"{cluster.count} devices allow at most {cluster.count} passes"
            text = f"an update period of {pin.update_period} divides none of them; use one up to {cluster.count}"
            raise PinError(f"pin {named([pin])}: {first}: {passes}, {text} (R8)")


def _combined(pins: Sequence[Pin], layer: Layer, in_unit: bool) -> LayerPin:
    """All pins on one layer; a later `shards:1` takes back an earlier axis, and a later axis an earlier `shards:1`.

    Update periods and state are for layers with weights, and what is saved for those that can be replayed.
    """
    without = ("saved",) * (not in_unit) + ("update_period", "state") * (not layer.parameters)
    fields = [name for name in FIELDS if name not in without]
    found: dict[str, int | str | tuple[int, ...]] = {}
    by: dict[str, Pin] = {}
    for pin in pins:
        if not pin.matches(layer.name) or (is_split_off(layer.nodes) and pin.pattern != layer.name):
            continue
        new = {name: getattr(pin, name) for name in fields if getattr(pin, name) is not None}
        gone = ["axis"] if new.get("shards") == 1 else ["shards"] if "axis" in new and found.get("shards") == 1 else []
        found = {**{name: value for name, value in found.items() if name not in gone}, **new}
        by = {**{name: one for name, one in by.items() if name not in gone}, **dict.fromkeys(new, pin)}
    return LayerPin(**found, by=by)  # type: ignore[arg-type]  # each field has its own type


def _inherit(layers: Mapping[str, LayerPin], graph: LayerGraph) -> dict[str, LayerPin]:
    """The same with devices taken over from where first inputs come from, in forward order."""
    found: dict[str, LayerPin] = {}
    for name, pin in layers.items():
        # The layer that makes the first input: of those with samples, and not the user.
        sources = graph.makers(graph.layers[name])
        source = next((source for source in sources if not graph.layers[source].constant), None)
        above = found.get(source) if source is not None and pin.devices is None else None
        if above is None or above.devices is None:
            found[name] = pin
            continue
        by = {**pin.by, "devices": above.by["devices"]}
        found[name] = replace(pin, devices=above.devices, by=by, inherited=source)
    return found


def _allowed(
    layer: Layer,
    batch: int,
    pin: LayerPin,
    blocks: Sequence[tuple[int, ...]],
    cluster: Cluster,
    strict: bool,
    in_unit: bool,
) -> tuple[Strategy, ...]:
    """The strategies a layer is left with.

    Raises:
        PinError: none.
    """
    reasons: list[str] = []
    bent = (False,) if strict else (True,) if pin.replicas else (False, True)
    axes = [pin.axis] if pin.axis else [axis.name for axis in layer.axes]
    for places, bends in product(_places(pin, blocks), bent):
        states = STATES if pin.state is None else [pin.state]
        saved = [pin.saved] if pin.saved is not None else SAVED if in_unit else SAVED[:1]
        shapes = [
            replace(shape, state=state, saved=kept)
            for place in places for shape in spreads(place, axes) for state in states for kept in saved
            if pin.replicas in (None, shape.replicas) and pin.shards in (None, shape.shards)
            and pin.axis in (None, shape.axis)
        ]  # fmt: skip
        tried = [_try(layer, batch, shape, cluster.count, bends, strict) for shape in shapes]
        found = tuple(one for one in tried if isinstance(one, Strategy))
        if found:
            return found
        reasons = reasons or list(dict.fromkeys(one for one in tried if isinstance(one, str)))
    why = "; or ".join(reasons[:MOST_REASONS]) or _no_shape(layer.name, pin, cluster)
    inherited = f"; it takes over devices {list(pin.devices or ())} from {pin.inherited}" if pin.inherited else ""
    many = "s" if len(pin.pins) > 1 else ""
    raise PinError(f"pin{many} {named(pin.pins)}: {why}{inherited}")


def _places(pin: LayerPin, blocks: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
    """Groups of devices to try; the first that the rules allow counts.

    Pinned devices are all used. Of devices taken over, so many of the first as the layer can be spread over: a loss
    that needs all samples runs on the first one.
    """
    if pin.devices is None:
        yield blocks
    elif pin.inherited is None:
        yield (pin.devices,)
    else:
        yield from ((pin.devices[:size],) for size in range(len(pin.devices), 0, -1))


def _try(layer: Layer, batch: int, strategy: Strategy, devices: int, uneven: bool, strict: bool) -> Strategy | str:
    """The strategy if it is legal, else the rule it breaks."""
    try:
        r7_loss(layer.name, strict and layer.is_loss, strategy.shards)
        units = batch_units(layer, batch)
        most, unknown = devices // strategy.shards, unknown_ops(layer.nodes)
        r1_batch(layer.name, batch, units, strategy.replicas, most, unknown, why_whole(layer.nodes), uneven)
        axes = {axis.name: axis.units for axis in layer.axes}
        r5_axis(layer.name, strategy.axis, axes, strategy.shards, devices // strategy.replicas)
    except RuleError as error:
        return str(error)
    return strategy


def _no_shape(name: str, pin: LayerPin, cluster: Cluster) -> str:
    """No number of devices suits what is pinned (R6)."""
    words = strategy_words(pin)
    if pin.replicas and pin.shards:
        needed = pin.replicas * pin.shards
        there = f"it has {len(pin.devices)}" if pin.devices else f"there are {cluster.count}"
        less = "pin fewer" if len(pin.pins) == 1 else "pin fewer (a later replicas:1 or shards:1 takes one back)"
        return f"{name}: {words} need {needed} devices, {there}; {less}, or give it {needed} devices (R6)"
    have = len(pin.devices) if pin.devices else cluster.count
    if pin.axis and pin.shards in (None, 1):
        spread = f" and {pin.replicas} replicas" if pin.replicas else ""
        have_not = f"{have} device{'s do' if have > 1 else ' does'} not divide that way"
        if pin.shards == 1:
            have_not = "1 is pinned"
        return (
            f"{name}: cutting {pin.axis}{spread} needs 2 shards or more, {have_not}; leave out the axis, or give it "
            "more devices (R6)"
        )
    fits = " or ".join(str(part) for part in divisors(have)) if pin.devices else f"up to {have}"
    fits += ", or give it devices with gpu:" if pin.inherited else ""
    return f"{name}: {words} cannot occupy {have} device{'s' if have > 1 else ''}; use {fits} (R6)"
