"""Ops of a captured graph that stand for Python code of the user's, and what is known of that code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import fx

__all__ = ["CodeSite", "Treatment", "is_repeatable", "set_site", "site_of", "why_whole"]


@dataclass
class Treatment:
    """How code of the user's treats samples, random numbers and gradients.

    Attributes:
        whole: why all samples have to go through it at once; empty where they stay apart.
        linear: whether the gradients it gives are linear in those it is given, so that terms of a sum may go through
            it one by one.
        random: whether it draws random numbers.
    """

    whole: str = "its code was not traced"
    linear: bool = False
    random: bool = True


class CodeSite(Protocol):
    """A place in a forward where the user's own code runs."""

    @property
    def name(self) -> str:
        """The code's name."""

    @property
    def followed(self) -> Treatment:
        """How it treats samples, as far as it could be followed."""


def site_of(node: fx.Node) -> CodeSite | None:
    """The code that an op stands for; None for a plain op."""
    site: CodeSite | None = node.meta.get("parplan_site")
    return site


def set_site(node: fx.Node, site: CodeSite) -> None:
    """Say what an op stands for."""
    node.meta["parplan_site"] = site


def why_whole(nodes: Iterable[fx.Node]) -> str:
    """The first reason of an op in `nodes` to see all samples at once; empty without one."""
    return next((why for node in nodes if (site := site_of(node)) is not None and (why := site.followed.whole)), "")


def is_repeatable(nodes: Iterable[fx.Node]) -> bool:
    """Whether several devices may run these ops redundantly, as far as the user's code goes."""
    # Each goes back with its own term of the gradient.
    code = [site.followed for node in nodes if (site := site_of(node)) is not None]
    return all(one.linear and not one.random for one in code)
