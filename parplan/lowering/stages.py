"""Which layers of a plan run in passes, and which samples each pass has.

A plan whose layers have many replicas in front and fewer behind may run the layers behind in passes = many / fewest
trips, each on an equal share of the samples (Krizhevsky 2014, section 4; cuda-convnet2's "passes"):

    before   layers with most replicas, and what samples do not reach: once, on the whole batch
    passes   layers with fewer replicas, and every layer behind them that keeps samples apart: once per pass
    after    what needs all samples again (a loss): once, on the results of all passes

With one group of front replicas per back replica, broadcast gives pass p the samples of replica p of every group,
interleave the p-th share of every front replica's samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

from parplan.errors import PlanError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.layout import Range, split_evenly
from parplan.plan import Scheme, Strategy

__all__ = ["Stage", "Stages", "keeps_apart", "shares", "stages"]


class Stage(Enum):
    """When a layer runs in a step."""

    BEFORE = "once, before the passes"
    PASSES = "once per pass"
    AFTER = "once, after the passes"


@dataclass(frozen=True)
class Stages:
    """When every layer runs.

    Args:
        passes: trips through the layers of stage PASSES; 1 when there are none.
        max_replicas, min_replicas: of the layers in front, and the fewest of those behind.
        of: stage per layer.
    """

    passes: int
    max_replicas: int
    min_replicas: int
    of: Mapping[str, Stage]

    def layers(self, stage: Stage) -> tuple[str, ...]:
        """Layers of one stage, in forward order."""
        return tuple(name for name, own in self.of.items() if own is stage)


def stages(graph: LayerGraph, strategies: Mapping[str, Strategy], scheme: Scheme) -> Stages:
    """When every layer runs under `strategies`; with gather, all of them once and before.

    Raises:
        PlanError: passes are asked for and cannot be: replicas that do not divide, or a layer in them that mixes
            samples.
    """
    counts = [strategies[name].replicas for name, layer in graph.layers.items() if keeps_apart(layer)]
    most, fewest = max(counts, default=1), min(counts, default=1)
    if scheme is Scheme.GATHER or most == fewest:
        return Stages(1, most, fewest, dict.fromkeys(graph.layers, Stage.BEFORE))
    if most % fewest:
        raise PlanError(
            f"{graph.model}: layers have up to {most} replicas and down to {fewest}, which do not divide, so "
            f'{scheme.value} has no whole number of passes; use scheme "gather", or counts that divide'
        )
    of: dict[str, Stage] = {}
    for name, layer in graph.layers.items():
        of[name] = _stage(graph, layer, strategies[name].replicas < most, of)
        if of[name] is Stage.PASSES and layer.mixes_batch:
            raise PlanError(
                f"{name}: its statistics are of the whole batch, and with {scheme.value} it would see one pass's "
                f'samples; give it and the layers in front {most} replicas, or use scheme "gather"'
            )
    return Stages(most // fewest, most, fewest, of)


def keeps_apart(layer: Layer) -> bool:
    """Whether a layer works on each sample by itself, so that replicas and passes may divide them."""
    return layer.batch is not None and not layer.constant


def _stage(graph: LayerGraph, layer: Layer, narrow: bool, known: Mapping[str, Stage]) -> Stage:
    fed_by = {known[maker] for maker in graph.makers(layer)}
    if Stage.AFTER in fed_by:
        return Stage.AFTER
    if not keeps_apart(layer):
        return Stage.AFTER if Stage.PASSES in fed_by else Stage.BEFORE
    return Stage.PASSES if narrow or Stage.PASSES in fed_by else Stage.BEFORE


def shares(rows: tuple[int, ...], stages: Stages, scheme: Scheme) -> tuple[tuple[Range, ...], ...]:
    """The samples of each of several passes, as ranges of the whole batch in ascending order.

    Args:
        rows: samples of each of the `stages.max_replicas` front replicas.

    >>> from parplan.lowering.stages import Stages
    >>> shares((2, 2), Stages(2, 2, 1, {}), Scheme.BROADCAST)
    ((Range(start=0, stop=2),), (Range(start=2, stop=4),))
    >>> shares((2, 2), Stages(2, 2, 1, {}), Scheme.INTERLEAVE)
    ((Range(start=0, stop=1), Range(start=2, stop=3)), (Range(start=1, stop=2), Range(start=3, stop=4)))
    """
    whole = [Range(*ends) for ends in pairwise(accumulate(rows, initial=0))]
    if scheme is Scheme.BROADCAST:
        return tuple(tuple(whole[number :: stages.passes]) for number in range(stages.passes))
    cut = [pairwise(accumulate(split_evenly(len(one), stages.passes), initial=one.start)) for one in whole]
    return tuple(tuple(Range(*ends) for ends in of_pass) for of_pass in zip(*cut, strict=True))
