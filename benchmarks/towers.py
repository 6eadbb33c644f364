"""Branches on devices of their own against the best plan without, on CPU processes.

    python -m benchmarks.towers [--json FILE]

A net of two rows of linear layers at a small batch, where weights are heavy: data parallelism would sum all gradients,
shards exchange activations at every layer, one row on each process exchanges them once. Both plans are the planner's
own for this machine: the one with rows side by side, and the best one whose layers all run one after another. Both
compiled models live in the same gloo processes with one thread each and take turns, so that a machine that slows down
slows both: every round gives one ratio, the median of the ratios is what counts, with the quartiles as its spread.
A step is forward, loss, backward and SGD with momentum.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp

from benchmarks.ddp import in_turns, seconds, stepper
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.known import known_costs
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan
from parplan.planner.decide import PlanRequest, decide, predict
from parplan.planner.search_space.formulation import formulate
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.planner.solver.solve import solve
from parplan.runtime.module.compiled import Compiled

CLASSES = 16


class Rows(nn.Module):
    """Two rows of linear layers on one input, joined at the end: (N, width) to (N, 16)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.a, self.b = (self._row(width, depth) for _ in "ab")
        self.last = nn.Linear(2 * width, CLASSES)

    @staticmethod
    def _row(width: int, depth: int) -> nn.Sequential:
        layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.last(torch.cat((self.a(x), self.b(x)), 1))
        return scores


@dataclass(frozen=True)
class Plans:
    """The best plan with branches at the same time and the best without, with what a step is predicted to take."""

    beside: Plan
    in_turn: Plan
    beside_s: float
    in_turn_s: float


def plans(width: int, depth: int, batch: int, processes: int) -> Plans:
    """What the planner chooses for this machine's CPU; if it chooses no towers, a row on each of two processes."""
    graph = capture(Rows(width, depth), (torch.zeros(batch, width),))
    cluster = this_cluster(processes, torch.device("cpu"))
    costs = known_costs(graph, cluster, device=torch.device("cpu"), precision="fp32", optimizer="momentum").costs
    decision = decide(graph, cluster, costs, PlanRequest(optimizer="momentum"))
    in_turn = best_in_turn(graph, processes, costs)
    taken = decision.branches is not None and decision.branches.phases
    beside = decision.plan if taken else by_hand(in_turn, processes)
    return Plans(beside, in_turn, *(predict(graph, cluster, costs, plan).step_s for plan in (beside, in_turn)))


def best_in_turn(graph: LayerGraph, processes: int, costs: CostModel) -> Plan:
    """The solver's plan: all layers one after another."""
    cluster = this_cluster(processes, torch.device("cpu"))
    blocks = cluster_blocks(cluster)
    every = {name: strategies(layer, graph.batch or 1, blocks) for name, layer in graph.layers.items()}
    formulation = formulate(graph, cluster, costs, every)
    choice = solve(formulation.problem).choice or ()
    chosen = zip(formulation.names, formulation.options, choice, strict=False)
    layers = {name: options[k].strategy for name, options, k in chosen}
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, processes, layers)


def by_hand(plan: Plan, processes: int) -> Plan:
    """Row a on the first process, row b on the last one, the rest as it is."""
    places = {"a": 0, "b": processes - 1}
    rows = {name: own for name, own in plan.layers.items() if name[:2] in ("a.", "b.")}
    one = {n: replace(own, replicas=1, shards=1, axis=None, devices=(places[n[0]],)) for n, own in rows.items()}
    return plan.with_layers(one)


@dataclass(frozen=True)
class Figures:
    """Seconds per step (medians over rounds) and the ratio of the tower plan's to the other's."""

    width: int
    depth: int
    processes: int
    batch: int
    rounds: int
    steps_per_round: int
    in_turn_s: float
    beside_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    predicted_ratio: float

    def line(self) -> str:
        """One row of the printed table."""
        return (
            f"{self.width:5} x {self.depth} {self.batch:6} {self.in_turn_s * 1e3:9.2f} {self.beside_s * 1e3:9.2f} "
            f"{self.ratio:7.3f}  {self.ratio_lower_quartile:.3f} to {self.ratio_upper_quartile:.3f} "
            f"{self.predicted_ratio:10.3f}"
        )


HEAD = "two rows   batch   in turn    beside   ratio  quartiles       predicted"


def compare(found: Plans, args: argparse.Namespace, rank: int) -> Figures:
    """Time both plans in turns."""
    torch.manual_seed(0)
    net = Rows(args.width, args.depth)
    torch.manual_seed(rank)
    own = args.batch // args.processes
    batch = (torch.randn(own, args.width), torch.randint(CLASSES, (own,)))
    models = {
        name: stepper(Compiled(copy.deepcopy(net), _planner(plan)), *batch)
        for name, plan in (("in turn", found.in_turn), ("beside", found.beside))
    }
    for step in models.values():
        seconds(step, 3)
    times = in_turns(models, args.rounds, args.steps)
    ratios = [b / a for a, b in zip(times["in turn"], times["beside"], strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    return Figures(
        width=args.width,
        depth=args.depth,
        processes=args.processes,
        batch=args.batch,
        rounds=args.rounds,
        steps_per_round=args.steps,
        in_turn_s=statistics.median(times["in turn"]),
        beside_s=statistics.median(times["beside"]),
        ratio=middle,
        ratio_lower_quartile=lower,
        ratio_upper_quartile=upper,
        predicted_ratio=found.beside_s / found.in_turn_s,
    )


def _planner(plan: Plan) -> Callable[[LayerGraph], Plan]:
    return lambda graph: replace(plan, batch=graph.batch or plan.batch)


def worker(rank: int, found: Plans, args: argparse.Namespace, folder: str) -> None:
    """One process of the comparison."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=args.processes)
    figures = compare(found, args, rank)
    if rank == 0:
        print(figures.line(), flush=True)
        if args.json:
            args.json.write_text(json.dumps(asdict(figures), indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Plan here, then start the processes."""
    parser = argparse.ArgumentParser(description="branches on devices of their own against the best plan without")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6, help="layers in each of the two rows")
    parser.add_argument("--batch", type=int, default=2, help="samples over all processes")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    found = plans(args.width, args.depth, args.batch, args.processes)
    print(HEAD)
    # Plans are mappings that processes started anew cannot be handed; their text can.
    texts = (found.beside.to_json(), found.in_turn.to_json())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(started, (texts, found.beside_s, found.in_turn_s, args, folder), args.processes)  # type: ignore[attr-defined,no-untyped-call]


def started(
    rank: int, texts: tuple[str, str], beside_s: float, in_turn_s: float, args: argparse.Namespace, folder: str
) -> None:
    """A process begins: read the plans."""
    beside, in_turn = (Plan.from_json(text) for text in texts)
    worker(rank, Plans(beside, in_turn, beside_s, in_turn_s), args, folder)


if __name__ == "__main__":
    main()
