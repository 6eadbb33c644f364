"""Runs a plan on this machine and looks back at it: in this process, or in one per device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan import api
from parplan.compat import pytree
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measured import profiled_costs
from parplan.cost_models.measurement.conditions import here
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import Profile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.sampling import one_thread
from parplan.errors import ModelError
from parplan.graph.capture.capture import batch_of, capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import split_evenly
from parplan.plan import Plan
from parplan.planner.decide import Request
from parplan.predicted_vs_measured import Foreseen, LookBack, devices_at_work, learn, replan
from parplan.pricing import on_devices
from parplan.runtime.measurement.measured_step import MeasuredStep, slowest_of
from parplan.runtime.measurement.predicted import Expected
from parplan.runtime.processes import TIMEOUT_S, in_processes
from parplan.target import Target, load

__all__ = ["OPTIMIZERS", "Job", "Report", "run_report"]

# Nothing is kept of what an update does, so any step size will do.
_RATE = 1e-3

OPTIMIZERS: Mapping[str, Any] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=_RATE),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
}


@dataclass(frozen=True)
class Job:
    """What is to be run, as a command line names it.

    Args:
        target, inputs, batch, layer_params: the model and its inputs, as `parplan.target.load` takes them.
        devices: how many logical devices; None for the plan's, else 2.
        plan: the plan to run as JSON; None for the one parplan chooses.
        steps: how many steps are recorded.
        optimizer: one of OPTIMIZERS.
        precision: as `parplan.analyze` takes it.
    """

    target: str
    inputs: tuple[str, ...] = ()
    batch: int | None = None
    devices: int | None = None
    plan: str | None = None
    steps: int = 20
    optimizer: str = "adam"
    precision: str = "fp32"
    layer_params: str | None = None

    def load(self) -> Target:
        """The model and its inputs."""
        return load(self.target, self.inputs, self.batch, self.layer_params)

    @property
    def count(self) -> int:
        """How many logical devices."""
        if self.devices is not None:
            return self.devices
        if self.plan is not None:
            return Plan.from_json(self.plan).devices
        return (self.load().gpus if self.target.endswith(".cfg") else None) or 2


@dataclass(frozen=True)
class Report:
    """What there is to print: the look back, and sentences on what was learned."""

    look_back: LookBack
    learned: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Ran:
    """What one process brings back; the plan as JSON, to travel."""

    plan: str
    foreseen: Foreseen
    measured: MeasuredStep
    reference_s: float


def run_report(job: Job, *, processes: bool = False, learned: bool = False) -> Report | None:
    """Run the job and look back; None on all ranks of torchrun but the first.

    Args:
        processes: one process of one thread per device instead of devices that share this one; under torchrun its
            ranks are taken.
        learned: keep what was measured in the profile store, and plan again with it.

    Raises:
        ParplanError: the target, the plan or a process cannot be used.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        ran = _as_rank(job)
    else:
        ran = in_processes(job.count, partial(_of_rank, job)) if processes else _in_turns(job)
    if not ran:
        return None
    first = ran[0]
    measured = slowest_of([one.measured for one in ran]) if len(ran) > 1 else first.measured
    look_back = LookBack(Plan.from_json(first.plan), first.foreseen, measured, first.reference_s)
    return Report(look_back, _learned(job, look_back) if learned else ())


# -- running --


def _in_turns(job: Job) -> list[_Ran]:
    """All logical devices in this process."""
    cards = torch.cuda.device_count()
    places = [torch.device("cuda", index % cards) if cards else torch.device("cpu") for index in range(job.count)]
    with one_thread(places[0]):
        return [_ran(job, job.load(), places)]


def _as_rank(job: Job) -> list[_Ran]:
    """This process is a rank of torchrun; the first rank gets what all have found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with one_thread(torch.device("cpu")):
            own = _of_rank(replace(job, devices=job.devices or ranks), rank, ranks)
        found: list[Any] = [None] * ranks
        dist.gather_object(own, found if rank == 0 else None)
        return found if rank == 0 else []
    finally:
        dist.destroy_process_group()


def _of_rank(job: Job, rank: int, ranks: int) -> _Ran:
    """A rank's part, under a process group."""
    return _ran(job, _share(job.load(), rank, ranks), None)


def _share(target: Target, rank: int, ranks: int) -> Target:
    """A rank's samples of the target's batch."""
    leaves, spec = pytree.tree_flatten((target.args, target.kwargs))
    batch = batch_of(leaves) or 0
    if batch < ranks:
        raise ModelError(f"a batch of {batch} leaves some of {ranks} processes without a sample; give --batch {ranks}")
    sizes = split_evenly(batch, ranks)
    start = sum(sizes[:rank])

    def cut(leaf: Any) -> Any:
        sampled = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[start : start + sizes[rank]] if sampled else leaf

    args, kwargs = pytree.tree_unflatten([cut(leaf) for leaf in leaves], spec)
    return replace(target, args=args, kwargs=kwargs)


def _ran(job: Job, target: Target, places: Sequence[torch.device] | None) -> _Ran:
    """Compile, measure, and price what ran."""
    device = places[0] if places else torch.device("cpu")
    module: nn.Module = target.module.to(device)
    args, kwargs = pytree.tree_map(lambda leaf: _own(leaf, device), (target.args, target.kwargs))
    compiled = api.compile(
        module,
        args,
        kwargs=kwargs,
        devices=places,
        plan=Plan.from_json(job.plan) if job.plan is not None else None,
        pins=target.pins if job.plan is None else None,
        precision=job.precision,
        optimizer=job.optimizer,
    )
    made: list[Foreseen] = []

    def foresee(graph: LayerGraph, plan: Plan) -> Expected:
        request = Request(job.precision, job.optimizer)
        made.append(on_devices(compiled.device_count, device, request).foreseen(graph, plan))
        return made[-1].expected

    compiled.predict_times = foresee
    optimizer = OPTIMIZERS[job.optimizer](list(compiled.parameters())) if any(_trained(module)) else None
    reference, references = Reference(device), list[float]()
    measured = compiled.measure(
        *args,
        steps=job.steps,
        optimizer=optimizer,
        memory=True,
        between=lambda: references.append(reference.seconds()),
        **kwargs,
    )
    assert compiled.plan is not None
    return _Ran(compiled.plan.to_json(), made[-1], replace(measured, model=target.name), median(references))


def _trained(module: nn.Module) -> Iterator[bool]:
    return (parameter.requires_grad for parameter in module.parameters())


def _own(leaf: Any, device: torch.device) -> Any:
    """Examples are one sample's memory seen many times; what runs has memory for each."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(device).contiguous().requires_grad_(leaf.requires_grad)


# -- learning --


def _learned(job: Job, look_back: LookBack) -> tuple[str, ...]:
    """Keep what was measured, and plan again."""
    target = job.load()
    graph = capture(target.module, target.args, target.kwargs)
    measured, count = look_back.measured, look_back.plan.devices
    device = torch.device("cuda" if measured.processes == 1 and torch.cuda.is_available() else "cpu")
    with ProfileStore() as store:
        at_work = here(device, devices_at_work(measured))
        kept = learn(look_back, graph, store.under(at_work))
        costs = _costs(job, look_back, graph, store, device)
        pins = target.pins if job.plan is None else ()
        rules = look_back.plan.rules
        request = Request(job.precision, job.optimizer, rules, pins=pins, price_pins=False)
        again = replan(look_back, graph, this_cluster(count, device), costs, request)
        said = f"{kept.describe()} in {store.path}, for {at_work.describe()}."
        return (said, again.sentence(look_back.plan))


def _costs(job: Job, look_back: LookBack, graph: LayerGraph, store: ProfileStore, device: torch.device) -> CostModel:
    """Costs with what was learned, at the speed that the device had while it was measured."""
    count = look_back.plan.devices
    cluster = this_cluster(count, device)
    profiles: dict[int, Profile] = {}
    for busy in (number for number in range(1, count + 1) if count % number == 0):
        profile = store.under(here(device, busy))
        if profile.all():
            profiles[busy] = profile
    return profiled_costs(
        graph,
        cluster,
        profiles,
        kind=cluster.groups[0].device.kind,
        backend="gloo" if device.type == "cpu" else "nccl",
        precision=job.precision,
        optimizer=job.optimizer,
        reference_s=look_back.reference_s if device.type == "cpu" else 0.0,
    )
