"""Measures what sums of layers leave out of a step, on networks of our own.

The runtime's overhead is the time of a whole step of a small network, less its parts; with few and with many
parameters, as handling them is most of it. What is left between steps and sums of parts (memory found anew,
caches that others emptied) comes to much the same for every layer, and is measured on networks of the usual kinds.
Several processes tell each other how many samples they have, in every step. Batch norms over replicas take longer than
their parts and messages, which is measured on a network with some, replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measured import AGREEMENT, BATCH_NORM, CORRECTION, OVERHEAD, overhead_s, profiled_costs
from parplan.cost_models.measurement.in_context_timing import ProcessGroup, now, reference_now
from parplan.cost_models.measurement.measure_parts import measure_parts
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.measurement.runnable_parts import part_signature
from parplan.cost_models.profile.records import PartEntry, SessionProfile
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import Measurement, StoppingRule, one_thread, spread_of
from parplan.graph.capture.capture import capture
from parplan.plan import Plan, Strategy
from parplan.planner.decide import predict
from parplan.profiler.communication import between_compute
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["RuntimeCosts"]

_DEPTHS = (2, 12)
_WIDTH, _SAMPLES = 128, 32
_ROUNDS, _STEPS_S, _LEAST_STEPS, _MOST_STEPS = 3, 0.25, 5, 40


class RuntimeCosts:
    """Measures the seconds that steps take beside their parts; each process of `ranks` by itself, all at once.

    Args:
        device: of this process.
        ranks: the processes that measure.
        transport: where they are all processes of a group: telling each other how many samples there are counts too.
    """

    def __init__(
        self, device: torch.device, ranks: ProcessGroup, transport: DistributedTransport | None = None
    ) -> None:
        self._device, self._ranks, self._transport = device, ranks, transport
        self._networks: dict[str, _Network] = {}

    def measure(self, profile: SessionProfile, again: bool = False) -> None:
        """Measure the figures that `profile` lacks (or all, `again`), and put them there."""
        for depth in _DEPTHS:
            signature = f"{OVERHEAD}, {2 * depth} parameters"
            if self._ranks.any(again or profile.get(signature) is None):
                found = self._network(signature, partial(_linear_layers, depth)).step_and_parts()
                left_s = max(0.0, found.forward_s - found.backward_s)
                measured = replace(found, forward_s=left_s, backward_s=0.0)
                profile.put(PartEntry(signature, OVERHEAD, 0.0, 2.0 * depth, measured))
        for name, make in CALIBRATION.items():
            # A step by itself, without the runtime's overhead, and the sum of its parts.
            signature = f"{CORRECTION}, {name}"
            if self._ranks.any(again or profile.get(signature) is None):
                network = self._network(signature, make)
                found = network.step_and_parts()
                own_s = max(0.0, found.forward_s - overhead_s(profile)(len(network.graph.parameters)))
                layers = float(len(network.graph.layers))
                profile.put(PartEntry(signature, CORRECTION, 0.0, layers, replace(found, forward_s=own_s)))
        if self._transport is not None:
            self._agreement(self._transport, profile, again)
            self._batch_norm(dist.get_backend(), profile, again)

    def _batch_norm(self, backend: str, profile: SessionProfile, again: bool) -> None:
        """Seconds that batch norms over replicas take in a step beside their parts and messages."""
        if not self._ranks.any(again or profile.get(BATCH_NORM) is None):
            return
        network, known = self._network(BATCH_NORM, _convolutional, self._ranks.count), SessionProfile()
        known.put(*(entry for family in (OVERHEAD, CORRECTION, AGREEMENT) for entry in profile.family(family)))
        known.put(*profile.links(backend))
        found = network.step_and_parts(partial(network.predicted_s, known, backend))
        norms = sum(layer.mixes_batch for layer in network.graph.layers.values())
        profile.put(PartEntry(BATCH_NORM, BATCH_NORM, 0.0, float(norms), found))

    def _agreement(self, transport: DistributedTransport, profile: SessionProfile, again: bool) -> None:
        """Seconds that a step of several processes takes more: telling each other how many samples there are."""
        if not self._ranks.any(again or profile.get(AGREEMENT) is None):
            return
        reference = Reference(self._device)
        times, references = [], []

        def tell() -> None:
            transport.gather(1, 0)

        with one_thread(self._device):
            for _ in range(_LEAST_STEPS):
                references.append(reference_now(reference, self._ranks))
                times.append(between_compute(tell, reference, self._ranks, 4))
        mean_s = fmean(times)
        measured = Measurement(mean_s, 0.0, spread_of(times, mean_s), len(times), median(references), when=now())
        profile.put(PartEntry(AGREEMENT, AGREEMENT, 0.0, 0.0, measured))

    def _network(self, name: str, make: Callable[[], tuple[nn.Module, Tensor]], devices: int = 1) -> _Network:
        if name not in self._networks:
            torch.manual_seed(0)
            self._networks[name] = _Network(*make(), self._device, self._ranks, devices)
        return self._networks[name]


class _Network:
    """A small network that the runtime runs on one device of this process, or with a replica on every process.

    Args:
        inputs: of each process.
        devices: 1, or the number of processes.
    """

    def __init__(
        self, net: nn.Module, inputs: Tensor, device: torch.device, ranks: ProcessGroup, devices: int = 1
    ) -> None:
        self._device, self._ranks, self._cluster = device, ranks, this_cluster(devices, device)
        net, self._inputs = net.to(device), inputs.to(device)
        self.graph = graph = capture(net, (torch.cat([self._inputs] * devices),))
        everywhere = Strategy(devices, devices=tuple(range(devices)))
        self._plan = Plan(
            graph.model, graph.fingerprint, graph.batch or 1, devices, dict.fromkeys(graph.layers, everywhere)
        )
        places = [device] if devices == 1 else None
        # In a graph of its own, as steps of several devices are, whose overhead this is.
        self._compiled = Compiled(net, lambda graph: self._plan, devices=places, check="off", caller_autograd=False)
        self._gradients = torch.ones_like(self._compiled(self._inputs))

    def step_and_parts(self, parts_s: Callable[[], float] | None = None) -> Measurement:
        """Whole steps (`forward_s`) and sums of their parts (`backward_s`), measured in turns; the spread of steps."""
        reference = Reference(self._device)
        times: list[float] = []
        parts, references = [], []
        with one_thread(self._device):
            self._step()
            for _ in range(_ROUNDS):
                references.append(reference_now(reference, self._ranks, 5))
                steps: list[float] = []
                while self._ranks.any(
                    len(steps) < _LEAST_STEPS or (sum(steps) < _STEPS_S and len(steps) < _MOST_STEPS)
                ):
                    self._ranks.barrier()
                    start = perf_counter()
                    self._step()
                    steps.append(perf_counter() - start)
                times += steps
                parts.append(parts_s() if parts_s is not None else self._parts_s())
        spread = spread_of(times, median(times))
        step_s, rest_s, reference_s = self._ranks.mean([fmean(times), fmean(parts), median(references)])
        return Measurement(step_s, rest_s, spread, len(times), reference_s, when=now())

    def _step(self) -> None:
        self._compiled(self._inputs).backward(self._gradients)
        for parameter in self._compiled.parameters():
            parameter.grad = None
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _measure(self, profile: SessionProfile) -> None:
        """Measure the parts of the layers, and put them into the profile."""
        costs, stop = RooflineCosts(self.graph, self._cluster), StoppingRule(cap_s=0.05)
        wanted = [part_of(self.graph, layer, self._plan.layers[name]) for name, layer in self.graph.layers.items()]
        measure_parts(self.graph, costs, wanted, self._device, profile, stop=stop, ranks=self._ranks, again=True)

    def _parts_s(self) -> float:
        """The sum of the layers' parts, forward and backward."""
        self._measure(session := SessionProfile())
        layers = self.graph.layers.values()
        found = [session.get(part_signature(self.graph, part_of(self.graph, layer, Strategy()))) for layer in layers]
        figures = [entry.measurement for entry in found if entry is not None]
        return sum(measured.forward_s + measured.backward_s for measured in figures)

    def predicted_s(self, profile: SessionProfile, backend: str) -> float:
        """The predicted step without an update, from a profile and the parts of the layers measured now."""
        self._measure(profile)
        costs = profiled_costs(self.graph, self._cluster, {self._ranks.count: profile}, backend=backend)
        found = predict(self.graph, self._cluster, costs, self._plan)
        return found.step_s - found.update_s


def _linear_layers(depth: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(depth))), torch.ones(_SAMPLES, _WIDTH)


def _convolutional() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 24), (24, 40), (40, 72)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72 * 9, 200), nn.ReLU()), torch.rand(20, 3, 24, 24)


def _perceptron() -> tuple[nn.Module, Tensor]:
    widths = (600, 720, 720, 400)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers), torch.rand(80, widths[0])


class _Attention(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) to the same."""
        y = self.norm1(x)
        heads = [linear(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for linear in self.project]
        x = x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        back: Tensor = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + back


# Networks that steps are corrected by: small ones of the usual kinds.
CALIBRATION: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "convolutional": _convolutional,
    "perceptron": _perceptron,
    "transformer": lambda: (nn.Sequential(_Attention(160, 5), _Attention(160, 5)), torch.rand(10, 48, 160)),
}
