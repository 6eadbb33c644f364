"""The backward of a step with gradient sums and gathers of weights beside it, then the updates, as maxima."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parplan.planner.search_space.step_time.parts import StepParts
from parplan.planner.search_space.step_time.rows import Sum, counted_on, held_on, phase_rows, tracks
from parplan.planner.solver.problem import FloatArray, Maximum, Row

__all__ = ["OWN", "Backward"]

OWN = "own backward"
"""The name of maxima of what a device goes back itself, which never set T."""


class Backward:
    """The backward of the last pass with the gradient sums beside it, then the updates, as maxima."""

    def __init__(self, parts: StepParts, maxima: list[Maximum]) -> None:
        self.parts, self.far_s, self.maxima = parts, parts.far_s, maxima
        self.by_device = parts.shape.by_device
        self.into: list[list[int]] = [[] for _ in parts.nodes]
        for e, edge in enumerate(parts.edges):
            self.into[edge.counted_at].append(e)
        self.ends: list[int | None] = [None] * len(parts.nodes[0].lanes)
        self.busy = [Sum() for _ in self.ends]  # what each lane has gone back itself
        self.groups = parts.gather_groups if any(own.regathers.any() for own in parts.nodes) else ()
        self.arrived: list[int] = []  # by lane: maxima of when the gathers are there that the next group waits for

    def build(self, name: str = "backward", weight: float = 1.0) -> None:
        """List the maxima, the last of them with a weight."""
        phase_of = {v: phase for phase in self.parts.phases for branch in phase for v in branch}
        done, gone = Sum(), set[int]()
        ends = {group[-1]: place for place, group in enumerate(self.groups)}
        if self.groups:
            self.gather(len(self.groups) - 1, done)
        for v in range(self.parts.layers - 1, -1, -1):
            if v in ends:
                done = self.enter(ends[v], done)
            if v not in phase_of:
                done = self.node(v, done)
            elif id(phase_of[v]) not in gone:
                gone.add(id(phase_of[v]))
                begin = self.add("branches begin to go back", done.row())
                own_tracks = tracks(self.parts, phase_of[v])
                own = [Sum(maxima={begin: 1.0}) for _ in own_tracks]
                # In the order of plans without branches: a device's gradient sums go one after another.
                members = ((member, t) for t, (track, _) in enumerate(own_tracks) for member in track)
                for member, t in sorted(members, reverse=True):
                    own[t] = self.node(member, own[t], own_tracks[t][1])
                rows = phase_rows(self.parts, phase_of[v], True, {begin: 1.0})
                done = Sum(maxima={self.add("backward of branches", *rows): 1.0})
        rows = [done.row()]
        for place, end in enumerate(self.ends):
            if end is not None:
                for row in (Sum(maxima={end: 1.0}), *((self.busy[place],) if self.by_device else ())):
                    for v, own_parts in enumerate(self.parts.nodes if self.by_device else ()):
                        row.node(v, own_parts.lanes[place] * own_parts.update_s)
                    rows.append(row.row())
        self.maxima.append(Maximum(name, tuple(rows), weight))

    def add(self, name: str, *rows: Row) -> int:
        """A maximum for later ones to use; gives its place."""
        self.maxima.append(Maximum(name, rows))
        return len(self.maxima) - 1

    # -- gathers --

    def enter(self, place: int, done: Sum) -> Sum:
        """A group begins to go back when its weights are there, and those of the group before begin to come; gives what
        is done then."""
        times = self.parts.copies(place)
        behind = self.parts.copies(place + 1) if place + 1 < len(self.groups) else 1
        if times > 1 == behind:
            done = self.enter_blocks(place, self.wait(place, done))
        elif times == 1:
            if behind > 1:
                done = self.leave_blocks(place, done)
            done = self.wait(place, done)
            if place:
                done = self.gather(place - 1, done, 1 / self.parts.copies(place - 1))
        return done

    def again(self, place: int, factor: float = 1.0) -> dict[int, tuple[FloatArray, FloatArray]]:
        """Layers of a group that may gather weights again: seconds of that, and what it takes from compute."""
        nodes = ((v, self.parts.nodes[v]) for v in self.groups[place])
        return {
            v: (factor * own.regathers * own.gather_s, factor * own.regathers * own.gather_interference_s)
            for v, own in nodes
            if own.regathers.any()
        }

    def gather(self, place: int, done: Sum, factor: float = 1.0) -> Sum:
        """The gathers of a group begin with what is `done`, and behind the lanes' sums; gives what is done with what
        they take from compute."""
        own = self.again(place, factor)
        if not own:
            self.arrived = []
            return done
        done = Sum(maxima={self.add("a group begins to go back", done.row()): 1.0}) if done.maxima else done
        return self.gathers(own, done, [*own])

    def gathers(self, own: Mapping[int, tuple[FloatArray, FloatArray]], done: Sum, flags: Sequence[int]) -> Sum:
        """Gathers on all lanes, where layers of `flags` take them not before what is `done`."""
        nodes = self.parts.nodes
        for place, end in enumerate(self.ends):
            lane = Sum(maxima={} if end is None else {end: 1.0})
            starts = [lane] if end is not None else []
            for v in flags:
                row = done.copy()
                row.node(v, -self.far_s * (1 - nodes[v].regathers * (nodes[v].lanes[place] == 1)))
                starts.append(row)
            for row in starts:
                for v, (seconds, _) in own.items():
                    row.node(v, nodes[v].lanes[place] * seconds)
            self.ends[place] = self.add("gathers", *(row.row() for row in starts))
        self.arrived = [end for end in self.ends if end is not None]
        return self.held(own, done)

    def held(self, own: Mapping[int, tuple[FloatArray, FloatArray]], done: Sum) -> Sum:
        """The end of what is done and of what gathers take from compute."""
        held = done.copy()
        for v, (_, interference_s) in own.items():
            held.node(v, interference_s)
        return held

    def wait(self, place: int, done: Sum) -> Sum:
        """The end of what is done and of the gathers of a group."""
        if not (own := self.again(place)):
            return done
        rows = [done.row()]
        for v in own:
            for lane, arrived in enumerate(self.arrived):
                used = self.parts.nodes[v].regathers * (self.parts.nodes[v].lanes[lane] == 1)
                rows.append(Row({v: -self.far_s * (1 - used)}, maxima={arrived: 1.0}))
        return Sum(maxima={self.add(f"weights up to {self.groups[place][-1]} are there", *rows): 1.0})

    def enter_blocks(self, place: int, done: Sum) -> Sum:
        """All gathers of blocks of which one stands for several but the first of them, which are there already."""
        first, run = 1 - 1 / self.parts.copies(place), self.parts.blocks_to(place)
        own = {v: both for one in run for v, both in self.again(one, first if one == place else 1.0).items()}
        # All layers of a block gather again, or none (formulation.py), so one of them says whether.
        return self.gathers(own, done, [*own][:1]) if own else done

    def leave_blocks(self, place: int, done: Sum) -> Sum:
        """The gathers of the group before such blocks begin with the last of their groups to go back; gives what is
        done with what they take from compute."""
        last, times, nodes = self.groups[place + 1], self.parts.copies(place + 1), self.parts.nodes
        before = done.copy()
        for v in last:
            before.node(v, nodes[v].backward_s, -1 / times)
        self.gather(place, before)
        for lane, arrived in enumerate(self.arrived):
            row = Sum(maxima={arrived: 1.0})
            for v in last:  # their own sums come behind them
                row.node(v, nodes[v].lanes[lane] * nodes[v].sum_s, -1 / times)
            self.arrived[lane] = self.add("gathers before the blocks", row.row())
        return self.held(self.again(place), done)

    # -- layers --

    def node(self, v: int, done: Sum, lane: int | None = None) -> Sum:
        """Node v goes back after what is `done`; gives what is done then, the gradients that it sends back included.

        Args:
            lane: the one that this is the time of; None: of all.
        """
        own, counted = self.parts.nodes[v], counted_on(self.parts, v, lane)
        places = [(place, end) for place, end in enumerate(self.ends) if lane is None or place == lane]
        done.node(v, counted * (own.backward_s + own.pass_backward_s))
        if self.by_device or own.sum_s.any():
            before = self.add(f"backward of {v}", done.row())
            done = Sum(maxima={before: 1.0})
            for place, end in places:
                used = own.lanes[place]
                rows = []
                if self.by_device and used.any():
                    busy = self.busy[place]
                    busy.node(v, used * (own.backward_s + own.pass_backward_s))
                    if own.sum_s.any() and v not in self.parts.times:
                        here = self.add(f"{OWN} of {v}", busy.row())
                        self.busy[place] = Sum(maxima={here: 1.0})
                        rows.append(Row({v: used * own.sum_s}, maxima={here: 1.0}))
                starts = ((before, used == 1),) if v not in self.parts.times else ()
                for earlier, counts in (*starts, (end, 1.0)):
                    if earlier is not None and (used.any() or earlier == end):
                        row = Sum(maxima={earlier: 1.0})
                        row.node(v, used * own.sum_s - self.far_s * (1.0 - counts))
                        rows.append(row.row())
                if rows and (used.any() or self.by_device):
                    self.ends[place] = self.add(f"gradient sums of {v}", *rows)
        for e in self.into[v]:
            edge = self.parts.edges[e]
            done.edge(e, held_on(self.parts, e, lane) * edge.once[1])
            for moved in (edge.within, edge.inwards):
                if moved is not None:
                    done.edge(e, moved[1])
        # A device updates when it has sent these, too.
        if self.by_device and done.edges and v not in self.parts.times:
            for place, _ in places:
                for e, edge in ((e, self.parts.edges[e]) for e in self.into[v]):
                    self.busy[place].edge(e, self.parts.nodes[edge.target].lanes[place] * edge.once[1])
                if (end := self.ends[place]) is not None and own.lanes[place].any():
                    row = done.copy()
                    row.node(v, -self.far_s * (own.lanes[place] < 1))
                    self.ends[place] = self.add(f"gradients of {v} are back", Sum(maxima={end: 1.0}).row(), row.row())
        return done
