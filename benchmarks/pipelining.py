"""Plans in pipeline stages against torch.distributed.pipelining by hand, with the same stages and order.

    python -m benchmarks.pipelining [--processes N] [--rounds N] [--json FILE]

Both train the same network on gloo processes of one thread, in turns in one run; the ratio is parplan's seconds over
torch's, below 1 where parplan is faster. Both have SGD with momentum behind the last backward.
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
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from benchmarks.ddp import in_turns, seconds
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.module.compiled import Compiled

__all__ = ["main"]

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Block(nn.Module):
    """Two wide layers beside the identity, (N, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        made: Tensor = self.body(x)
        return x + made


class Network(nn.Module):
    """Blocks with the loss inside."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean squared difference."""
        return functional.mse_loss(self.blocks(x), y)


@dataclass(frozen=True)
class Case:
    """A network, its batch of all processes, and how it is cut in time."""

    schedule: str
    micro_batches: int
    blocks: int
    width: int
    samples: int

    def plan(self, graph: LayerGraph) -> Plan:
        """Equally many blocks for every process, the loss behind the last."""
        processes = dist.get_world_size()
        chosen = {}
        for name in graph.layers:
            number = int(name.split(".")[1]) if name.startswith("blocks.") else self._block_of(graph, name)
            chosen[name] = Strategy(devices=(number * processes // self.blocks,))
        plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, processes, chosen)
        return replace(plan, micro_batches=self.micro_batches, schedule=self.schedule)

    def _block_of(self, graph: LayerGraph, name: str) -> int:
        """The block in front of a layer that has no module of its own."""
        order = list(graph.layers)
        before = [other for other in order[: order.index(name)] if other.startswith("blocks.")]
        return int(before[-1].split(".")[1])


CASES = tuple(
    Case(schedule, micro_batches, 8, width, samples)
    for width, samples in ((256, 256), (512, 128))
    for schedule, micro_batches in (("gpipe", 4), ("1f1b", 4), ("1f1b", 8))
)


@dataclass(frozen=True)
class Figures:
    """Seconds per step (medians over rounds) and parplan's over torch's with its quartiles."""

    case: Case
    processes: int
    rounds: int
    torch_s: float
    parplan_s: float
    ratio: float
    quartiles: tuple[float, float]

    def line(self) -> str:
        """One row of the printed table."""
        return (
            f"{self.case.schedule:6} {self.case.micro_batches:4} {self.case.width:6} {self.case.samples:8} "
            f"{self.torch_s * 1e3:8.1f} {self.parplan_s * 1e3:8.1f} {self.ratio:7.3f}  {self.quartiles[0]:.3f} to "
            f"{self.quartiles[1]:.3f}"
        )


def by_torch(case: Case, net: Network, x: Tensor, y: Tensor, losses: list[Tensor]) -> Callable[[], None]:
    """A step of this process's stage."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    each = case.blocks // processes
    own = nn.Sequential(*[*net.blocks.children()][rank * each : (rank + 1) * each])
    stage = PipelineStage(own, rank, processes, torch.device("cpu"))
    schedule = SCHEDULES[case.schedule](stage, case.micro_batches, loss_fn=functional.mse_loss)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        found = list[Tensor]()
        if rank == 0:
            schedule.step(x)
        elif rank == processes - 1:
            schedule.step(target=y, losses=found)
        else:
            schedule.step()
        optimizer.step()
        losses[:] = [torch.stack(found).mean().detach()] if found else []

    return step


def by_plan(case: Case, net: Network, x: Tensor, y: Tensor, losses: list[Tensor]) -> Callable[[], None]:
    """A step of parplan's."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    model = Compiled(net, case.plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    own = x.tensor_split(processes)[rank].clone(), y.tensor_split(processes)[rank].clone()

    def step() -> None:
        optimizer.zero_grad()
        loss = model(*own)
        loss.backward()
        optimizer.step()
        losses[:] = [loss.detach()]

    return step


def compare(case: Case, rounds: int, steps: int = 4) -> Figures:
    """Time both in turns, after a few steps in which their losses are equal."""
    torch.manual_seed(0)
    net, x, y = (
        Network(case.blocks, case.width),
        torch.randn(case.samples, case.width),
        torch.randn(case.samples, case.width),
    )
    theirs, ours = list[Tensor](), list[Tensor]()
    steppers = {
        "torch": by_torch(case, copy.deepcopy(net), x, y, theirs),
        "parplan": by_plan(case, net, x, y, ours),
    }
    for _ in range(3):
        for step in steppers.values():
            seconds(step, 1)
        if theirs:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    times = in_turns(steppers, rounds, steps)
    lower, middle, upper = statistics.quantiles([b / a for a, b in zip(*times.values(), strict=True)], n=4)
    torch_s, parplan_s = (statistics.median(own) for own in times.values())
    return Figures(case, dist.get_world_size(), rounds, torch_s, parplan_s, middle, (lower, upper))


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One process of the comparison."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=args.processes)
    if rank == 0:
        print("order     M  width  samples torch ms  parplan   ratio  quartiles")
    found = []
    for case in CASES:
        found.append(compare(case, args.rounds))
        if rank == 0:
            print(found[-1].line(), flush=True)
    if rank == 0 and args.json:
        args.json.write_text(json.dumps([asdict(figures) for figures in found], indent=1) + "\n")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description="plans in stages against torch.distributed.pipelining")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), args.processes)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
