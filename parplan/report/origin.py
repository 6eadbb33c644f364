"""Where the figures come from: one sentence when all have one source, a legend when there are several."""

from __future__ import annotations

from collections.abc import Mapping

from parplan.cluster import Cluster
from parplan.cost_models.costs import Source
from parplan.planner.decision import Decision
from parplan.report.layer_table import SHORT, sources
from parplan.report.page import Page

__all__ = ["print_origin"]


def print_origin(page: Page, decision: Decision, mixed: bool) -> None:
    """Print the sources of the layers' times (`mixed`: some lines have several), then what the transfers rest on."""
    page.blank()
    found, cluster = sources(decision.layers), decision.cluster
    if len(found) == 1:
        page.paragraph(_sentences(cluster)[found[0]], style="dim")
    elif found:
        plus = " (+: the least certain of several on one line)" if mixed else ""
        page.paragraph(f"Sources of forward and backward times{plus}:", style="dim")
        for source in found:
            page.paragraph(f"{SHORT[source]:<11}{_legend(cluster)[source]}", 2, "dim")
    if cluster.count > 1:
        page.paragraph(_links(cluster), style="dim")
    if doubts := _doubts(cluster):
        page.paragraph(doubts, style="dim")


def _sentences(cluster: Cluster) -> Mapping[Source, str]:
    kind = cluster.device.kind
    return {
        Source.MEASURED: "Times of layers were measured here.",
        Source.SHIPPED: f"Times of layers come from a shipped profile, measured elsewhere on {kind}.",
        Source.INTERPOLATED: "Times of layers are interpolated between measured neighbours.",
        Source.ESTIMATED: f"All times are estimates (roofline on the preset {kind}); `--measure` measures them.",
    }


def _legend(cluster: Cluster) -> Mapping[Source, str]:
    kind = cluster.device.kind
    return {
        Source.MEASURED: "measured here",
        Source.SHIPPED: f"shipped profile, measured elsewhere on {kind}",
        Source.INTERPOLATED: "interpolated between measured neighbours",
        Source.ESTIMATED: f"roofline on the preset {kind}; `--measure` measures it",
    }


def _links(cluster: Cluster) -> str:
    rates = ", ".join(f"{link.name} at {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s" for link in cluster.links)
    return f"Transfers and reductions are computed from the links: {rates}."


def _doubts(cluster: Cluster) -> str:
    parts = [(cluster.device.kind, cluster.device.estimated)]
    parts += [(link.name, link.estimated) for link in cluster.links] if cluster.count > 1 else []
    names = [name for name, estimated in parts if estimated]
    return f"Some figures of {' and '.join(names)} are unverified." if names else ""
