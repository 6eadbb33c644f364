"""Elements and messages of transfers, added up by device: what the pieces of changes of layout amount to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from parplan.layout import IntArray

__all__ = ["Amounts", "Ends", "Flow", "Flows"]

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
    """What goes from device to device in several transfers; figures are by their receivers and senders."""

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
        """The pieces between devices of one domain, which begins at every multiple of `size`; None: all pieces."""

    @cached_property
    def everything(self) -> Flow:
        """All pieces, also those with which devices serve themselves."""
        return self.within(None)

    @cached_property
    def own(self) -> Flow:
        """The pieces with which devices serve themselves."""
        return self.within(1)

    @cached_property
    def foreign(self) -> Flow:
        """The pieces that really move."""
        return self.everything - self.own
