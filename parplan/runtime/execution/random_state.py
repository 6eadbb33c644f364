"""Random numbers that devices have to draw alike, or apart from each other.

In one process a device draws from the process's generator as any module does, and so do replicas, which work on
different samples. Three cases need more. Processes that were seeded alike (`torch.manual_seed(0)` in every script)
would draw the same for their different samples, where the plain model's samples draw apart: in one of several processes
a forward draws from a stream that the process's number is folded into. Devices that compute the same thing redundantly
must draw the same numbers, or their copies differ. Shards of one replica must draw different ones even where their
processes were seeded alike, or a mask repeats across the shards. Ops of these last two kinds draw from a generator set
to a seed made of the call's seed, which all processes share, of the op, and of the row and column of the grid that the
result differs by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from parplan.accelerators import default_generator
from parplan.graph.kinds import op_name
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.local import LocalLayer
from parplan.graph.packed_sequences import RNN_PACKED
from parplan.graph.sites import site_of
from parplan.plan import Strategy

__all__ = ["OwnDraws", "SeededOps", "draws_any"]

aten = torch.ops.aten

# Where an op says that it draws after all: the position of its `train` flag, or of its rate.
_SWITCHES: dict[Any, int] = {
    aten.dropout.default: 2,
    aten.feature_dropout.default: 2,
    aten.alpha_dropout.default: 2,
    aten.feature_alpha_dropout.default: 2,
    aten.scaled_dot_product_attention.default: 4,
    aten.lstm.input: 5,
    aten.gru.input: 5,
    aten.rnn_tanh.input: 5,
    aten.rnn_relu.input: 5,
    RNN_PACKED: 6,
}
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that seeds of different places differ
_SEEDS = 1 << 63
_MOST_RANKS = 1 << 20


class SeededOps:
    """The ops of a program that draw from a generator seeded for each call, device and micro-batch.

    Args:
        rank: this process's number, where what it draws alone has to differ from what others draw that were seeded
            alike; None where there are no others, or it need not.

    Attributes:
        any: whether there is such an op, so that each call needs a seed.
        apart: whether the process draws from a stream of its own, so that each call needs a seed.
        seed: of this call; the same in every process.
        local_seed: the seed that this process drew itself.
        micro_batch: number of the one that is running, so that all draw different numbers.
    """

    def __init__(self, graph: LayerGraph, strategies: Mapping[str, Strategy], rank: int | None = None) -> None:
        order = [node.name for layer in graph.layers.values() for node in layer.nodes]
        self._index = {name: index for index, name in enumerate(order)}
        self._limit = 1 + max((len(strategy.devices) for strategy in strategies.values()), default=0)
        self._places = len(order) * self._limit**2
        self._layers = {
            name for name, layer in graph.layers.items() if any(_joint(layer, strategies[name], n) for n in layer.nodes)
        }
        self._rank = rank or 0
        self.any = bool(self._layers)
        self.apart = rank is not None and draws_any(graph, graph.layers)
        self.seed = self.local_seed = 0
        self.micro_batch = 0

    def own_draws(self, places: Iterable[torch.device]) -> OwnDraws:
        """The stream that this process draws from in one forward, on devices that live in `places`."""
        place = self.micro_batch * _MOST_RANKS + self._rank + 1
        seed = (self.local_seed - place * _STRIDE) % _SEEDS  # places of ops count upwards from the seed
        return OwnDraws(seed if self.apart else None, places)

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a forward and of its replays, which draw what the forward draws."""
        return nullcontext(), _Again(self, self.seed, self.micro_batch)

    def apply(self, code: fx.GraphModule, part: LocalLayer, row: int) -> None:
        """Let the ops of one device's part of a layer draw from the generator that is theirs."""
        if part.layer.name not in self._layers:
            return
        nodes = {node.name: node for node in part.layer.nodes}
        for made in code.graph.nodes:
            node = nodes.get(made.name)
            if made.op == "call_function" and node is not None and _joint(part.layer, part.strategy, node):
                # The result differs by the op, and by these rows and columns of the grid.
                own_row = row if _by_row(part.layer, part.strategy, node) else 0
                axis = part.layer.axis(part.strategy.axis) if part.strategy.shards > 1 else None
                own_column = part.column if axis is not None and not _results(node).isdisjoint(axis.dims) else 0
                shared = [axis.sections[name].limits for name in _results(node) & axis.sections.keys()] if axis else []
                if any(map(any, shared)):  # of one section: what neighbours share they draw alike
                    own_column = own_column * min(*shared[0], part.strategy.shards) // part.strategy.shards
                place = (self._index[node.name] * self._limit + own_row) * self._limit + own_column
                made.target = self._seeded(made.target, place)
        code.recompile()

    def _seeded(self, op: Callable[..., Any], place: int) -> Callable[..., Any]:
        def seeded(*args: Any, **kwargs: Any) -> Any:
            device = next((a.device for a in args if isinstance(a, torch.Tensor)), torch.device("cpu"))
            generator = default_generator(device)
            state = generator.get_state()
            own = self.micro_batch * self._places + place + 1
            generator.manual_seed((self.seed + own * _STRIDE) % _SEEDS)
            try:
                return op(*args, **kwargs)
            finally:
                generator.set_state(state)

        return seeded


class _Again(AbstractContextManager[None]):
    """Ops draw what a call with this seed draws in one of its micro-batches; entered once per backward."""

    def __init__(self, seeded: SeededOps, seed: int, micro_batch: int) -> None:
        self._seeded, self._own = seeded, (seed, micro_batch)

    def __enter__(self) -> None:
        seeded, own = self._seeded, self._own
        self._before, (seeded.seed, seeded.micro_batch) = (seeded.seed, seeded.micro_batch), own

    def __exit__(self, *_: object) -> None:
        self._seeded.seed, self._seeded.micro_batch = self._before


class OwnDraws:
    """A stream of random numbers of one forward; while it is entered the default generators stand in it.

    Args:
        seed: where it begins; None: the generators stay the caller's.
        places: of the devices that draw, beside the CPU.
    """

    def __init__(self, seed: int | None, places: Iterable[torch.device]) -> None:
        drawn = (torch.device("cpu"), *places) if seed is not None else ()
        self._generators = list(dict.fromkeys(map(default_generator, drawn)))
        self._states: list[torch.Tensor] = []
        self._seed = seed or 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Draw from the stream, from where it was left; the caller's generators are as they were afterwards."""
        callers = [generator.get_state() for generator in self._generators]
        for number, generator in enumerate(self._generators):
            if self._states:
                generator.set_state(self._states[number])
            else:
                generator.manual_seed(self._seed)
        try:
            yield
        finally:
            self._states = [generator.get_state() for generator in self._generators]
            for generator, state in zip(self._generators, callers, strict=True):
                generator.set_state(state)


def draws_any(graph: LayerGraph, layers: Iterable[str]) -> bool:
    """Whether an op of these layers draws random numbers, from whichever generator."""
    return any(_is_random(node) for name in layers for node in graph.layers[name].nodes)


def _joint(layer: Layer, strategy: Strategy, node: fx.Node) -> bool:
    """Whether an op draws on several devices of one replica, or redundantly."""
    several = strategy.shards > 1 or (strategy.replicas > 1 and not _by_row(layer, strategy, node))
    return several and _is_random(node)


def _is_random(node: fx.Node) -> bool:
    site = site_of(node)
    if site is not None:
        return site.followed.random
    tags = getattr(node.target, "tags", ())
    switch = _SWITCHES.get(node.target)
    if switch is not None:
        return len(node.args) > switch and bool(node.args[switch])
    return torch.Tag.nondeterministic_seeded in tags


def _by_row(layer: Layer, strategy: Strategy, node: fx.Node) -> bool:
    return strategy.replicas > 1 and layer.batch is not None and not _results(node).isdisjoint(layer.batch.dims)


def _results(node: fx.Node) -> set[str]:
    return {node.name, *(user.name for user in node.users if op_name(user) == "getitem")}
