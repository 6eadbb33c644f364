"""Gather, broadcast and interleave on logical devices of one process: the step, and what transfers hold up.

    python -m benchmarks.schemes [--devices 4] [--json FILE]

AlexNet with convolutions in replicas and fully-connected layers in shards, once per scheme; the compiled models take
turns in one process, so that every round gives one ratio to gather. What a transfer holds up is what `measure` finds
waited for where a value is first read (on CUDA by events: compute streams that had nothing to do). Logical devices
share the GPU that is there, or the CPU; there copies are not asynchronous, and nothing can be hidden.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from benchmarks.ddp import hybrid
from examples.alexnet import AlexNet, Sizes
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Scheme
from parplan.runtime.module.compiled import Compiled

CLASSES = 1000


@dataclass(frozen=True)
class Figures:
    """Medians over rounds: of the step, of the share of it that waits for transfers, and of its ratio to gather's."""

    scheme: str
    device: str
    devices: int
    samples_per_device: int
    rounds: int
    step_s: float
    waits_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float

    def line(self) -> str:
        """One row of the printed table."""
        return (
            f"{self.scheme:10} {self.step_s * 1e3:9.1f} {self.waits_s * 1e3:9.2f} {self.ratio:7.3f}  "
            f"{self.ratio_lower_quartile:.3f} to {self.ratio_upper_quartile:.3f}"
        )


HEAD = "scheme       step ms  waits ms   ratio  quartiles"


def planned(graph: LayerGraph, devices: int, scheme: Scheme) -> Plan:
    """cuda-convnet2's hybrid in one of the three schemes."""
    layers = {name: hybrid(layer, devices) for name, layer in graph.layers.items()}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, layers, scheme=scheme)


def compare(args: argparse.Namespace, device: torch.device) -> list[Figures]:
    """Time the three schemes in turns."""
    full = Sizes()
    filters = [size // args.shrink for size in full.filters]
    net = AlexNet(replace(full, filters=tuple(filters), hidden=full.hidden // args.shrink)).to(device)
    count = args.devices * args.samples
    images = torch.randn(count, 3, 224, 224, device=device)
    labels = torch.randint(CLASSES, (count,), device=device)
    places = [device] * args.devices

    def compiled(scheme: Scheme) -> Compiled:
        return Compiled(copy.deepcopy(net), lambda graph: planned(graph, args.devices, scheme), devices=places)

    models = {scheme: compiled(scheme) for scheme in Scheme}
    steps: dict[Scheme, list[float]] = {scheme: [] for scheme in Scheme}
    waits: dict[Scheme, list[float]] = {scheme: [] for scheme in Scheme}
    for turn in range(args.rounds):
        order = list(models) if turn % 2 == 0 else list(reversed(models))
        for scheme in order:
            found = models[scheme].measure(
                images, steps=args.steps, warmup=1, loss_fn=lambda out: cross_entropy(out, labels)
            )
            steps[scheme].append(found.step.seconds)
            waits[scheme].append(sum(t.forward.seconds + t.backward.seconds for t in found.transfers))
    return [_figures(scheme, args, device, steps, waits[scheme]) for scheme in Scheme]


def _figures(
    scheme: Scheme,
    args: argparse.Namespace,
    device: torch.device,
    steps: dict[Scheme, list[float]],
    waits: Sequence[float],
) -> Figures:
    ratios = [own / gather for own, gather in zip(steps[scheme], steps[Scheme.GATHER], strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return Figures(
        scheme=scheme.value,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        devices=args.devices,
        samples_per_device=args.samples,
        rounds=args.rounds,
        step_s=statistics.median(steps[scheme]),
        waits_s=statistics.median(waits),
        ratio=middle,
        ratio_lower_quartile=lower,
        ratio_upper_quartile=upper,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="gather, broadcast and interleave on logical devices")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="per device")
    parser.add_argument("--shrink", type=int, default=1, help="divide filters and units by this, for a quick look")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    found = compare(args, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print("\n".join([HEAD, *(figures.line() for figures in found)]))
    if args.json:
        args.json.write_text(json.dumps([asdict(figures) for figures in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
