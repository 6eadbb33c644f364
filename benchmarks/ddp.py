"""Step time of plans against DistributedDataParallel, on CPU processes.

A pure data-parallel plan must cost what DDP costs, of networks whose steps are short, too, and a hybrid plan of
AlexNet, with its fully-connected layers cut, much less, with those layers in one pass or in several. Plans with sharded
state meet `fully_shard` of every layer with weights, which keeps them for the backward (`reshard_after_forward=False`,
ZeRO-2), those with gathered state `fully_shard` that frees them behind the forward (ZeRO-3). Both models live in the
same gloo processes with one thread each and take turns, so that a machine that slows down slows both: every round gives
one ratio, and the median of the ratios is what counts, with the quartiles as its spread. A step is everything: forward,
loss, backward and SGD with momentum. Batch norm is local, as DDP has it, but in the case of global statistics, which
meets norms that are synchronized by hand (torch's `SyncBatchNorm` is for GPUs alone).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from examples.alexnet import AlexNet
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Scheme, Strategy
from parplan.runtime.module.compiled import Compiled

FULL = MixedPrecisionPolicy()
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
"""Weights of float32 that are gathered in bf16, gradients that are summed in float32."""


def convnet() -> nn.Module:
    """Four convolutions with batch norm and two fully-connected layers: (N, 3, 32, 32) to (N, 10)."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 4, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def plain_convnet() -> nn.Module:
    """The same without batch norm, which micro-batches rule out."""
    return nn.Sequential(*(layer for layer in convnet().children() if not isinstance(layer, nn.BatchNorm2d)))


def perceptron(*widths: int) -> nn.Module:
    """Images to (N, the last of `widths`), with so many values between; steps that are as short as the runtime's own
    time."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Features(nn.Module):
    """`perceptron(768, 512, 512, 10)` that also returns what its last layer reads, which the loss leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (N, 10) and features (N, 512)."""
        features = self.body(x)
        return self.head(features), features


class LossInside(nn.Module):
    """`perceptron(768, 512, 512, 10)` with its loss: the whole batch's of parplan, each process's own of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.net = perceptron(768, 512, 512, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        return cross_entropy(self.net(images), labels)


class _SynchronizedNorm(torch.autograd.Function):
    """Batch norm with the statistics of all processes: one exchange forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor) -> Tensor:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)  # a fifth of the time of `var_mean`
        both = torch.stack([mean, variance + mean.square()])
        dist.all_reduce(both)
        mean, square = both / dist.get_world_size()
        variance = square - mean.square()
        count = x.numel() // x.shape[1] * dist.get_world_size()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.lerp_(mean, norm.momentum or 0.0)
        norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum or 0.0)
        ctx.save_for_backward(x, weight, mean, (variance + norm.eps).rsqrt())
        return functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, norm.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, factor = ctx.saved_tensors
        total = gradient.sum((0, 2, 3))
        scaled = ((gradient * x).sum((0, 2, 3)) - mean * total) * factor
        both = torch.stack([total, scaled])
        dist.all_reduce(both)
        of_all, of_scaled = both / (dist.get_world_size() * x.numel() // x.shape[1])
        of_x = -weight * factor.square() * of_scaled
        offset = -weight * factor * of_all - of_x * mean
        own, of_x, offset = (one.view(1, -1, 1, 1) for one in (weight * factor, of_x, offset))
        return torch.addcmul(torch.addcmul(offset, x, of_x), gradient, own), None, scaled, total


class SynchronizedNorm(nn.BatchNorm2d):
    """Batch norm as a process of a hand-written program has it."""

    def forward(self, x: Tensor) -> Tensor:
        """Of training alone."""
        result: Tensor = _SynchronizedNorm.apply(x, self, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


def by_synchronized_norms(net: nn.Module) -> nn.Module:
    """DDP with the statistics of all processes."""
    for name, norm in list(net.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            net.set_submodule(name, SynchronizedNorm(norm.num_features))
    return DistributedDataParallel(net)


def data_parallel(layer: Layer, devices: int) -> Strategy:
    """Every layer on every process that can be, a loss once."""
    if layer.batch is None and not layer.constant:
        return Strategy()
    return Strategy(devices, 1, None, tuple(range(devices)))


# Slices of fc6's outputs stay where they are until fc7 has used them as inputs, and so on.
CUTS = {"fc6": "out-features", "fc7": "in-features", "fc8": "in-features"}
BETWEEN = ("relu6", "drop6", "relu7", "drop7")


def in_slices(state: str) -> Callable[[Layer, int], Strategy]:
    """The same with state in slices."""
    return lambda layer, devices: replace(data_parallel(layer, devices), state=state)


def mlp() -> nn.Module:
    """Six wide layers: images to (N, 10)."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3 * 16 * 16, 1024), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def by_fully_shard(net: nn.Module, freed: bool = False, policy: MixedPrecisionPolicy = FULL) -> nn.Module:
    """Every layer with weights a unit of its own, whole from its forward to its backward, or `freed` in between."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=freed, mp_policy=policy)
    for layer in net.modules():
        if not [*layer.children()] and [*layer.parameters()]:
            shard(layer)
    shard(net)
    return net


FREED = partial(by_fully_shard, freed=True)


class Residual(nn.Module):
    """Two wide layers beside the identity, (N, 512) to the same; by `torch.utils.checkpoint` if so set."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        made: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)
        return x + made


def residuals() -> nn.Module:
    """Six residual blocks: images to (N, 10)."""
    blocks = nn.Sequential(*(Residual() for _ in range(6)))
    return nn.Sequential(
        OrderedDict(cut=nn.Flatten(), first=nn.Linear(768, 512), blocks=blocks, last=nn.Linear(512, 10))
    )


def checkpointed(net: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Every residual block computed again in the backward, then shared by `shard`."""
    for block in net.modules():
        if isinstance(block, Residual):
            block.checkpointed = True
    return shard(net)


def replayed(state: str) -> Callable[[Layer, int], Strategy]:
    """Data parallel with residual blocks replayed."""
    rule = in_slices(state)
    return lambda layer, devices: replace(
        rule(layer, devices), saved="replay" if layer.name.startswith("blocks.") else "keep"
    )


def hybrid(layer: Layer, devices: int) -> Strategy:
    """Convolutions on every process, fully-connected layers in slices, one on each."""
    axis = CUTS.get(layer.name, "features" if layer.name in BETWEEN else None)
    everyone = tuple(range(devices))
    return Strategy(1, devices, axis, everyone) if axis else data_parallel(layer, devices)


@dataclass(frozen=True)
class Case:
    """One comparison: `samples` per process of images with `side` pixels, in `classes` classes, in one go or in
    micro-batches (of DDP by `no_sync`); the other one is what `rival` makes of the network. `mixed`: in bf16, parplan's
    under autocast. `statistics`: of batch norm."""

    network: str
    plan: str
    build: Callable[[], nn.Module]
    rule: Callable[[Layer, int], Strategy]
    samples: int
    side: int
    classes: int
    steps: int
    scheme: Scheme = Scheme.GATHER
    micro_batches: int = 1
    rival: Callable[[nn.Module], nn.Module] = DistributedDataParallel
    mixed: bool = False
    statistics: str = "local"

    def planner(self, graph: LayerGraph) -> Plan:
        """The plan, whatever the network."""
        count = dist.get_world_size()
        chosen = {name: self.rule(layer, count) for name, layer in graph.layers.items()}
        batch, several = graph.batch or 1, self.micro_batches
        return Plan(graph.model, graph.fingerprint, batch, count, chosen, "default", self.scheme, several)


CASES = (
    Case("small", "data parallel", partial(perceptron, 48, 64, 10), data_parallel, 16, 4, 10, 40),
    Case("deep", "data parallel", partial(perceptron, 48, *[64] * 20, 10), data_parallel, 32, 4, 10, 20),
    Case("wide", "data parallel", partial(perceptron, 768, 512, 512, 512, 10), data_parallel, 64, 16, 10, 10),
    Case("features", "data parallel", Features, data_parallel, 16, 16, 10, 20),
    Case("inside", "data parallel", LossInside, data_parallel, 16, 16, 10, 20),
    Case("convnet", "data parallel", convnet, data_parallel, 16, 32, 10, 5),
    Case(
        "convnet",
        "global statistics",
        convnet,
        data_parallel,
        16,
        32,
        10,
        5,
        rival=by_synchronized_norms,
        statistics="global",
    ),
    Case("alexnet", "data parallel", AlexNet, data_parallel, 8, 224, 1000, 1),
    Case("alexnet", "hybrid", AlexNet, hybrid, 8, 224, 1000, 1),
    Case("alexnet", "hybrid, broadcast", AlexNet, hybrid, 8, 224, 1000, 1, Scheme.BROADCAST),
    Case("alexnet", "hybrid, interleave", AlexNet, hybrid, 8, 224, 1000, 1, Scheme.INTERLEAVE),
    Case("plain", "data parallel, 4 parts", plain_convnet, data_parallel, 32, 32, 10, 2, micro_batches=4),
    Case("alexnet", "data parallel, 4 parts", AlexNet, data_parallel, 16, 224, 1000, 1, micro_batches=4),
    Case("alexnet", "hybrid, 4 parts", AlexNet, hybrid, 16, 224, 1000, 1, micro_batches=4),
    Case("mlp", "sharded state", mlp, in_slices("sharded"), 64, 16, 10, 5, rival=by_fully_shard),
    Case("alexnet", "sharded state", AlexNet, in_slices("sharded"), 8, 224, 1000, 1, rival=by_fully_shard),
    Case("mlp", "gathered state", mlp, in_slices("gathered"), 64, 16, 10, 5, rival=FREED),
    Case("alexnet", "gathered state", AlexNet, in_slices("gathered"), 8, 224, 1000, 1, rival=FREED),
    Case(
        "residuals",
        "recomputation",
        residuals,
        replayed("replicated"),
        256,
        16,
        10,
        3,
        rival=partial(checkpointed, shard=DistributedDataParallel),
    ),
    Case(
        "residuals",
        "recomputation, gathered state",
        residuals,
        replayed("gathered"),
        256,
        16,
        10,
        3,
        rival=partial(checkpointed, shard=FREED),
    ),
    Case(
        "alexnet",
        "gathered state, 4 parts",
        AlexNet,
        in_slices("gathered"),
        16,
        224,
        1000,
        1,
        micro_batches=4,
        rival=FREED,
    ),
    *(
        Case(
            "mlp",
            f"{state} state, mixed",
            mlp,
            in_slices(state),
            64,
            16,
            10,
            5,
            mixed=True,
            rival=partial(by_fully_shard, freed=freed, policy=MIXED),
        )
        for state, freed in (("sharded", False), ("gathered", True))
    ),
)


@dataclass(frozen=True)
class Figures:
    """Seconds per step (medians over rounds) and the ratio of parplan's to DDP's."""

    network: str
    plan: str
    processes: int
    samples_per_process: int
    rounds: int
    steps_per_round: int
    ddp_s: float
    parplan_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float

    def line(self) -> str:
        """One row of the printed table."""
        return (
            f"{self.network:8} {self.plan:22} {self.samples_per_process:7} {self.ddp_s * 1e3:9.1f} "
            f"{self.parplan_s * 1e3:9.1f} {self.ratio:7.3f}  {self.ratio_lower_quartile:.3f} to "
            f"{self.ratio_upper_quartile:.3f}  {1 / self.ratio:.2f}x"
        )


HEAD = "network  plan                   samples  other ms   parplan   ratio  quartiles       faster"


def stepper(
    model: nn.Module, images: Tensor, labels: Tensor, micro_batches: int = 1, mixed: bool = False
) -> Callable[[], None]:
    """One training step of `model`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def accumulate() -> None:
        """As people write it: of DDP the sums over processes in the last micro-batch's backward, else in each."""
        if isinstance(model, Compiled):
            model.train_step(images, labels, cross_entropy, optimizer)
            return
        optimizer.zero_grad()
        parts = list(zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
        for number, (part, own) in enumerate(parts):
            alone = isinstance(model, DistributedDataParallel) and number < len(parts) - 1
            with cast(DistributedDataParallel, model).no_sync() if alone else nullcontext():
                (cross_entropy(model(part), own) / len(parts)).backward()
        optimizer.step()

    if micro_batches > 1:
        return accumulate
    inside = isinstance(model.module, LossInside)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed and isinstance(model, Compiled)):
            results = model(images, labels) if inside else model(images)
        if inside:
            results.backward()
        else:
            scores = results[0] if isinstance(results, tuple) else results
            cross_entropy(scores.float(), labels).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Seconds per step, with all processes starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def in_turns(steppers: Mapping[str, Callable[[], None]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step in every round. Turns alternate, so that none always follows another."""
    times: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(rounds):
        every = list(steppers.items())
        for name, step in every if turn % 2 == 0 else reversed(every):
            times[name].append(seconds(step, steps))
    return times


def compare(case: Case, rank: int, rounds: int) -> Figures:
    """Time both models in turns."""
    torch.manual_seed(0)
    net = case.build()
    torch.manual_seed(rank)
    batch = (torch.randn(case.samples, 3, case.side, case.side), torch.randint(case.classes, (case.samples,)))
    ddp = stepper(case.rival(copy.deepcopy(net)), *batch, case.micro_batches, case.mixed)
    own = stepper(Compiled(net, case.planner, batch_norm=case.statistics), *batch, case.micro_batches, case.mixed)
    for step in (ddp, own):
        seconds(step, 3)
    times = in_turns({"ddp": ddp, "parplan": own}, rounds, case.steps)
    lower, middle, upper = statistics.quantiles([b / a for a, b in zip(*times.values(), strict=True)], n=4)
    return Figures(
        network=case.network,
        plan=case.plan,
        processes=dist.get_world_size(),
        samples_per_process=case.samples,
        rounds=rounds,
        steps_per_round=case.steps,
        ddp_s=statistics.median(times["ddp"]),
        parplan_s=statistics.median(times["parplan"]),
        ratio=middle,
        ratio_lower_quartile=lower,
        ratio_upper_quartile=upper,
    )


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One process of the comparison."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=args.processes)
    if rank == 0:
        print(HEAD)
    found = []
    for case in CASES:
        if args.only in f"{case.network} {case.plan}":
            found.append(compare(case, rank, args.rounds))
            if rank == 0:
                print(found[-1].line(), flush=True)
    if rank == 0 and args.json:
        args.json.write_text(json.dumps([asdict(figures) for figures in found], indent=1) + "\n")
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description="plans against DistributedDataParallel")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose network and plan contain this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, folder), args.processes)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
