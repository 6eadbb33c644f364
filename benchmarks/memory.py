"""Predicted peak memory per device against the peak of a real training step, on CPU processes.

    python -m benchmarks.memory [--json FILE] [--only WORD]

One device is one process, two are gloo processes, each of which is a device of its own. Allocations do not depend on
the machine's load, so each case runs once: a fresh model takes two steps (the second one meets what the first one
leaves: optimizer state, kept buffers), and the profiler adds up what torch's allocator gave out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.memory_networks import NETWORKS, Network
from parplan.cost_models.memory.layer_memory import MemoryModel
from parplan.cost_models.memory.plan_peaks import memory_over_step
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.graph.repeated import unit_of
from parplan.graph.resized import at_batch
from parplan.lowering.lower import lower
from parplan.lowering.step_setting import StepSetting
from parplan.plan import STATES, Plan, Strategy
from parplan.runtime.measurement.peak_memory import step_peak
from parplan.runtime.module.compiled import Compiled

__all__ = ["OPTIMIZERS", "PLANS", "Case", "Figures", "Peaks", "measure", "peaks"]

Rule = Callable[[LayerGraph, Layer, int], Strategy]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def data_parallel(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Samples spread over all devices where a layer has samples."""
    if layer.batch is None and not layer.constant:
        return Strategy()
    return Strategy(devices, 1, None, tuple(range(devices)))


def sharded(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Every layer cut along its first axis that can be, else replicated."""
    axis = next((axis for axis in layer.axes if axis.units % devices == 0), None)
    return Strategy(1, devices, axis.name, tuple(range(devices))) if axis else data_parallel(graph, layer, devices)


def hybrid(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
    """Samples spread up to the first fully-connected layer, that and later ones cut."""
    names = list(graph.layers)
    first = next((names.index(n) for n, known in graph.layers.items() if known.kind == "linear"), len(names))
    rule = data_parallel if names.index(layer.name) < first else sharded
    return rule(graph, layer, devices)


def in_slices(state: str) -> Rule:
    """Data parallel with state in slices."""
    return lambda graph, layer, devices: replace(data_parallel(graph, layer, devices), state=state)


def replayed(state: str) -> Rule:
    """Data parallel with every unit replayed."""

    def rule(graph: LayerGraph, layer: Layer, devices: int) -> Strategy:
        saved = "replay" if layer.name in unit_of(graph) else "keep"
        return replace(in_slices(state)(graph, layer, devices), saved=saved)

    return rule


MICRO_BATCHES = 4

SLICES: dict[str, Rule] = {f"{state} state": in_slices(state) for state in STATES[1:]}

REPLAYED: dict[str, Rule] = {
    "replayed": replayed("replicated"), "gathered state, replayed": replayed("gathered"),
}  # fmt: skip

PLANS: dict[str, Rule] = {"data-parallel": data_parallel, "sharded": sharded, "hybrid": hybrid}

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.01),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(net.parameters()),
}


@dataclass(frozen=True)
class Case:
    """One comparison; `devices` processes, each a device; `autocast`: forwards compute in bf16."""

    network: Network
    plan: str
    optimizer: str
    devices: int
    micro_batches: int = 1
    autocast: bool = False

    @property
    def words(self) -> str:
        """The plan, and how it is computed."""
        return f"{self.plan}, autocast" if self.autocast else self.plan


@dataclass(frozen=True)
class Figures:
    """Peak bytes on one device."""

    network: str
    plan: str
    optimizer: str
    devices: int
    device: int
    predicted_bytes: int
    measured_bytes: int
    micro_batches: int = 1

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_bytes / self.measured_bytes


def cases(devices: int, only: str = "") -> list[Case]:
    """Every network: with each optimizer on one device, with each plan on more, and with Adam in micro-batches; those
    whose words contain `only`."""
    kinds = [("one device", name) for name in OPTIMIZERS] if devices == 1 else list(zip(PLANS, OPTIMIZERS, strict=True))
    every = [Case(net, plan, optimizer, devices) for net in NETWORKS for plan, optimizer in kinds]
    every += [Case(net, plan, "adam", devices) for net in NETWORKS for plan in SLICES if devices > 1]
    again = list(REPLAYED)[: min(devices, 2)]
    every += [Case(net, plan, "adam", devices) for net in NETWORKS for plan in again]
    plans = ["one device"] if devices == 1 else [*PLANS, *SLICES]
    normed = {net.name for net in NETWORKS if any(isinstance(m, nn.BatchNorm2d) for m in net.build().modules())}
    every += [
        Case(net, plan, "adam", devices, MICRO_BATCHES) for net in NETWORKS if net.name not in normed for plan in plans
    ]
    recurrent = {net.name for net in NETWORKS if any(isinstance(m, nn.LSTM) for m in net.build().modules())}
    every += [  # the CPU has no LSTM in bf16
        Case(net, plan, "adam", devices, autocast=True)
        for net in NETWORKS
        if net.name not in recurrent
        for plan in plans
    ]
    return [
        case
        for case in every
        if only in f"{case.network.name} {case.words} {case.optimizer} {case.micro_batches} parts"
    ]


@dataclass(frozen=True)
class Peaks:
    """What one process knows: its own peak, and on the process that made the plan what is predicted for each device."""

    predicted_bytes: tuple[int, ...]
    measured_bytes: int


def peaks(case: Case) -> Peaks:
    """Predict, on the first process, and measure on this one."""
    torch.manual_seed(0)
    net = case.network.build()
    inputs, targets = case.network.batch(case.network.samples // case.devices)
    predicted: list[int] = []

    def planner(graph: LayerGraph) -> Plan:
        rule = {**PLANS, **SLICES, **REPLAYED}.get(case.plan, data_parallel)
        chosen = {name: rule(graph, layer, case.devices) for name, layer in graph.layers.items()}
        small = at_batch(graph, (graph.batch or 1) // case.micro_batches)
        program = lower(small, chosen, StepSetting.per_process(case.devices, small.batch or 1))
        model = MemoryModel(small, case.optimizer, on_cpu=True, micro_batches=case.micro_batches)
        predicted.extend(memory_over_step(model, program).max(axis=0).tolist())
        batch, several = graph.batch or 1, case.micro_batches
        return Plan(graph.model, graph.fingerprint, batch, case.devices, chosen, micro_batches=several)

    compiled = Compiled(net, planner, check="off")
    casting = partial(torch.autocast, "cpu", torch.bfloat16, enabled=case.autocast)
    with casting():
        compiled.prepare(inputs)
    assert compiled._latest is not None  # what was captured
    compiled._latest.mean_loss = True  # so that the first step need not compare the loss of two micro-batches
    with torch.no_grad(), casting():
        compiled(inputs)
    optimizer = OPTIMIZERS[case.optimizer](net)

    def go_back() -> None:
        with casting():
            results = compiled(inputs)  # held, as most training loops do
        cross_entropy(results.float(), targets).backward()

    def step() -> None:
        for _ in range(2):
            if case.micro_batches > 1:
                compiled.train_step(inputs, targets, cross_entropy, optimizer)
                optimizer.zero_grad(set_to_none=True)
                continue
            go_back()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    found = step_peak(step, [*net.parameters(), *net.buffers(), inputs, targets])
    return Peaks(tuple(predicted), found.peak_bytes)


def _worker(rank: int, devices: int, only: str, folder: str) -> None:
    torch.set_num_threads(1)
    if devices > 1:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=devices)
    found = [asdict(peaks(case)) for case in cases(devices, only)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if devices > 1:
        dist.destroy_process_group()


def measure(devices: int, only: str = "") -> list[Figures]:
    """All cases on `devices` processes, every process's figures."""
    with tempfile.TemporaryDirectory() as folder:
        given = (devices, only, folder)
        mp.spawn(_worker, given, devices)  # type: ignore[attr-defined,no-untyped-call]
        texts = [Path(folder, f"{rank}.json").read_text(encoding="utf-8") for rank in range(devices)]
    ranks = [[Peaks(**entry) for entry in json.loads(text)] for text in texts]
    return [
        figures
        for case, known in zip(cases(devices, only), zip(*ranks, strict=True), strict=True)
        for figures in _figures(case, known)
    ]


def _figures(case: Case, known: Sequence[Peaks]) -> list[Figures]:
    words, predicted = (case.network.name, case.words, case.optimizer, case.devices), known[0].predicted_bytes
    return [
        Figures(*words, device, predicted[device], own.measured_bytes, case.micro_batches)
        for device, own in enumerate(known)
    ]


HEAD = (
    f"{'network':20} {'plan':25} {'parts':>5} {'optimizer':9} {'device':>6} {'predicted':>12} {'measured':>12} "
    f"{'ratio':>6}"
)


def _line(figures: Figures) -> str:
    return (
        f"{figures.network:20} {figures.plan:25} {figures.micro_batches:5} {figures.optimizer:9} {figures.device:6} "
        f"{figures.predicted_bytes / 2**20:8.2f} MiB "
        f"{figures.measured_bytes / 2**20:8.2f} MiB {figures.ratio:6.3f}"
    )


def summary(found: Sequence[Figures], what: str) -> str:
    """Median and worst error in one line."""
    errors = sorted(abs(figures.ratio - 1) for figures in found)
    worst = max(found, key=lambda figures: abs(figures.ratio - 1))
    within = sum(error <= 0.05 for error in errors) / len(errors)
    return (
        f"{what}: {len(found)} peaks, median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%} "
        f"({worst.network}, {worst.plan}, {worst.optimizer}), {within:.0%} within 5 %"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="cases whose network, plan and optimizer contain this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    print(HEAD)
    found = {devices: measure(devices, args.only) for devices in args.devices if cases(devices, args.only)}
    for figures in found.values():
        print(*map(_line, figures), sep="\n")
    for devices, figures in found.items():
        print(summary(figures, f"{devices} process{'es' if devices > 1 else ''}"))
    if args.json:
        rows = [asdict(figures) | {"ratio": figures.ratio} for group in found.values() for figures in group]
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
