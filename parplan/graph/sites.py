"""Ops of a captured graph that stand for Python code of the user's, and what is known of that code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import fx

__all__ = ["CodeSite", "is_repeatable", "set_site", "site_of", "why_whole"]


class CodeSite(Protocol):
    """A place in a forward where the user's own code runs."""

    @property
    def name(self) -> str:
        """The code's name."""

    @property
    def whole(self) -> str:
        """Why it has to see all samples at once; empty where samples stay apart."""

    @property
    def repeatable(self) -> bool:
        """Whether several devices may do the same, each going back with its own term of the gradient."""

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""


def site_of(node: fx.Node) -> CodeSite | None:
    """The code that an op stands for; None for a plain op."""
    site: CodeSite | None = node.meta.get("parplan_site")
    return site


def set_site(node: fx.Node, site: CodeSite) -> None:
    """Say what an op stands for."""
    node.meta["parplan_site"] = site


def why_whole(nodes: Iterable[fx.Node]) -> str:
    """The first reason of an op in `nodes` to see all samples at once; empty without one."""
    return next((site.whole for node in nodes if (site := site_of(node)) is not None and site.whole), "")


def is_repeatable(nodes: Iterable[fx.Node]) -> bool:
    """Whether several devices may run these ops redundantly, as far as the user's code goes."""
    return all(site.repeatable for node in nodes if (site := site_of(node)) is not None)
