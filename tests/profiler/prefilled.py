"""A store that has everything but the parts of layers, with made-up figures: so that profiling takes little time."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from parplan.cost_models.measured import AGREEMENT, BATCH_NORM, CORRECTION, OVERHEAD
from parplan.cost_models.measurement import optimizer_updates as updates
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.profile.records import LinkEntry, PartEntry
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.sampling import Measurement
from parplan.profiler import runtime_costs
from parplan.profiler.communication import KINDS, SIZES

__all__ = ["MODEL", "PartsKept", "parts_kept", "prefill", "wait_until"]

CPU = torch.device("cpu")

# A file with a model of a few layers, of which many distinct parts come.
MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.Sigmoid(), nn.Linear(48, 12))
example_inputs = torch.randn(24, 24)
"""


def _other_parts(busy: int) -> list[PartEntry]:
    figures = Measurement(1e-4, 1e-4, 0.01, 5, 1e-3, when="2025-06-01T12:00:00Z")
    found = []
    for size in (0, *updates._SIZES):
        family = updates._family("adam")
        found.append(PartEntry(updates._signature("adam", size), family, 0.0, 4.0 * size, figures))
    for depth in runtime_costs._DEPTHS:
        found.append(PartEntry(f"{OVERHEAD}, {2 * depth} parameters", OVERHEAD, 0.0, 2.0 * depth, figures))
    found += [PartEntry(f"{CORRECTION}, {name}", CORRECTION, 0.0, 4.0, figures) for name in runtime_costs.CALIBRATION]
    found.append(PartEntry(BATCH_NORM, BATCH_NORM, 0.0, 3.0, figures))
    return [*found, PartEntry(AGREEMENT, AGREEMENT, 0.0, 0.0, figures)]


def prefill(store: ProfileStore, devices: int) -> None:
    """Everything but parts, for up to `devices` CPU devices at work."""
    for busy in range(1, devices + 1):
        links = [
            LinkEntry("gloo", kind, busy, nbytes, 1e-4 + 1e-9 * nbytes, 0.02, 5, 1e-3, "2025-06-01T12:00:00Z")
            for kind in KINDS
            for nbytes in SIZES
        ]
        store.under(current_conditions(CPU, busy)).put(*_other_parts(busy), *(links if busy > 1 else []))


PartsKept = dict[tuple[int, str], Measurement]


def parts_kept(store: ProfileStore, devices: int) -> PartsKept:
    """What is kept of parts of layers, by devices at work and signature."""
    return {
        (busy, entry.signature): entry.measurement
        for busy in range(1, devices + 1)
        for entry in store.under(current_conditions(CPU, busy)).all()
        if not entry.family.startswith(("update ", "runtime "))
    }


def wait_until(store: Path, devices: int, more_than: int, timeout_s: float = 120.0) -> None:
    """Until that many parts are kept by whoever measures."""
    begin = time.monotonic()
    with ProfileStore(store, read_only=True) as reader:
        while len(parts_kept(reader, devices)) <= more_than:
            assert time.monotonic() - begin < timeout_s, "nothing was measured"
            time.sleep(0.05)
