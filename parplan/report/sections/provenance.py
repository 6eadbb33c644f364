"""Where the figures come from: one sentence when all have one source, a legend when there are several."""

from __future__ import annotations

from collections.abc import Mapping

from parplan.cluster import Cluster, Device
from parplan.cost_models.costs import Source
from parplan.cost_models.devices.presets import device_names
from parplan.planner.decision import Decision
from parplan.report.page import Page
from parplan.report.sections.layer_table import SHORT, sources

__all__ = ["print_origin"]


def print_origin(page: Page, decision: Decision, mixed: bool) -> None:
    """Print the sources of the layers' times (`mixed`: some lines have several), then what the transfers rest on."""
    page.blank()
    found, cluster = sources(decision.layers), decision.cluster
    if len(found) == 1:
        page.paragraph(_sentence(decision, found[0]), style="dim")
    elif found:
        plus = " (+: the least certain of several on one line)" if mixed else ""
        page.paragraph(f"Sources of forward and backward times{plus}:", style="dim")
        for source in found:
            page.paragraph(f"{SHORT[source]:<11}{_words(decision, source)}", 2, "dim")
    if cluster.count > 1:
        measured = decision.links is Source.MEASURED
        page.paragraph("Transfers and reductions were measured here." if measured else _links(cluster), style="dim")
    if doubts := _doubts(decision):
        page.paragraph(doubts, style="dim")


def _sentence(decision: Decision, source: Source) -> str:
    if decision.times_from:
        return f"Times of layers: {_from_file(decision.times_from)[source]}."
    return _sentences(decision.cluster)[source]


def _words(decision: Decision, source: Source) -> str:
    return (_from_file(decision.times_from) if decision.times_from else _legend(decision.cluster))[source]


def _from_file(file: str) -> Mapping[Source, str]:
    """What the sources mean where a file gives the times, measured elsewhere."""
    return {
        Source.MEASURED: "measured here",
        Source.SHIPPED: f"measured elsewhere, as {file} gives them",
        Source.INTERPOLATED: f"interpolated between batches in {file}",
        Source.ESTIMATED: f"scaled from {file}, by samples and shards",
    }


def _kinds(cluster: Cluster) -> str:
    return " and ".join(group.device.kind for group in cluster.groups)


def _roofline(cluster: Cluster) -> str:
    """What the roofline rests on: presets as they are, or numbers that were given."""
    preset = all(_is_preset(group.device) for group in cluster.groups)
    if not preset:
        return f"roofline on the figures of {_kinds(cluster)}"
    return f"roofline on the preset{'s' if cluster.mixed else ''} {_kinds(cluster)}"


def _is_preset(device: Device) -> bool:
    """Whether its rates are those of a preset, as far as is known."""
    return device.kind in device_names() and device.like is None


def _sentences(cluster: Cluster) -> Mapping[Source, str]:
    kind = _kinds(cluster)
    return {
        Source.MEASURED: "Times of layers were measured here.",
        Source.SHIPPED: f"Times of layers come from a shipped profile, measured elsewhere on {kind}.",
        Source.INTERPOLATED: "Times of layers are interpolated between measured neighbours.",
        Source.ESTIMATED: f"All times are estimates ({_roofline(cluster)}); `--measure` measures them.",
    }


def _legend(cluster: Cluster) -> Mapping[Source, str]:
    kind = _kinds(cluster)
    return {
        Source.MEASURED: "measured here",
        Source.SHIPPED: f"shipped profile, measured elsewhere on {kind}",
        Source.INTERPOLATED: "interpolated between measured neighbours",
        Source.ESTIMATED: f"{_roofline(cluster)}; `--measure` measures it",
    }


def _links(cluster: Cluster) -> str:
    rates = ", ".join(f"{link.name} at {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s" for link in cluster.links)
    return f"Transfers and reductions are computed from the links: {rates}."


def _doubts(decision: Decision) -> str:
    """Which devices and links have unverified figures that something here rests on."""
    cluster = decision.cluster
    layers = {facts.source for facts in decision.layers}
    parts = [(group.device.kind, group.device.estimated and Source.ESTIMATED in layers) for group in cluster.groups]
    if cluster.count > 1 and decision.links is not Source.MEASURED:
        parts += [(link.name, link.estimated) for link in cluster.links]
    names = [name for name, estimated in parts if estimated]
    return f"Some figures of {' and '.join(names)} are unverified." if names else ""
