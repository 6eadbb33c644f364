"""Elements and messages of transfers, added up by device and by domain: what pieces of changes of layout amount to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from parplan.layout import IntArray

__all__ = ["Amounts", "Ends", "Flow", "Flows", "ListedFlows"]

Amounts = TypeVar("Amounts", IntArray, NDArray[np.float64])


@dataclass(frozen=True, eq=False)
class Flow:
    """Elements and messages that some pieces add up to, by receiver and by sender, shape (devices,) each."""

    received: IntArray
    messages_in: IntArray
    sent: IntArray
    messages_out: IntArray

    @property
    def back(self) -> Flow:
        """The same pieces on their way back."""
        return Flow(self.sent, self.messages_out, self.received, self.messages_in)

    def __sub__(self, other: Flow) -> Flow:
        received, sent = self.received - other.received, self.sent - other.sent
        if self.received is self.messages_in and other.received is other.messages_in:  # pieces of one element
            return Flow(received, received, sent, sent)
        return Flow(received, self.messages_in - other.messages_in, sent, self.messages_out - other.messages_out)


@dataclass(frozen=True, eq=False)
class Ends:
    """The receivers, or the senders, of several transfers: device numbers, and where those of each transfer begin."""

    numbers: IntArray
    begins: IntArray

    def most(self, amounts: Amounts, size: int = 1) -> Amounts:
        """By transfer, the most that any domain of `size` devices has."""
        if size == 1:
            return np.maximum.reduceat(amounts, self.begins)
        domains, counts = self.numbers // size, np.diff(self.begins, append=len(self.numbers))
        domains -= np.repeat(np.minimum.reduceat(domains, self.begins), counts)
        each = np.maximum.reduceat(domains, self.begins) + 1
        begins = np.cumsum(each) - each
        added = np.zeros(int(each.sum()), amounts.dtype)
        np.add.at(added, domains + np.repeat(begins, counts), amounts)
        return np.maximum.reduceat(added, begins)


class Flows(ABC):
    """What goes from device to device in several transfers; figures are of each transfer's busiest.

    Domains begin at every multiple of their size; a piece is between `inner` and `outer` where its ends are in one
    domain of `outer` (None: anywhere), but not of `inner`.
    """

    @property
    @abstractmethod
    def last(self) -> int:
        """The last device of all."""

    @property
    @abstractmethod
    def pieces(self) -> IntArray:
        """Pieces that a receiver gets, its own too."""

    @abstractmethod
    def elements(self, inner: int, outer: int | None, unit: int = 1) -> tuple[IntArray, IntArray]:
        """Elements that any domain of `unit` devices receives, and sends, between `inner` and `outer`."""

    @abstractmethod
    def messages(self, inner: int, outer: int | None) -> IntArray:
        """Messages that a device receives, or sends, between `inner` and `outer`."""

    @abstractmethod
    def message(self, inner: int, outer: int | None) -> NDArray[np.float64]:
        """Elements of each message of a device between `inner` and `outer`, where its messages are of one size."""


class ListedFlows(Flows):
    """Flows by arrays of figures of all their receivers and senders."""

    @property
    @abstractmethod
    def takers(self) -> Ends:
        """The receivers."""

    @property
    @abstractmethod
    def givers(self) -> Ends:
        """The senders."""

    @abstractmethod
    def within(self, size: int | None) -> Flow:
        """The pieces between devices of one domain, which begins at every multiple of `size`; None: all pieces, also
        those with which devices serve themselves."""

    def inside(self, size: int | None) -> Flow:
        """The same, found once."""
        if size not in self._inside:
            self._inside[size] = self.within(size)
        return self._inside[size]

    @cached_property
    def last(self) -> int:
        return int(max(self.givers.numbers.max(), self.takers.numbers.max()))

    @cached_property
    def pieces(self) -> IntArray:
        return self.takers.most(self.inside(None).messages_in)

    @property
    def foreign(self) -> Flow:
        """The pieces that really move."""
        return self._between(1, None)

    def elements(self, inner: int, outer: int | None, unit: int = 1) -> tuple[IntArray, IntArray]:
        flow = self._between(inner, outer)
        return self.takers.most(flow.received, unit), self.givers.most(flow.sent, unit)

    def messages(self, inner: int, outer: int | None) -> IntArray:
        flow = self._between(inner, outer)
        return np.maximum(self.takers.most(flow.messages_in), self.givers.most(flow.messages_out))

    def message(self, inner: int, outer: int | None) -> NDArray[np.float64]:
        flow = self._between(inner, outer)
        received, sent = flow.received / np.maximum(flow.messages_in, 1), flow.sent / np.maximum(flow.messages_out, 1)
        return np.maximum(self.takers.most(received), self.givers.most(sent))

    def _between(self, inner: int, outer: int | None) -> Flow:
        if (inner, outer) not in self._found:
            self._found[inner, outer] = self.inside(outer) - self.inside(inner)
        return self._found[inner, outer]

    @cached_property
    def _inside(self) -> dict[int | None, Flow]:
        """The pieces between devices of one domain, by its size."""
        return {}

    @cached_property
    def _found(self) -> dict[tuple[int, int | None], Flow]:
        """Those between two sizes of domains: several figures are asked of each."""
        return {}
