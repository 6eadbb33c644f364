"""One device: predicted against measured seconds and memory of training steps, and parplan's over plain ones.

    python -m benchmarks.one_device [--device cuda] [--small] [--only WORD] [--backend inductor] [--json FILE]

Every network trains as a whole, in micro-batches and with every unit replayed. Steps of the plain model and of
parplan's take turns, each a forward with its loss, a backward and an update by Adam; the median of the rounds' ratios
counts, with its quartiles. Steps are predicted twice: from the device's preset, and from its layers measured one by one
on it (as `parplan profile` does), which is done behind the steps and uses nothing of them. With `--backend inductor`
the plain model is compiled as a whole by torch.compile; predictions stay those of layers that are not compiled.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.decoder import Decoder, DecoderSize
from examples import alexnet, gpt2, mlp, resnet50, vgg16
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.repeated import unit_of
from parplan.plan import Plan, Strategy
from parplan.planner.decision import Prediction
from parplan.planner.request import PlanRequest
from parplan.pricing import Pricing
from parplan.profiler.session import Settings, profile
from parplan.runtime.measurement.peak_memory import step_peak
from parplan.runtime.module.compiled import Compiled

MICRO_BATCHES = 4
ROUND_S = 0.05  # of steps of each side in a round, so that starting and waiting for them hardly count


class Scored(nn.Module):
    """A network with its loss, in the inputs' type where they have one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.net(x)
        return cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


@dataclass(frozen=True)
class Network:
    """A network with its loss, and random batches for it.

    Args:
        build: the network with its loss, on the default device.
        shape: of a batch.
        classes: numbers below it are targets, and inputs where these are whole numbers.
        whole: inputs are whole numbers, with a target each.
        precision: of weights and arithmetic.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    whole: bool = False
    precision: str = "fp32"

    def made(self) -> nn.Module:
        """The network in its precision."""
        torch.manual_seed(0)
        return self.build().to(torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        if self.whole:
            return torch.randint(self.classes, self.shape), torch.randint(self.classes, self.shape)
        return torch.randn(self.shape), torch.randint(self.classes, self.shape[:1])

    def source(self, device: torch.device) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The network and a batch for the profiler."""
        with device:
            return self.made(), self.batch(), {}


LLAMA = DecoderSize(16, 2048, 8192, 32, 8, 128256, True, 4096)  # Llama-3.2-1B
LLAMA_SMALL = DecoderSize(4, 64, 128, 4, 2, 128, True, 64)

NETWORKS = (
    Network("mlp", lambda: Scored(mlp.build()), (64, 784), 10),
    Network("alexnet", lambda: Scored(alexnet.build()), (256, 3, 224, 224), 1000),
    Network("vgg16", lambda: Scored(vgg16.build()), (64, 3, 224, 224), 1000),
    Network("resnet50", lambda: Scored(resnet50.build()), (128, 3, 224, 224), 1000),
    Network("gpt2", lambda: Scored(gpt2.build()), (8, 1024), 50257, True, "bf16"),
    Network("llama-1b", lambda: Decoder(LLAMA), (4, 4096), 128256, True, "bf16"),
)


def _small(module: Any) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    return lambda: Scored(module.small()[0]), tuple(module.small()[1][0].shape)


def _deep(layers: int, width: int) -> nn.Module:
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return Scored(nn.Sequential(*hidden, nn.Linear(width, 10)))


SMALL = (
    Network("tiny", lambda: _deep(1, 32), (16, 32), 10),
    Network("deep", lambda: _deep(20, 64), (32, 64), 10),
    Network("wide", lambda: _deep(2, 512), (64, 512), 10),
    Network("mlp", *_small(mlp), 5),
    Network("alexnet", *_small(alexnet), 5),
    Network("vgg16", *_small(vgg16), 5),
    Network("resnet50", *_small(resnet50), 5),
    Network("gpt2", *_small(gpt2), 12, True),
    Network("llama", lambda: Decoder(LLAMA_SMALL), (4, 64), 128, True),
)

VARIANTS = {"whole": (1, "keep"), "micro-batches": (MICRO_BATCHES, "keep"), "replayed": (1, "replay")}


@dataclass(frozen=True)
class Figures:
    """A network trained in one way: medians over rounds, and ratios of parplan's step to the plain one's.

    Args:
        estimated_s: predicted from the preset.
        profiled_s: predicted from measured layers.
        plain_bytes: the plain model's peak, of the whole batch.
    """

    network: str
    variant: str
    plain_s: float
    measured_s: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    estimated_s: float
    profiled_s: float
    plain_bytes: int
    measured_bytes: int
    predicted_bytes: int

    def line(self) -> str:
        """One row of the printed table."""
        return (
            f"{self.network:10} {self.variant:14} {self.plain_s * 1e3:9.2f} {self.measured_s * 1e3:9.2f} "
            f"{self.ratio:6.3f} ({self.ratio_lower_quartile:.3f} to {self.ratio_upper_quartile:.3f}) "
            f"{self.estimated_s * 1e3:9.2f} {self.profiled_s * 1e3:9.2f} {self.plain_bytes / 2**20:9.0f} "
            f"{self.measured_bytes / 2**20:9.0f} {self.predicted_bytes / 2**20:9.0f}"
        )


HEAD = (
    f"{'':10} {'':14} {'plain ms':>9} {'parplan':>9} {'ratio':>6} {'quartiles':16}  {'by preset':>8} {'by layers':>9} "
    f"{'plain MiB':>9} {'parplan':>9} {'predicted':>9}"
)


@dataclass(frozen=True)
class Run:
    """Networks on one device."""

    device: torch.device
    rounds: int
    backend: str = "eager"

    def figures(self, network: Network) -> Iterator[Figures]:
        """Every variant of a network; layers are measured behind all of them."""
        rows = list[tuple[Figures, LayerGraph, Plan]]()
        normed = any(isinstance(module, nn.BatchNorm2d) for module in network.made().modules())
        for variant, (parts, saved) in VARIANTS.items():
            if parts > 1 and normed:
                continue  # its batch norm is over the whole batch
            with self.device:
                rows.append(self._row(network, variant, parts, saved))
            gc.collect()
        profile(partial(network.source, self.device), Settings(1, self.device.type, optimizers=("adam",)))
        for figures, graph, plan in rows:
            yield replace(figures, profiled_s=self._predicted(network, graph, plan).step_s)

    def _row(self, network: Network, variant: str, parts: int, saved: str) -> tuple[Figures, LayerGraph, Plan]:
        own = network.made()
        plain, batch = copy.deepcopy(own), network.batch()

        def planner(graph: LayerGraph) -> Plan:
            known = unit_of(graph) if saved == "replay" else ()
            chosen = {name: Strategy(saved=saved if name in known else "keep") for name in graph.layers}
            return Plan(graph.model, graph.fingerprint, graph.batch or 1, 1, chosen, micro_batches=parts)

        model = Compiled(own, planner, devices=[self.device], check="off", backend=self.backend)
        model.prepare(*batch)
        assert model.graph is not None
        assert model.plan is not None
        steps, measured = list[Callable[[], None]](), list[int]()
        compiled: Any = torch.compile(plain, dynamic=False) if self.backend == "inductor" else plain
        for one in (compiled, model):
            optimizer = torch.optim.Adam(one.parameters(), lr=1e-5)
            step = partial(_step, one, optimizer, batch)
            step()  # libraries choose their kernels
            optimizer.state.clear()
            optimizer.zero_grad(set_to_none=True)
            held = [*one.parameters(), *one.buffers(), *batch]
            peak = step_peak(partial(_twice, step), held, self.device)
            steps.append(step)
            measured.append(peak.peak_bytes)
        times = [self._round(steps) for _ in range(self.rounds)]
        ratios = [own_s / plain_s for plain_s, own_s in times]
        lower_quartile, _, upper_quartile = statistics.quantiles(ratios, n=4)
        plain_s, own_s = (statistics.median(side) for side in zip(*times, strict=True))
        predicted = self._predicted(network, model.graph, model.plan)
        figures = Figures(
            network.name, variant, plain_s, own_s, statistics.median(ratios), lower_quartile, upper_quartile,
            predicted.step_s, 0.0, measured[0], measured[1], max(predicted.memory_bytes),
        )  # fmt: skip
        return figures, model.graph, model.plan

    def _round(self, steps: list[Callable[[], None]]) -> list[float]:
        """Seconds of a step of each side, one behind the other."""
        found = []
        for step in steps:
            count, begun = 0, self._now()
            while count < 2 or time.perf_counter() - begun < ROUND_S:
                step()
                count += 1
            found.append((self._now() - begun) / count)
        return found

    def _now(self) -> float:
        """The time when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _predicted(self, network: Network, graph: LayerGraph, plan: Plan) -> Prediction:
        request = PlanRequest(precision=network.precision, optimizer="adam")
        return Pricing.for_devices(1, self.device, request, home=0).predicted(graph, plan).step


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    model(*batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _twice(step: Callable[[], None]) -> None:
    for _ in range(2):
        step()


def main() -> None:
    """Measure, print the table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="narrow networks, to try this on a CPU")
    parser.add_argument("--only", default="", help="networks whose name contains this")
    parser.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    found = []
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PARPLAN_CACHE"] = folder  # what was measured before is not used
        for network in SMALL if args.small else NETWORKS:
            if args.only not in network.name:
                continue
            for figures in Run(device, args.rounds, args.backend).figures(network):
                print(figures.line(), flush=True)
                found.append(asdict(figures))
    if args.json:
        about = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        args.json.write_text(json.dumps({"device": about, "torch": torch.__version__, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
