"""How the samples of one pass get from many replicas to layers with fewer, and its results back.

Krizhevsky ("One weird trick", arXiv 1404.5997, section 4) names three schemes for K workers whose samples meet in
layers that every worker has a part of:

    gather      all send at once; the layers then run once, on the whole batch
    broadcast   one worker at a time sends its samples; the layers run K times
    interleave  all send 1/K of theirs at a time; the layers run K times

A lone sender has its own lane only, and a copy for everybody to put on it. So where more than two want all of its
samples it deals them out first, and those who got a share each then pass it on to the others (a broadcast as a scatter
and an all-gather): its lane carries them about twice instead of K - 1 times.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.layout import Grid, Layout

__all__ = ["broadcast_stops"]

# More than so many who want the same, and it is dealt out first.
DIRECT = 2


def broadcast_stops(
    passes: int, max_replicas: int, source: Layout, target: Layout, number: int, dim: int | None
) -> tuple[Layout, ...]:
    """The layouts of the samples of pass `number` on their way from `source` to `target`, both included.

    Args:
        max_replicas: the many replicas.
        source, target: the layouts of the whole value; one of them has the rows of the many replicas.
        dim: where samples lie, for dealing them out; None where they are not.
    """
    start, end = (_of_pass(layout, passes, max_replicas, number) for layout in (source, target))
    copies = len(end.grid.devices) // (end.grid.replicas if end.batch_dim is not None else 1)
    if dim is None or end.shard_dim is not None or copies <= DIRECT:
        return start, end
    return start, Layout(Grid(end.grid.devices, len(end.grid.devices), 1), dim), end


def _of_pass(layout: Layout, passes: int, max_replicas: int, number: int) -> Layout:
    """The rows that have the samples of a pass; all of them where rows are not those of the many replicas."""
    grid = layout.grid
    if layout.batch_dim is None or grid.replicas % max_replicas:
        return layout
    each = grid.replicas // max_replicas
    rows = [row for row in range(grid.replicas) if row // each % passes == number]
    devices = tuple(device for row in rows for device in grid.row(row))
    return replace(layout, grid=Grid(devices, len(rows), grid.shards))
