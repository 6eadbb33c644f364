"""Sources of the figures: one sentence when all have one source, a legend when there are several."""

from __future__ import annotations

from collections.abc import Mapping

from parplan.cost_models.costs import Source
from parplan.cost_models.devices.presets import device_names
from parplan.planner.decision import Decision
from parplan.report.page import Page
from parplan.report.sections.layer_table import SHORT, sources

__all__ = ["print_origin"]


def print_origin(page: Page, decision: Decision, mixed: bool) -> None:
    """Print the sources of the layers' times (`mixed`: some lines have several), then those of the transfers."""
    page.blank()
    found, cluster, words = sources(decision.layers), decision.cluster, _words(decision)
    if len(found) == 1:
        sentence, _ = words[found[0]]
        page.paragraph(sentence, style="dim")
    elif found:
        plus = " (+: the least certain of several on one line)" if mixed else ""
        page.paragraph(f"Sources of forward and backward times{plus}:", style="dim")
        for source in found:
            _, listed = words[source]
            page.paragraph(f"{SHORT[source]:<11}{listed}", 2, "dim")
    if cluster.count > 1:
        rates = ", ".join(f"{link.name} at {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s" for link in cluster.links)
        computed = f"Transfers and reductions are computed from the links: {rates}."
        measured = decision.links is Source.MEASURED
        page.paragraph("Transfers and reductions were measured here." if measured else computed, style="dim")
    # Devices and links with unverified figures that something here rests on.
    estimated = Source.ESTIMATED in found
    doubtful = [group.device.kind for group in cluster.groups if group.device.estimated and estimated]
    if cluster.count > 1 and decision.links is not Source.MEASURED:
        doubtful += [link.name for link in cluster.links if link.estimated]
    if doubtful:
        page.paragraph(
            f"Some figures of {' and '.join(doubtful)} are not verified: `parplan presets` has their sources.",
            style="dim",
        )


def _words(decision: Decision) -> Mapping[Source, tuple[str, str]]:
    """Of every source: the sentence where all times have it, and its words in a list of several."""
    if file := decision.times_from:  # which gives the times, measured elsewhere
        texts = {
            Source.MEASURED: "measured here",
            Source.SHIPPED: f"measured elsewhere, as {file} gives them",
            Source.INTERPOLATED: f"interpolated between batches in {file}",
            Source.ESTIMATED: f"scaled from {file}, by samples and shards",
        }
        return {source: (f"Times of layers: {text}.", text) for source, text in texts.items()}
    cluster = decision.cluster
    kinds = " and ".join(group.device.kind for group in cluster.groups)
    devices = [group.device for group in cluster.groups]
    # Rates are those of a preset, as far as is known, or were given.
    presets = all(device.kind in device_names() and device.like is None for device in devices)
    figures = f"preset{'s' if cluster.mixed else ''}" if presets else "figures of"
    return {
        Source.MEASURED: ("Times of layers were measured here.", "measured here"),
        Source.SHIPPED: (
            f"Times of layers come from a shipped profile, measured elsewhere on {kinds}.",
            f"shipped profile, measured elsewhere on {kinds}",
        ),
        Source.INTERPOLATED: (
            "Times of layers are interpolated between measured neighbours.",
            "interpolated between measured neighbours",
        ),
        Source.ESTIMATED: (
            f"All times are estimates (roofline on the {figures} {kinds}); `--measure` measures them.",
            f"roofline on the {figures} {kinds}; `--measure` measures it",
        ),
    }
