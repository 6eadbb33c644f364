"""`parplan profile`: measures everything a planner could ask for about one model on the devices that are here.

CPU devices are processes of one thread each, joined by gloo, as under torchrun; CUDA devices one process each, joined
by NCCL. Strategies on m devices are measured with m processes at work. Everything measured is kept at once, so that an
interrupted profile goes on where it stopped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn

from parplan.cluster import Cluster
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measurement.conditions import here
from parplan.cost_models.measurement.measure_parts import Outcome, Request, measure_parts
from parplan.cost_models.measurement.optimizer_updates import measure_updates
from parplan.cost_models.measurement.sweeps import Alone, Company
from parplan.cost_models.profile.records import LinkEntry, PartEntry, Profile, SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts
from parplan.cost_models.sampling import Effort, Measurement
from parplan.errors import ParplanError
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.planner.search_space.strategies import cluster_blocks, strategies
from parplan.profiler.communication import KINDS, SIZES, measure_links
from parplan.profiler.ranks import Ranks
from parplan.profiler.runtime_costs import RuntimeCosts
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["Settings", "Source", "Summary", "profile", "requests_by_devices"]

JOIN_S = 600


class Source(Protocol):
    """Where processes get the model from: something small that can be sent to them."""

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, its positional and its keyword arguments, the whole step's batch."""
        ...


class Progress(Protocol):
    """What is told while measuring; see report/progress.py."""

    def phase(self, name: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class Settings:
    """What to measure, and how long.

    Args:
        devices: logical devices.
        device_type: "cpu" or "cuda".
        optimizers: whose updates are timed.
        effort: for one part.
        time_cap_s: for all parts together.
        again: measure also what is known.
        store: file of the profile store; None is the user's own.
    """

    devices: int
    device_type: str = "cpu"
    optimizers: tuple[str, ...] = ("sgd", "momentum", "adam")
    effort: Effort = field(default_factory=lambda: Effort(cap_s=0.5))
    time_cap_s: float = 600.0
    again: bool = False
    store: str | None = None


@dataclass(frozen=True)
class Summary:
    """What profiling came to."""

    outcome: Outcome
    seconds: float
    conditions: tuple[str, ...]


def requests_by_devices(graph: LayerGraph, cluster: Cluster) -> dict[int, list[Request]]:
    """Every layer with every strategy the planner could use, by the number of devices of the strategy."""
    blocks = cluster_blocks(cluster, False)
    found: dict[int, list[Request]] = {}
    for layer in graph.layers.values():
        for strategy in strategies(layer, graph.batch or 1, blocks):
            found.setdefault(len(strategy.devices), []).append(Request(layer, strategy))
    return dict(sorted(found.items()))


def profile(source: Source, settings: Settings, make_progress: Callable[[], Any] | None = None) -> Summary:
    """Measure; blocks until done. Progress is shown by the first process.

    Raises:
        ParplanError: the model cannot be captured, or a process failed.
        KeyboardInterrupt: interrupted; what was measured is kept.
    """
    started = perf_counter()
    if settings.devices == 1 or _sharing(settings):
        outcome, names = _measure(source, settings, 0, 1, make_progress)
        return Summary(outcome, perf_counter() - started, names)
    outcome, names = _spawned(source, settings, make_progress)
    return Summary(outcome, perf_counter() - started, names)


def _sharing(settings: Settings) -> bool:
    """Whether several logical devices share a CUDA device: then only parts can be measured, on one of them."""
    return settings.device_type == "cuda" and torch.cuda.device_count() < settings.devices


def _measure(
    source: Source, settings: Settings, rank: int, world: int, make_progress: Callable[[], Any] | None
) -> tuple[Outcome, tuple[str, ...]]:
    """What one process does; all take part in everything that needs them."""
    device = torch.device(settings.device_type, rank) if settings.device_type == "cuda" else torch.device("cpu")
    model, args, kwargs = source.load()
    graph = capture(model, args, kwargs)
    transport = DistributedTransport(device) if world > 1 else None
    with make_progress() if make_progress is not None and rank == 0 else _Quiet() as progress:
        return _measured(graph, settings, device, rank, world, transport, progress)


def _measured(
    graph: LayerGraph,
    settings: Settings,
    device: torch.device,
    rank: int,
    world: int,
    transport: DistributedTransport | None,
    progress: Progress,
) -> tuple[Outcome, tuple[str, ...]]:
    store = ProfileStore(settings.store) if rank == 0 else None
    cluster = this_cluster(settings.devices, device)
    costs = RooflineCosts(graph, cluster)
    backend = dist.get_backend() if transport is not None else "local"
    total, names = Outcome(0, 0, 0), []
    left_s = settings.time_cap_s
    for count, requests in _by_work(requests_by_devices(graph, cluster), world).items():
        ranks = Ranks(count, device) if transport is not None else None
        conditions = here(device, count)
        kept = _shared(store.under(conditions) if store is not None else None, world, backend)
        names.append(conditions.describe())
        company: Company = ranks if ranks is not None else Alone()
        if transport is not None and ranks is not None and count > 1:
            progress.phase(f"communication of {count}")
            _links(transport, ranks, backend, kept, progress, settings.again)
        if ranks is not None and not ranks.member:
            continue
        for optimizer in settings.optimizers:
            measure_updates(optimizer, device, kept, company, again=settings.again)
        progress.phase(f"parts, {count} at work")
        begin = perf_counter()
        outcome = measure_parts(
            graph,
            costs,
            requests,
            device,
            kept,
            effort=settings.effort,
            time_cap_s=max(0.0, left_s),
            company=company,
            on_progress=progress.advance,
            again=settings.again,
            sharing=count if device.type == "cpu" else 1,
        )
        left_s -= perf_counter() - begin
        total = _added(total, outcome)
        if count == world:
            progress.phase("runtime")
        RuntimeCosts(device, company, transport if count == world else None).measure(kept, settings.again)
    if transport is not None:
        dist.barrier()
    return total, tuple(names)


def _by_work(requests: Mapping[int, Sequence[Request]], world: int) -> dict[int, list[Request]]:
    """Requests by how many processes are at work; with one process, all together."""
    if world == 1:
        return {1: [request for own in requests.values() for request in own]}
    return {count: list(own) for count, own in requests.items()}


def _links(
    transport: DistributedTransport, ranks: Ranks, backend: str, kept: Profile, progress: Progress, again: bool
) -> None:
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        progress.advance(done, len(KINDS) * len(SIZES))

    measure_links(transport, ranks, backend, kept, on_done, again=again)


def _shared(kept: Profile | None, world: int, backend: str) -> Profile:
    """The store's view on the first rank; elsewhere a profile that knows what the store's does, and forgets."""
    if world == 1:
        assert kept is not None
        return kept
    told: list[Any] = [None]
    if kept is not None:
        parts = [(entry.signature, entry.family) for entry in kept.all()]
        told = [(parts, [(link.kind, link.group, link.nbytes) for link in kept.links(backend)])]
    dist.broadcast_object_list(told, 0)
    if kept is not None:
        return kept
    mirror, (parts, links) = SessionProfile(), told[0]
    for signature, family in parts:
        mirror.put(PartEntry(signature, family, 0.0, 0.0, Measurement(0.0, 0.0, 0.0, 0)))
    for kind, group, nbytes in links:
        mirror.put(LinkEntry(backend, kind, group, nbytes, 0.0, 0.0, 0))
    return mirror


def _added(one: Outcome, other: Outcome) -> Outcome:
    failed = tuple(dict.fromkeys((*one.failed, *other.failed)))
    return Outcome(one.measured + other.measured, one.known + other.known, one.left + other.left, failed)


class _Quiet:
    """Tells nobody."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *error: object) -> None: ...

    def phase(self, name: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...


# -- several processes --


def _spawned(
    source: Source, settings: Settings, make_progress: Callable[[], Any] | None
) -> tuple[Outcome, tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        given = (source, settings, _free_port(), folder, make_progress)
        running = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _work, given, settings.devices, join=False, start_method="spawn"
        )
        try:
            while not running.join():
                pass
        except mp.ProcessRaisedException as error:  # type: ignore[attr-defined]
            reasons = sorted(Path(folder).glob("error*"))
            if not reasons:
                raise
            raise ParplanError(reasons[0].read_text()) from error
        except mp.ProcessExitedException as error:  # type: ignore[attr-defined]
            raise ParplanError(
                f"a process that measures was ended from outside ({error}), perhaps for want of memory; what was "
                "measured is kept, the same command goes on from there, with fewer --devices or a smaller --batch"
            ) from error
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.terminate()
            for process in running.processes:
                process.join()
        told = json.loads(Path(folder, "outcome").read_text())
    return Outcome(told["measured"], told["known"], told["left"], tuple(told["failed"])), tuple(told["conditions"])


def _work(
    rank: int, source: Source, settings: Settings, port: int, folder: str, make_progress: Callable[[], Any] | None
) -> None:
    parent = os.getppid()
    # An interrupt of the whole group is the parent's to handle; when the parent itself is gone, torch sends one too.
    signal.signal(signal.SIGINT, lambda *_: os._exit(1) if os.getppid() != parent else None)
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere the interface has other names
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if settings.device_type == "cuda" else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    # Some wait while the others measure by themselves.
    patience = timedelta(seconds=JOIN_S + 2 * settings.time_cap_s)
    dist.init_process_group(backend, address, patience, rank=rank, world_size=settings.devices)
    try:
        outcome, names = _measure(source, settings, rank, settings.devices, make_progress)
    except ParplanError as error:
        Path(folder, f"error{rank}").write_text(str(error))
        raise
    if rank == 0:
        Path(folder, "outcome").write_text(json.dumps({**asdict(outcome), "conditions": names}))
    # All have met at the end. Taking down gloo with the interpreter now and then aborts a process that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
