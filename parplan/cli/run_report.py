"""Runs a plan on this machine, in this process or in one per device, and compares the step with its prediction."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parplan import api
from parplan.accelerators import place_of
from parplan.cli.options import RunOptions, TargetOptions
from parplan.compat import pytree
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measured import profiled_costs
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.measurement.optimizer_updates import OPTIMIZERS
from parplan.cost_models.measurement.reference_kernel import Reference
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.sampling import one_thread
from parplan.errors import ModelError
from parplan.graph.capture.capture import batch_of, capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import split_evenly
from parplan.plan import Plan
from parplan.planner.request import PlanRequest
from parplan.predicted_vs_measured import PlanPrediction, PredictedVsMeasured, devices_at_work, learn, replan
from parplan.pricing import Pricing
from parplan.runtime.measurement.measured_step import slowest_of
from parplan.runtime.measurement.predicted import Expected
from parplan.runtime.processes import TIMEOUT_S, in_processes
from parplan.target import Target
from parplan.verification import some_samples

__all__ = ["Job", "run_report"]


@dataclass(frozen=True)
class Job:
    """A run of a target, small enough to be sent to processes; `plan` is None for the plan parplan chooses."""

    target: TargetOptions
    options: RunOptions
    plan: Plan | None = None

    @property
    def count(self) -> int:
        """How many logical devices."""
        if self.options.devices is not None:
            return self.options.devices
        if self.plan is not None:
            return self.plan.devices
        return (self.target.load().gpus if (self.target.target or "").endswith(".cfg") else None) or 2


def run_report(job: Job) -> tuple[PredictedVsMeasured, tuple[str, ...]] | None:
    """Run the job; its prediction beside its measurement, and sentences on what was learned.

    None on all ranks of torchrun but the first.

    Raises:
        ParplanError: the target, the plan or a process cannot be used.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # This process is a rank of torchrun; the first rank gets the results of all.
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        try:
            rank, ranks = dist.get_rank(), dist.get_world_size()
            options = replace(job.options, devices=job.options.devices or ranks)
            with one_thread(torch.device("cpu")):
                own = _run_rank(replace(job, options=options), rank, ranks)
            told: list[Any] = [None] * ranks
            dist.gather_object(own, told if rank == 0 else None)
            results: list[PredictedVsMeasured] = told if rank == 0 else []
        finally:
            dist.destroy_process_group()
    elif job.options.processes:
        results = in_processes(job.count, partial(_run_rank, job))
    else:
        # All logical devices in this process.
        places = [place_of(number) for number in range(job.count)]
        with one_thread(places[0]):
            results = [_run(job, job.target.load(), places)]
    if not results:
        return None
    first = results[0]
    measured = slowest_of([one.measured for one in results]) if len(results) > 1 else first.measured
    compared = replace(first, measured=measured)
    return compared, _learned(job, compared) if job.options.learn else ()


def _run_rank(job: Job, rank: int, ranks: int) -> PredictedVsMeasured:
    """Run a rank's share of the target's batch, under a process group."""
    target = job.target.load()
    batch = batch_of(pytree.tree_leaves((target.args, target.kwargs))) or 0
    if batch < ranks:
        raise ModelError(f"a batch of {batch} leaves some of {ranks} processes without a sample; give --batch {ranks}")
    sizes = split_evenly(batch, ranks)
    start = sum(sizes[:rank])
    args, kwargs = some_samples((target.args, target.kwargs), batch, slice(start, start + sizes[rank]))
    return _run(job, replace(target, args=args, kwargs=kwargs), None)


def _run(job: Job, target: Target, places: Sequence[torch.device] | None) -> PredictedVsMeasured:
    """Compile, measure, and price the plan that ran."""
    device = places[0] if places else torch.device("cpu")
    module: nn.Module = target.module.to(device)

    def own(leaf: Any) -> Any:
        """Examples are one sample's memory seen many times; inputs that run have memory for each."""
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.detach().to(device).contiguous().requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(own, (target.args, target.kwargs))
    compiled = api.compile(
        module,
        args,
        kwargs=kwargs,
        devices=places,
        plan=job.plan,
        pins=target.pins if job.plan is None else None,
        optimizer=job.options.optimizer,
    )
    predictions: list[PlanPrediction] = []

    def predict(graph: LayerGraph, plan: Plan) -> Expected:
        request = PlanRequest(optimizer=job.options.optimizer)
        pricing = Pricing.for_devices(compiled.device_count, device, request, compiled.home)
        predictions.append(pricing.predicted(graph, plan))
        return predictions[-1].expected

    compiled.predict_times = predict
    trained = any(parameter.requires_grad for parameter in module.parameters())
    optimizer = OPTIMIZERS[job.options.optimizer](list(compiled.parameters())) if trained else None
    reference, references = Reference(device), list[float]()
    try:
        measured = compiled.measure(
            *args,
            steps=job.options.steps,
            optimizer=optimizer,
            memory=True,
            between=lambda: references.append(reference.seconds()),
            **kwargs,
        )
    except IndexError as error:
        raise ModelError(f"the model fails on its inputs: {error}") from error
    assert compiled.plan is not None
    measured = replace(measured, model=target.name)
    return PredictedVsMeasured(compiled.plan, predictions[-1], measured, median(references))


def _learned(job: Job, compared: PredictedVsMeasured) -> tuple[str, ...]:
    """Keep what was measured, and plan again at the speed that the device had while it was measured."""
    target, optimizer = job.target.load(), job.options.optimizer
    graph = capture(target.module, target.args, target.kwargs)
    measured, count = compared.measured, compared.plan.devices
    device = place_of(0) if measured.processes == 1 else torch.device("cpu")
    cluster = this_cluster(count, device)
    with ProfileStore() as store:
        at_work = current_conditions(device, devices_at_work(measured))
        kept = learn(compared, graph, store.under(at_work))
        profiles: dict[int, SessionProfile] = {}
        for busy in (number for number in range(1, count + 1) if count % number == 0):
            profile = store.under(current_conditions(device, busy))
            if profile.all():
                profiles[busy] = profile
        backend, reference_s = ("gloo", compared.reference_s) if device.type == "cpu" else ("nccl", 0.0)
        given: dict[str, Any] = {"backend": backend, "precision": PlanRequest.precision, "optimizer": optimizer}
        costs = profiled_costs(graph, cluster, profiles, reference_s=reference_s, **given)
        pins = target.pins if job.plan is None else ()
        request = PlanRequest(optimizer=optimizer, rules=compared.plan.rules, pins=pins, price_pins=False)
        again = replan(compared, graph, cluster, costs, request)
        said = f"{kept.describe()} in {store.path}, for {at_work.describe()}."
        return (said, again.sentence(compared.plan))
