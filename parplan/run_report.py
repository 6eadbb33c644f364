"""Runs a plan on this machine and looks back at it: in this process, or in processes that it starts and ends itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch import multiprocessing as mp

from parplan import api, errors
from parplan.compat import pytree
from parplan.cost_models.conditions import here
from parplan.cost_models.costs import CostModel
from parplan.cost_models.here import this_cluster
from parplan.cost_models.profile import Profile
from parplan.cost_models.profiled import profiled_costs
from parplan.cost_models.reference import Reference
from parplan.cost_models.sampling import one_thread
from parplan.cost_models.shipped import with_shipped
from parplan.cost_models.store import ProfileStore
from parplan.errors import ModelError, ParplanError, RuntimeFailure
from parplan.graph.capture import batch_of, capture
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import split_evenly
from parplan.look_back import Foreseen, LookBack, devices_at_work, learn, replan
from parplan.plan import Plan
from parplan.planner.decide import Request
from parplan.runtime.expected import Expected
from parplan.runtime.measured import MeasuredStep, slowest_of
from parplan.target import Target, load

__all__ = ["OPTIMIZERS", "Job", "Report", "run_report"]

# A rank that waits for longer than this waits for one that is gone.
TIMEOUT_S = 600
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
        ran = _in_processes(job) if processes else _in_turns(job)
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


def _in_processes(job: Job) -> list[_Ran]:
    """Start one process per device; none is left when this returns or raises."""
    ranks = job.count
    with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
        given = (job, ranks, folder)
        started = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _work, given, ranks, join=False, daemon=True, start_method="spawn"
        )
        with _ended(started.processes):
            if not _all_done(started.processes):
                raise _reason(Path(folder), ranks)
        return [pickle.loads((Path(folder) / f"{rank}.ran").read_bytes()) for rank in range(ranks)]


@contextlib.contextmanager
def _ended(processes: Sequence[Any]) -> Iterator[None]:
    """Whatever happens, the processes are gone afterwards."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _all_done(processes: Sequence[Any]) -> bool:
    """Whether all processes end well; waits for no other once one has not."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                return False
    return True


def _work(rank: int, job: Job, ranks: int, folder: str) -> None:
    """One process: measure, and leave what was found (or why nothing was) in a file."""
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            meeting = f"file://{folder}/meeting"
            dist.init_process_group("gloo", meeting, timedelta(seconds=TIMEOUT_S), rank=rank, world_size=ranks)
            found = pickle.dumps(_of_rank(job, rank, ranks))
            dist.destroy_process_group()
        (Path(folder) / f"{rank}.ran").write_bytes(found)
    except Exception as error:
        name = type(error).__name__ if isinstance(error, ParplanError) else ""
        why = _Why(name, str(error) if name else f"process {rank} failed:\n{traceback.format_exc()}")
        (Path(folder) / f"{rank}.why").write_bytes(pickle.dumps(why))
        os._exit(1)  # at once: the others notice, and nothing here waits for them


@dataclass(frozen=True)
class _Why:
    """What ended a process: the name of parplan's error, empty for any other, and the text."""

    kind: str
    text: str


def _reason(folder: Path, ranks: int) -> ParplanError:
    """Why processes failed: the first error that is not merely about another process."""
    found = [pickle.loads(path.read_bytes()) for r in range(ranks) if (path := folder / f"{r}.why").exists()]
    if not found:
        return RuntimeFailure("a process ended without a word; it may have run out of memory")
    why = min(found, key=lambda one: one.kind == "RuntimeFailure")
    kind = getattr(errors, why.kind, RuntimeFailure)
    return RuntimeFailure(why.text) if kind is errors.RuleError else kind(why.text)


def _of_rank(job: Job, rank: int, ranks: int) -> _Ran:
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
        made.append(api.foreseen(graph, plan, device, compiled.device_count, job.precision, job.optimizer))
        return made[-1].expected

    compiled.foresee = foresee
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
        return (said, again.sentence(look_back.plan), *store.notes)


def _costs(job: Job, look_back: LookBack, graph: LayerGraph, store: ProfileStore, device: torch.device) -> CostModel:
    """Costs with what was learned, at the speed that the device had while it was measured."""
    count = look_back.plan.devices
    cluster = this_cluster(count, device)
    profiles: dict[int, Profile] = {}
    for busy in (number for number in range(1, count + 1) if count % number == 0):
        conditions = here(device, busy)
        profile = with_shipped(store.under(conditions), conditions)
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
