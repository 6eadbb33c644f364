"""Step time of a pure data-parallel plan against DistributedDataParallel, on CPU processes.

A convolutional network with local batch norm (as DDP has it) on gloo processes with one thread each. Both models live
in the same processes and take turns, a few steps each, so that a machine that slows down slows both: every round gives
one ratio, and the median of the ratios is what counts, with the quartiles as its spread.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.compiled import Compiled


@dataclass(frozen=True)
class Figures:
    """Seconds per step (medians over rounds) and the ratio of parplan's to DDP's."""

    processes: int
    samples_per_process: int
    rounds: int
    steps_per_round: int
    ddp_s: float
    parplan_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float


def network() -> nn.Module:
    """Four convolutions with batch norm and two fully-connected layers: (N, 3, 32, 32) to (N, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 4, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def data_parallel(graph: LayerGraph) -> Plan:
    """Every layer on every process."""
    everyone = tuple(range(dist.get_world_size()))
    strategy = Strategy(len(everyone), 1, None, everyone)
    return Plan(graph.model, graph.fingerprint, graph.batch or 1, len(everyone), dict.fromkeys(graph.layers, strategy))


def stepper(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """One training step of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Seconds per step, with all processes starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def worker(rank: int, args: argparse.Namespace, port: int) -> None:
    """One process of the comparison."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=args.processes)
    torch.manual_seed(0)
    net = network()
    torch.manual_seed(rank)
    batch = (torch.randn(args.samples, 3, 32, 32), torch.randint(10, (args.samples,)))
    ddp = stepper(DistributedDataParallel(copy.deepcopy(net)), *batch)
    own = stepper(Compiled(net, data_parallel, batch_norm="local"), *batch)
    for step in (ddp, own):
        seconds(step, 3)
    # Turns alternate, so that neither always follows the other.
    times: dict[str, list[float]] = {"ddp": [], "parplan": []}
    for turn in range(args.rounds):
        both = [("ddp", ddp), ("parplan", own)]
        for name, step in both if turn % 2 == 0 else reversed(both):
            times[name].append(seconds(step, args.steps))
    if rank == 0:
        report(args, times["ddp"], times["parplan"])
    dist.destroy_process_group()


def report(args: argparse.Namespace, ddp: Sequence[float], own: Sequence[float]) -> None:
    """Print the figures, and write them where asked."""
    ratios = [b / a for a, b in zip(ddp, own, strict=True)]
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    figures = Figures(
        args.processes, args.samples, args.rounds, args.steps,
        statistics.median(ddp), statistics.median(own), middle, lower, upper,
    )  # fmt: skip
    print(f"DistributedDataParallel {figures.ddp_s * 1e3:.2f} ms per step, parplan {figures.parplan_s * 1e3:.2f} ms")
    print(f"ratio {middle:.3f} (quartiles {lower:.3f} to {upper:.3f}, {args.rounds} paired rounds)")
    if args.json:
        args.json.write_text(json.dumps(asdict(figures), indent=1) + "\n")


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description="a pure data-parallel plan against DistributedDataParallel")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16, help="per process")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="per round and model")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    mp.spawn(worker, (args, free_port()), args.processes)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
