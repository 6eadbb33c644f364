"""`parplan profile`: measures all costs that a plan of one model may need, on the devices of this machine.

CPU devices are processes of one thread each, joined by gloo, as under torchrun; CUDA devices one process each, joined
by NCCL. Strategies on m devices are measured with m processes at work. Everything measured is kept at once, so that an
interrupted profile goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from time import perf_counter, time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from parplan.accelerators import accelerator_count
from parplan.cluster import Cluster
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.measurement.in_context_timing import ProcessGroup
from parplan.cost_models.measurement.measure_parts import Outcome, measure_parts
from parplan.cost_models.measurement.optimizer_updates import measure_updates
from parplan.cost_models.profile.records import SessionProfile
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts, part_of
from parplan.cost_models.sampling import StoppingRule
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.local import LocalLayer
from parplan.planner.search_space.strategies import cluster_blocks, offers_uneven, strategies
from parplan.profiler.communication import measure_links
from parplan.profiler.ranks import Ranks
from parplan.profiler.runtime_costs import RuntimeCosts
from parplan.report.progress import Progress
from parplan.runtime.processes import in_processes
from parplan.runtime.transport.distributed import DistributedTransport

__all__ = ["ModelSource", "ProfilingSummary", "Settings", "parts_by_devices", "profile"]

JOIN_S = 600


# Loads the model in a process that measures: it, its positional and its keyword arguments, of the whole step's batch.
ModelSource = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Settings:
    """Scope and duration of profiling.

    Args:
        devices: logical devices.
        device_type: "cpu", or that of the accelerators, such as "cuda".
        optimizers: whose updates are timed.
        stop: when to stop timing one part.
        time_cap_s: for everything, from the call on; what is being measured then is finished.
        again: measure also what is known.
        store: file of the profile store; None is the user's own.
    """

    devices: int
    device_type: str = "cpu"
    optimizers: tuple[str, ...] = ("sgd", "momentum", "adam")
    stop: StoppingRule = field(default_factory=lambda: StoppingRule(cap_s=0.5))
    time_cap_s: float = 600.0
    again: bool = False
    store: str | None = None


@dataclass(frozen=True)
class ProfilingSummary:
    """Parts measured, the seconds that took, the conditions measured under, and what else was left, in words."""

    outcome: Outcome
    seconds: float
    conditions: tuple[str, ...]
    left: tuple[str, ...] = ()


def parts_by_devices(graph: LayerGraph, cluster: Cluster) -> dict[int, list[LocalLayer]]:
    """The part of every layer under every strategy the planner could use, by the number of devices of the strategy."""
    blocks, uneven = cluster_blocks(cluster, False), offers_uneven(graph.batch, cluster)
    found: dict[int, list[LocalLayer]] = {}
    for layer in graph.layers.values():
        for strategy in strategies(layer, graph.batch or 1, blocks, uneven=uneven):
            found.setdefault(len(strategy.devices), []).append(part_of(graph, layer, strategy))
    return dict(sorted(found.items()))


def profile(
    source: ModelSource, settings: Settings, make_progress: Callable[[], Any] | None = None
) -> ProfilingSummary:
    """Measure; blocks until done. Progress is shown by the first process.

    Args:
        source: loads the model; small enough to be sent to processes.

    Raises:
        ParplanError: the model cannot be captured, or a process failed.
        KeyboardInterrupt: interrupted; what was measured is kept.
    """
    started = perf_counter()
    # Logical devices that share an accelerator: only parts can be measured, on one of them.
    sharing = settings.device_type != "cpu" and accelerator_count() < settings.devices
    measure = partial(_measure, source, settings, time() + settings.time_cap_s, make_progress)
    if settings.devices == 1 or sharing:
        outcome, conditions, left = measure(0, 1)
    else:
        outcome, conditions, left = in_processes(
            settings.devices,
            measure,
            backend=dist.get_default_backend_for_device(settings.device_type),
            timeout_s=JOIN_S + 2 * settings.time_cap_s,  # some wait while the others measure by themselves
            ended="a process that measures was ended from outside ({how}), perhaps for want of memory; what was "
            "measured is kept, the same command goes on from there, with fewer --devices or a smaller --batch",
        )[0]
    return ProfilingSummary(outcome, perf_counter() - started, conditions, left)


def _measure(
    source: ModelSource,
    settings: Settings,
    deadline: float,
    make_progress: Callable[[], Any] | None,
    rank: int,
    world: int,
) -> tuple[Outcome, tuple[str, ...], tuple[str, ...]]:
    """One process of `world`: capture the model and measure; all take part in everything that needs them.

    Args:
        deadline: on the clock of `time.time`, which processes share.
    """
    device = torch.device(settings.device_type, rank) if settings.device_type != "cpu" else torch.device("cpu")
    model, args, kwargs = source()
    graph = capture(model, args, kwargs)
    transport = DistributedTransport(device) if world > 1 else None
    hidden = Progress(Console(file=StringIO(), force_terminal=False))
    shown = make_progress() if make_progress is not None and rank == 0 else hidden
    store = ProfileStore(settings.store) if rank == 0 else None
    cluster = this_cluster(settings.devices, device)
    costs = RooflineCosts(graph, cluster)
    backend = dist.get_backend() if transport is not None else "local"
    by_devices = parts_by_devices(graph, cluster)
    if world == 1:
        by_devices = {1: [part for parts in by_devices.values() for part in parts]}
    outcomes, conditions, left_out = [], [], list[str]()
    with shown as progress:
        for count, parts in by_devices.items():
            ranks = Ranks(count, device) if transport is not None else ProcessGroup()
            now = current_conditions(device, count)

            def late(ranks: ProcessGroup = ranks) -> bool:
                """Whether the time is over for one of the processes that measure."""
                return ranks.any(time() >= deadline)

            conditions.append(now.describe())
            # The store's entries on the first rank; on the others a copy of them, which ends with the process.
            known = [store.groups(now) if store is not None else None]
            if world > 1:
                dist.broadcast_object_list(known, 0)
            profile: SessionProfile = store.under(now) if store is not None else SessionProfile(*known[0] or ())
            if transport is not None and count > 1:
                progress.phase(f"communication of {count}")
                if not measure_links(transport, ranks, backend, profile, progress.advance, settings.again, late):
                    left_out.append(f"communication of {count}")
            if not ranks.member:
                continue
            for optimizer in settings.optimizers:
                if late():
                    left_out.append(f"updates of {optimizer}, {count} at work")
                else:
                    measure_updates(optimizer, device, profile, ranks, again=settings.again)
            progress.phase(f"parts, {count} at work")
            outcomes.append(
                measure_parts(
                    graph,
                    costs,
                    parts,
                    device,
                    profile,
                    stop=settings.stop,
                    time_cap_s=max(0.0, deadline - time()),
                    ranks=ranks,
                    on_progress=progress.advance,
                    again=settings.again,
                    sharing=count if device.type == "cpu" else 1,
                )
            )
            if late():
                left_out.append(f"the runtime's own time, {count} at work")
                continue
            if count == world:
                progress.phase("runtime")
            RuntimeCosts(device, ranks, transport if count == world else None).measure(profile, settings.again)
    if transport is not None:
        dist.barrier()
    failed = dict.fromkeys(reason for outcome in outcomes for reason in outcome.failed)
    measured, known, left = (sum(getattr(o, name) for o in outcomes) for name in ("measured", "known", "left"))
    return Outcome(measured, known, left, tuple(failed)), tuple(conditions), tuple(left_out)
