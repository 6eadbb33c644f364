"""How far predicted step times are from measured ones, and whether the fastest plan is told from the others.

For every network and plan, rounds of profiling and of running steps take turns: the parts of layers that the plan uses
are measured anew in every round, the plan's step time is predicted from them, and then its steps are timed. A round
gives one ratio of predicted to measured time; the median of the rounds' ratios is what counts, so that a machine that
drifts from minute to minute does not hide what the model does. Nothing of the networks' whole steps is used.

Communication between processes (gloo, one thread each), the optimizer and the runtime's own time are measured anew in
every round too. A step is everything: forward, backward from a given
gradient of the outputs, and SGD with momentum. Networks are in prediction_networks.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing as mp

from benchmarks.prediction_networks import NETWORKS, Network
from parplan.cluster import Cluster
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measured import MeasuredCosts, profiled_costs
from parplan.cost_models.measurement.in_context_timing import ProcessGroup
from parplan.cost_models.measurement.measure_parts import measure_parts
from parplan.cost_models.measurement.optimizer_updates import measure_updates
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import StoppingRule
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.decide import predict
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.search_space.verifier import check
from parplan.profiler.communication import SIZES, measure_links
from parplan.profiler.ranks import Ranks
from parplan.profiler.runtime_costs import RuntimeCosts
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import DistributedTransport

CPU = torch.device("cpu")
OPTIMIZER = "momentum"
QUICK = StoppingRule(error=0.03, cap_s=0.06, least_runs=3)
STEPS_S = 0.25  # seconds of steps of each plan in a round

Rule = Callable[[Layer, int, Sequence[Strategy]], Strategy]


def data_parallel(layer: Layer, devices: int, legal: Sequence[Strategy]) -> Strategy:
    """A replica on every device."""
    return _best(legal, replicas=devices)


def sharded(layer: Layer, devices: int, legal: Sequence[Strategy]) -> Strategy:
    """Cut over all devices where it can be, the first way there is; else whole."""
    cut = [s for s in legal if s.shards == devices]
    return cut[0] if cut else _best(legal, replicas=devices)


def hybrid(layer: Layer, devices: int, legal: Sequence[Strategy]) -> Strategy:
    """Fully-connected layers cut, everything else replicated."""
    return sharded(layer, devices, legal) if layer.kind == "linear" else data_parallel(layer, devices, legal)


def one_device(layer: Layer, devices: int, legal: Sequence[Strategy]) -> Strategy:
    """Everything on the first device."""
    return next(s for s in legal if s.devices == (0,))


def _best(legal: Sequence[Strategy], replicas: int) -> Strategy:
    return next((s for s in legal if s.replicas == replicas), next(s for s in legal if s.devices == (0,)))


RULES: dict[str, Rule] = {
    "data parallel": data_parallel, "hybrid": hybrid, "sharded": sharded, "one device": one_device,
}  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """One plan of one network: seconds (medians over rounds) and the median of the rounds' ratios with quartiles."""

    network: str
    plan: str
    devices: int
    predicted_s: float
    measured_s: float
    source: str
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    rounds: int

    def line(self) -> str:
        """One row of the printed table."""
        quartiles = f"{self.ratio_lower_quartile:.3f} to {self.ratio_upper_quartile:.3f}"
        return (
            f"{self.network:<20} {self.plan:<14} {self.devices:>7} {self.predicted_s * 1e3:>10.2f} "
            f"{self.measured_s * 1e3:>9.2f} {self.ratio:>7.3f}  {quartiles}"
        )


HEAD = "network              plan           devices  predicted  measured   ratio  quartiles      (times in ms)"


class Steps:
    """A network that runs by a plan, ready to be timed."""

    def __init__(self, network: Network, plan: Plan, devices: int) -> None:
        torch.manual_seed(0)
        self.model = Compiled(network.build(), lambda graph: plan, devices=[CPU] if devices == 1 else None)
        self.inputs = network.inputs(network.batch // devices)
        self.gradient = torch.ones_like(self.model(self.inputs))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)

    def run(self, steps: int) -> float:
        """Seconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.inputs).backward(self.gradient)
            self.optimizer.step()
        return (time.perf_counter() - start) / steps


@dataclass
class Running:
    """A network with its plans, ready to be timed, and what the rounds found so far."""

    network: Network
    graph: LayerGraph
    plans: dict[str, Plan]
    steps: dict[str, Steps]
    times: dict[str, int]
    predicted: dict[str, list[float]]
    measured: dict[str, list[float]]

    def figures(self, plan: str, devices: int) -> Figures:
        """What the rounds of one plan came to."""
        predicted, measured = self.predicted[plan], self.measured[plan]
        ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
        lower, middle, upper = statistics.quantiles(ratios, n=4)
        both = statistics.median(predicted), statistics.median(measured)
        return Figures(self.network.name, plan, devices, *both, "measured parts", middle, lower, upper, len(ratios))


class Bench:
    """One process of the benchmark."""

    def __init__(self, rank: int, devices: int) -> None:
        self.rank, self.devices = rank, devices
        self.cluster: Cluster = this_cluster(devices, CPU, calibrate=True)
        self.transport = DistributedTransport(CPU) if devices > 1 else None
        self.counts = (1, devices) if devices > 1 else (1,)
        self.ranks: dict[int, ProcessGroup] = {
            count: Ranks(count, CPU) if devices > 1 else ProcessGroup() for count in self.counts
        }
        self.runtime = {
            count: RuntimeCosts(CPU, self.ranks[count], self.transport if count == devices else None)
            for count in self.counts
        }

    def slowest(self, seconds: float) -> float:
        """The slowest process's time."""
        return self.ranks[self.devices].max(seconds)

    def prepare(self, network: Network) -> Running:
        """A network with its plans."""
        torch.manual_seed(0)
        graph = capture(network.build(), (network.inputs(network.batch),))
        plans = self.plans(graph)
        steps = {name: Steps(network, plan, self.devices) for name, plan in plans.items()}
        times = {name: max(1, round(STEPS_S / self.slowest(own.run(2)))) for name, own in steps.items()}
        return Running(network, graph, plans, steps, times, {n: [] for n in plans}, {n: [] for n in plans})

    def plans(self, graph: LayerGraph) -> dict[str, Plan]:
        """Plans by rule, those that are legal and differ."""
        blocks = cluster_blocks(self.cluster, False)
        legal = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
        found: dict[str, Plan] = {}
        for name, rule in RULES.items() if self.devices > 1 else {"one device": one_device}.items():
            chosen = {n: rule(layer, self.devices, legal[n]) for n, layer in graph.layers.items()}
            plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, self.devices, chosen)
            try:
                check(plan, graph)
            except ParplanError:
                continue
            if plan.layers not in [other.layers for other in found.values()]:
                found[name] = plan
        return found

    def everything_else(self) -> dict[int, SessionProfile]:
        """A profile without parts, measured now: communication, updates, the runtime's own time."""
        profiles = {count: SessionProfile() for count in self.counts}
        for count, profile in profiles.items():
            if self.transport is not None and count > 1:
                measure_links(self.transport, self.ranks[count], "gloo", profile, cap_s=0.04, sizes=SIZES[:-1])
            if self.rank < count:
                measure_updates(OPTIMIZER, CPU, profile, self.ranks[count], runs=3)
                self.runtime[count].measure(profile)
            self.together()
        return profiles

    def round(self, running: Running, else_: dict[int, SessionProfile]) -> None:
        """Measure the parts that the plans use, predict the plans' steps, and time them."""
        costs = self.costs(running, else_)
        for name, plan in running.plans.items():
            self.together()
            running.measured[name].append(self.slowest(running.steps[name].run(running.times[name])))
            running.predicted[name].append(predict(running.graph, self.cluster, costs, plan).step_s)

    def costs(self, running: Running, else_: dict[int, SessionProfile]) -> MeasuredCosts:
        """Costs from parts measured now."""
        graph, profiles = running.graph, {count: _copy(profile) for count, profile in else_.items()}
        for count, profile in profiles.items():
            wanted = [
                part_of(graph, graph.layers[name], strategy)
                for plan in running.plans.values()
                for name, strategy in plan.layers.items()
                if len(strategy.devices) == count
            ]
            if self.rank < count:
                roofline = RooflineCosts(graph, self.cluster)
                measure_parts(graph, roofline, wanted, CPU, profile, stop=QUICK, ranks=self.ranks[count])
            self.together()
        if self.devices > 1:  # what only the first process measured, to all
            told = [list(profiles[1].all())]
            dist.broadcast_object_list(told, 0)
            for entry in told[0]:
                profiles[1].put(entry)
        return profiled_costs(graph, self.cluster, profiles, backend="gloo", optimizer=OPTIMIZER)

    def together(self) -> None:
        """Wait for all."""
        if self.devices > 1:
            dist.barrier()


def _copy(profile: SessionProfile) -> SessionProfile:
    twin = SessionProfile()
    for entry in profile.all():
        twin.put(entry)
    for link in profile.links("gloo"):
        twin.put(link)
    return twin


def ranking(found: Sequence[Figures]) -> tuple[float, float]:
    """Of networks with several plans: the share whose predicted best is the best, and the worst regret."""
    by_network: dict[str, list[Figures]] = {}
    for figures in found:
        by_network.setdefault(figures.network, []).append(figures)
    regrets = []
    for plans in by_network.values():
        chosen = min(plans, key=lambda figures: figures.predicted_s)
        regrets.append(chosen.measured_s / min(figures.measured_s for figures in plans) - 1)
    return sum(regret == 0 for regret in regrets) / len(regrets), max(regrets)


def summary(found: Sequence[Figures]) -> str:
    """Median and worst error, overall."""
    errors = [abs(figures.ratio - 1) for figures in found]
    worst = max(found, key=lambda figures: abs(figures.ratio - 1))
    bias = statistics.median(figures.ratio for figures in found) - 1
    text = (
        f"{len(found)} predictions: error {statistics.median(errors):.1%} median, {max(errors):.1%} worst "
        f"({worst.network}, {worst.plan}); bias {bias:+.1%}"
    )
    if len({figures.plan for figures in found}) > 1:
        first, regret = ranking(found)
        text += f"\nfastest plan told right: {first:.0%} of networks; worst regret {regret:.1%}"
    return text


def worker(rank: int, args: argparse.Namespace, devices: int) -> None:
    """One process."""
    torch.set_num_threads(1)
    if devices > 1:
        dist.init_process_group("gloo", f"file://{args.folder}/rendezvous{devices}", rank=rank, world_size=devices)
    bench = Bench(rank, devices)
    running = [bench.prepare(network) for network in NETWORKS if args.only in network.name]
    for _ in range(args.rounds):
        else_ = bench.everything_else()
        for own in running:
            bench.round(own, else_)
    if rank == 0:
        found = [own.figures(plan, devices) for own in running for plan in own.plans]
        for figures in found:
            print(figures.line())
        print(summary(found), flush=True)
        (args.folder / f"{devices}.json").write_text(json.dumps([asdict(figures) for figures in found]))
    if devices > 1:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Run one device, then several processes."""
    import tempfile

    parser = argparse.ArgumentParser(description="predicted against measured step times")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        for devices in args.devices:
            mp.spawn(worker, (args, devices), devices)  # type: ignore[attr-defined,no-untyped-call]
        found = [figures for path in sorted(args.folder.glob("*.json")) for figures in json.loads(path.read_text())]
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
