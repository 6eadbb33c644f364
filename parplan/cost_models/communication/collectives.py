"""How long bytes take over the levels of a cluster: traffic through a tree, and rings.

A cluster's levels form a tree: what crosses an outer level passes the inner ones on its way. A level's bandwidth is
what one device gets when only one pair talks. When all devices of a domain (those under one switch of the next inner
level) talk across the level at once, each gets `contention` of it: so a domain's way out carries
size x contention x bandwidth at most, shared by whoever talks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parplan.cluster import Cluster, Link

__all__ = ["Linear", "Topology"]

FloatArray = NDArray[np.float64]


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

    def traffic(self, sent: FloatArray, senders: Sequence[int], receivers: Sequence[int]) -> Linear:
        """Time per unit when `senders[j]` gives `receivers[i]` a number `sent[i, j]` of units, all at once.

        A device sends nothing to itself. Its messages go one after another, each with the latency of its level; at
        every level the busiest device and the busiest way out of a domain set the pace, in and out counted apart.
        """
        latency_s, slowest = 0.0, 0.0
        give, take = np.array(senders), np.array(receivers)
        for level in self.levels:
            size, link = level.link.size, level.link
            out_of, into = give // level.domain, take // level.domain
            messages = (sent > 0) & (take[:, None] // size == give // size)
            latency_s += max(messages.sum(axis=1).max(), messages.sum(axis=0).max()) * link.latency_s
            slowest = max(slowest, _busiest(sent, into, out_of) / level.uplink_bytes_per_s)
            if level.domain > 1:  # else the device is the domain
                slowest = max(slowest, _busiest(sent, take, give) / link.bandwidth_bytes_per_s)
            sent = np.where(messages, 0.0, sent)
            if not sent.any():
                break
        return Linear(float(latency_s), float(slowest))

    def all_reduce(self, groups: Sequence[Sequence[int]]) -> Linear:
        """Time per byte of one device's tensor when all disjoint `groups` of devices sum theirs at once, in rings.

        A ring moves 2(n-1)/n of the tensor over every hop in 2(n-1) steps. Over several hosts, rings run in
        parallel, one for each device of the host, so a group gets its members' share of the way out.
        """
        return max(
            (self._ring(group, len(groups)) for group in groups), key=lambda time: time.s_per_byte, default=Linear()
        )

    def _ring(self, group: Sequence[int], rings: int) -> Linear:
        n = len(group)
        if n < 2:
            return Linear()
        latency_s, rate = 0.0, float("inf")
        for level in self.levels:
            inside = [device // level.domain for device in group]
            domains, joined = len(set(inside)), len({device // level.link.size for device in group})
            if domains > 1:
                members = min(inside.count(domain) for domain in set(inside))
                crossing = rings if level.domain > 1 else 1
                share = min(members * level.link.bandwidth_bytes_per_s, level.uplink_bytes_per_s / crossing)
                rate = min(rate, share)
                latency_s += 2 * (domains - joined) * level.link.latency_s
        return Linear(latency_s, 2 * (n - 1) / n / rate)


def _busiest(amounts: FloatArray, takers: NDArray[np.int_], givers: NDArray[np.int_]) -> float:
    """The most that any taker gets or any giver gives; equal entries of `takers` (`givers`) are one party."""
    taken = np.bincount(takers, weights=amounts.sum(axis=1))
    given = np.bincount(givers, weights=amounts.sum(axis=0))
    return float(max(taken.max(), given.max()))
