"""Priced decisions without a search, and what tests ask of a page or a drawing."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.decision import Baseline, Decision, PricedGraph, Proof, Seconds
from parplan.predicted_vs_measured import predict_plan

HOSTILE = (
    "</script><img src=x onerror=alert(1)>", "\x1b[31mred\x07", "\u202egnp-exe\u2066", "n" * 10_000, "{{7*7}}",
    '"><svg/onload=alert(2)>', "&lt;b&gt;", "]]>-->", "</style><script>alert(3)</script>", "\ud800", "${alert(4)}",
)  # fmt: skip
VOID = frozenset(["meta", "link", "br", "img", "input", "hr"])
ADDRESS = re.compile(r"https?://|\burl\(|@import|javascript:")
SVG = "{http://www.w3.org/2000/svg}"


class Residual(nn.Module):
    """A convolution block with a connection around it, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.third(torch.relu(self.second(x))) + x)
        y: torch.Tensor = self.fc(x.flatten(1))
        return y


@cache
def residual() -> LayerGraph:
    """`Residual` captured at a batch of 8."""
    return capture(Residual(), (torch.randn(8, 3, 8, 8),))


def data_parallel(graph: LayerGraph, devices: int) -> Plan:
    """Every layer with a replica on each device."""
    everywhere = Strategy(devices, 1, None, tuple(range(devices)))
    layers = {name: everywhere if layer.batch else Strategy() for name, layer in graph.layers.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers)


def priced(graph: LayerGraph, plan: Plan, cluster: Cluster | None = None) -> Decision:
    """A decision on a given plan, with all that pictures need: nothing is searched."""
    cluster = cluster or cluster_preset("v100-sxm2", plan.devices)
    costs = RooflineCosts(graph, cluster)
    found = predict_plan(graph, plan, cluster, costs)
    step = found.step
    return Decision(
        parameters=1234,
        cluster=cluster,
        precision="fp32",
        optimizer="adam",
        plan=plan,
        layers=found.layers,
        prediction=step,
        baselines=(
            Baseline("one device", 3 * step.step_s, 1 << 20, True),
            Baseline("pure data parallel", 1.5 * step.step_s, 1 << 44, False, limit_bytes=1 << 30),
            Baseline("pure model parallel", None, None, False, "R5: 3 does not divide 8"),
        ),
        advice="Use this plan.",
        proof=Proof("FEASIBLE", step.step_s, 0.9 * step.step_s, 0.1, 0.5, covered=("gather",)),
        seconds=Seconds(0.5, 0.1, 0.4, 1.0),
        notes=("A note.",),
        priced=PricedGraph(graph, costs),
    )


@dataclass
class Page(HTMLParser):
    """A page's elements, ids, scripts and texts; `trouble` is what is not well-formed."""

    text: str
    tags: Counter[str] = field(default_factory=Counter)
    ids: Counter[str] = field(default_factory=Counter)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    scripts: list[tuple[dict[str, str | None], str]] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.text)
        self.close()
        self.trouble += [f"<{tag}> is not closed" for tag, _ in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids.update(value for name, value in attrs if name == "id" and value)
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open[-1][0] != tag:
            self.trouble.append(f"</{tag}> in {[name for name, _ in self.open[-3:]]}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ("", {})
        if inside[0] == "script":
            self.scripts.append((inside[1], data))
        elif inside[0] == "style":
            self.styles.append(data)
        else:
            self.words.append(data)

    @property
    def data(self) -> Any:
        """The JSON for the page's script."""
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("type") == "application/json"))

    @property
    def shown(self) -> str:
        """All text that a reader sees."""
        return "".join(self.words)


def svg_of(text: str) -> ElementTree.Element:
    """A drawing's root, after what holds for all: a title and a description that it is labelled by, unique ids."""
    root = ElementTree.fromstring(text)
    named = [root.find(f"{SVG}{tag}") for tag in ("title", "desc")]
    assert [one is not None and bool(one.text) for one in named] == [True, True]
    ids = Counter(element.get("id") for element in root.iter() if element.get("id"))
    assert ids.most_common(1)[0][1] == 1
    assert set((root.get("aria-labelledby") or "").split()) <= set(ids)
    assert not ADDRESS.search(text.replace("http://www.w3.org/2000/svg", ""))
    return root
