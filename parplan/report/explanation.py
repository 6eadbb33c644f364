"""One layer of a saved report: every other strategy with its price, and the rule or the cost that decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich.console import Console

from parplan.errors import ParplanError
from parplan.fields import did_you_mean
from parplan.plan import Strategy
from parplan.report import units
from parplan.report.page import Column, Page, Styled, TableRow

__all__ = ["layer_named", "render_explanation"]


def layer_named(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The layer of a report that has this name, or is the only one whose name ends in it.

    Raises:
        ParplanError: there is no such layer, or there are several.
    """
    layers = {layer["name"]: layer for layer in report["layers"]}
    ends = [known for known in layers if known.endswith(f".{name}")]
    if name not in layers and len(ends) != 1:
        hint = f"several end in it: {', '.join(ends[:4])}" if ends else did_you_mean(name, layers)
        raise ParplanError(f"{name!r} is no layer of {report['model']}; {hint}")
    found: Mapping[str, Any] = layers.get(name) or layers[ends[0]]
    return found


def render_explanation(report: Mapping[str, Any], layer: Mapping[str, Any], console: Console) -> None:
    """Print the layer's strategy, what decided it, its alternatives and the rules that leave others out."""
    page, step_s, name = Page(console), report["predicted"]["step_s"], layer["name"]
    own, devices = _words(layer), units.devices(layer["devices"])
    parameters = units.counted(layer["parameters"], "parameter")
    page.paragraph(f": {layer['kind']}, {parameters}, {own} on {devices}", first=name, first_style="bold")
    fed = [one for one in report["layers"] if one["name"] in layer["inputs"]]
    for one in fed:
        page.paragraph(f"is fed by {one['name']}: {_words(one)} on {units.devices(one['devices'])}", 2, "dim")
    alternatives = layer["alternatives"]
    page.paragraph(_decided(report, layer, step_s))
    parts = ("forward", "backward", "transfer", "reduce")
    times = units.time_column([layer[f"{part}_s"] for part in parts])
    listed = ", ".join(f"{part} {times.text(layer[f'{part}_s'])}" for part in parts)
    memory = units.size(layer["memory_bytes"]).text(layer["memory_bytes"])
    page.paragraph(f"{listed}; {memory} on each of its devices; times {layer['source']}.")
    if alternatives:
        page.section("Alternatives", "how much longer the step takes, all other layers as they are")
        scale = units.step(max(abs(other["total_s"]) for other in alternatives) or step_s)
        rows = [_row(scale, other, step_s) for other in alternatives]
        headings = ("step", "", "compute", "transfer", "gradients")
        page.table([Column(heading) for heading in headings], rows, 40)
        if (together := max(other["layers"] for other in alternatives)) > 1:
            page.paragraph(f"Of {together} layers together, which repeated blocks have in common.", style="dim")
    for title, texts in (("Rules that leave out others", layer["refused"]), ("Bent", report["bends"].get(name, ()))):
        if texts:
            page.section(title)
            for text in texts:
                page.paragraph(text, 2)


def _decided(report: Mapping[str, Any], layer: Mapping[str, Any], step_s: float) -> str:
    """The cost or the rule that decides, in a sentence."""
    pinned = report["pins"]["layers"].get(layer["name"]) if report["pins"] else None
    if pinned:
        return f"Decided by hand: {pinned}."
    fits = [other for other in layer["alternatives"] if other["fits"]]
    if not layer["alternatives"]:
        return f"It has no alternative: {layer['why']}."
    if not fits:
        return "Decided by memory: every other strategy needs more than there is."
    best = fits[0]
    scale = units.time(max(abs(best["total_s"]), 1e-9))
    if best["total_s"] < 0:
        return (
            f"Not decided by this layer's cost: {_words(best)} would take {scale.text(-best['total_s'])} less, "
            "and the plan is another one for its time limit, its tolerance, its passes or its simulated step."
        )
    share = units.percent(best["total_s"] / step_s) if step_s > 0 else "unknown"
    return (
        f"Decided by cost: the best other strategy, {_words(best)}, takes {scale.text(best['total_s'])} more ({share})."
    )


def _row(scale: units.Scale, other: Mapping[str, Any], step_s: float) -> TableRow:
    """Signed differences of the step and of its parts."""

    def signed(value: float) -> str:
        figure = scale.figure(abs(value))
        return figure if figure[0] in "-<u" else f"{'+' if value > 0 else '-'}{figure}"

    parts = [signed(other[f"{part}_s"]) for part in ("compute", "transfer", "exposed")]
    total_s = other["total_s"]
    share = units.percent(abs(total_s) / step_s) if total_s and step_s else ""
    share = f"{'+' if total_s > 0 else '-'}{share}" if share and share[0] != "<" else share
    remark = Styled("" if other["fits"] else "does not fit", "red")
    return TableRow(_words(other), [f"{signed(total_s)} {scale.unit}", share, *parts], [remark])


def _words(layer: Mapping[str, Any]) -> str:
    """The strategy of a layer or an alternative."""
    told = {one.name: layer[one.name] for one in fields(Strategy) if one.name in layer}
    return Strategy(**{**told, "devices": tuple(layer["devices"])}).describe("whole")
