"""How long bytes take over the levels of a cluster: traffic through a tree, and rings.

A cluster's levels form a tree: what crosses an outer level passes the inner ones on its way. A level's bandwidth is
what one device gets when it alone talks; in a mesh, a pair gets the share `pair` of it. When all devices of a domain
(those under one switch of the next inner level) talk across the level at once, each gets `contention` of it: so a
domain's way out carries size x contention x bandwidth at most, shared by whoever talks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from parplan.cluster import Cluster, Link
from parplan.cost_models.communication.flows import Flows
from parplan.layout import IntArray

__all__ = ["Linear", "Topology"]


@dataclass(frozen=True)
class Linear:
    """A time that is linear in bytes: `latency_s + nbytes * s_per_byte`."""

    latency_s: float = 0.0
    s_per_byte: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """The time for `nbytes`; nothing to send takes no time."""
        return self.latency_s + nbytes * self.s_per_byte if nbytes > 0 else 0.0


@dataclass(frozen=True)
class Level:
    """One level as traffic sees it: its link and how many devices share the way out of a domain."""

    link: Link
    domain: int

    @property
    def uplink_bytes_per_s(self) -> float:
        """What all devices of a domain get together."""
        return self.domain * self.link.contention * self.link.bandwidth_bytes_per_s


class Topology:
    """A cluster's levels, asked for times.

    Args:
        cluster: the devices and links.
    """

    def __init__(self, cluster: Cluster) -> None:
        sizes = (1, *(link.size for link in cluster.links))
        self.levels = tuple(Level(link, size) for link, size in zip(cluster.links, sizes, strict=False))

    def traffic(self, flows: Flows, totals: Sequence[int]) -> list[Linear]:
        """Times by tensor of several transfers, of tensors of so many elements, each of what moves in it, all at once.

        A device sends nothing to itself. Its messages go one after another, each with the latency of its level; at
        every level the busiest device and the busiest way out of a domain set the pace, in and out counted apart.
        """
        total, latency_s, slowest = np.array(totals), np.zeros(len(totals)), np.zeros(len(totals))
        inner = 1
        for level in self.levels:
            link, uplink = level.link, np.maximum(*flows.elements(inner, None, level.domain))
            if not uplink.any():
                break
            outer = link.size if link.size <= flows.last else None
            latency_s += flows.messages(inner, outer) * link.latency_s
            slowest = np.maximum(slowest, uplink / total / level.uplink_bytes_per_s)
            if link.pair < 1:  # each message has wires of its own
                rate = link.pair * link.bandwidth_bytes_per_s
                slowest = np.maximum(slowest, flows.message(inner, outer) / total / rate)
            if level.domain > 1:  # else the device is the domain
                busiest = np.maximum(*flows.elements(inner, None))
                slowest = np.maximum(slowest, busiest / total / link.bandwidth_bytes_per_s)
            if outer is None:
                break
            inner = outer
        return [Linear(*one) for one in zip(latency_s.tolist(), slowest.tolist(), strict=True)]

    def all_reduce(self, groups: Sequence[Sequence[int]]) -> Linear:
        """Time per byte of one device's tensor when all disjoint `groups` of devices sum theirs at once, in rings.

        A ring moves 2(n-1)/n of the tensor over every hop in 2(n-1) steps. Over several hosts, rings run in
        parallel, one for each device of the host, so a group gets its members' share of the way out.
        """
        found = [self._ring(np.array(group), len(groups)) for group in groups if len(group) > 1]
        return max(found, key=lambda time: time.s_per_byte, default=Linear())

    def _ring(self, group: IntArray, rings: int) -> Linear:
        n = len(group)
        latency_s, rate = 0.0, float("inf")
        for level in self.levels:
            members = np.unique(group // level.domain, return_counts=True)[1]
            domains, joined = len(members), len(np.unique(group // level.link.size))
            if domains > 1:
                crossing = rings if level.domain > 1 else 1
                if level.link.measured:  # of as many hosts, or the nearest number; rings that cross share what one gets
                    nearest = min(level.link.measured, key=lambda own: abs(log(own.hosts / domains)))
                    every_s, bandwidth = nearest.line(nearest.hosts * level.domain)
                    latency_s += every_s
                    rate = min(rate, bandwidth / crossing)
                    continue
                fewest = int(members.min())
                share = min(fewest * level.link.bandwidth_bytes_per_s, level.uplink_bytes_per_s / crossing)
                if joined == 1 and level.domain == 1:  # in one mesh: as many parallel rings as a device has neighbours
                    share = min(share, (n - 1) * level.link.pair * level.link.bandwidth_bytes_per_s)
                rate = min(rate, share)
                latency_s += 2 * (domains - joined) * level.link.latency_s
        return Linear(latency_s, 2 * (n - 1) / n / rate)
