"""`parplan profile`: measure, list, export and import what plans are priced with."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parplan.errors import ParplanError

if TYPE_CHECKING:
    from torch import nn

    from parplan.profiler.session import Summary

__all__ = ["TargetSource", "run"]


@dataclass(frozen=True)
class TargetSource:
    """A command line's TARGET, to be loaded by every process that measures (a profiler.session.Source)."""

    target: str
    inputs: tuple[str, ...] = ()
    batch: int | None = None
    layer_params: str | None = None

    def load(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, its positional and its keyword arguments."""
        from parplan.target import load

        with contextlib.redirect_stdout(sys.stderr):
            found = load(self.target, self.inputs, self.batch, self.layer_params)
        return found.module, found.args, found.kwargs


def run(options: Namespace) -> str:
    """Do what the command line asks for; what to print.

    Raises:
        ParplanError: the model, the store or a file cannot be used.
    """
    if options.imported and options.exported:
        raise ParplanError("--import and --export are both given; do one after the other")
    if options.target is not None and (options.imported or options.exported):
        raise ParplanError(f"a model ({options.target}) is measured, --import and --export need none; leave out one")
    idle = {"--devices": options.devices, "--batch": options.batch, "--input": options.input, "--again": options.again}
    if options.target is None and any(idle.values()):
        given = " and ".join(option for option, value in idle.items() if value)
        raise ParplanError(f"{given}: there is no TARGET to measure; name a model, such as parplan profile model.py")
    if options.imported:
        return _import(options.imported)
    if options.exported:
        return _export(options.exported)
    return _measure(options) if options.target is not None else "\n".join(_listing()) + "\n"


def _import(file: str) -> str:
    from parplan.cost_models.profile.store import ProfileStore
    from parplan.cost_models.profile.text import import_profile

    with ProfileStore() as store:
        merged = import_profile(store, file)
        return f"{file}: {merged.describe()}, into {store.path}\n"


def _export(file: str) -> str:
    from parplan.cost_models.profile.store import ProfileStore
    from parplan.cost_models.profile.text import export_profile

    with ProfileStore(read_only=True) as store:
        count = export_profile(store, file)
        return f"{count} entries written to {file}\n"


def _listing() -> Iterator[str]:
    """What there is, by conditions."""
    from parplan.cost_models.profile.store import ProfileStore

    with ProfileStore(read_only=True) as store:
        found = store.counts()
        yield f"Profile store: {store.path}{'' if found else ' (empty)'}"
        for counts in found:
            last = f", the last on {counts.last_when[:10]}" if counts.last_when else ""
            yield f"  {counts.conditions.describe()}: {counts.describe()}{last}"
    if not found:
        yield "`parplan profile TARGET --devices N` measures what plans of a model need."


def _measure(options: Namespace) -> str:
    import torch

    from parplan.profiler.session import Settings, profile
    from parplan.report.progress import Progress

    cuda = torch.cuda.is_available()
    devices = options.devices or (torch.cuda.device_count() if cuda else 1)
    settings = Settings(
        devices,
        "cuda" if cuda else "cpu",
        optimizers=(options.optimizer,),
        time_cap_s=options.time_limit,
        again=options.again,
    )
    source = TargetSource(options.target, tuple(options.input), options.batch, options.layer_params)
    try:
        found = profile(source, settings, Progress)
    except KeyboardInterrupt:
        print("What was measured is kept; the same command goes on from there.", file=sys.stderr)
        raise
    return "\n".join(_report(found, options, devices)) + "\n"


def _report(found: Summary, options: Namespace, devices: int) -> Iterator[str]:
    from parplan.cost_models.profile.store_file import default_path

    outcome = found.outcome
    yield f"{outcome.measured} parts measured, {outcome.known} known before, in {found.seconds:.0f} s:"
    for conditions in found.conditions:
        yield f"  {conditions}"
    yield f"Kept in {default_path()}"
    if outcome.left:
        yield f"{outcome.left} parts were left after --time-limit {options.time_limit:g} s; run again to go on."
    for reason in outcome.failed[:5]:
        yield f"Not measured: {reason}"
    if len(outcome.failed) > 5:
        yield f"... and {len(outcome.failed) - 5} more"
    import torch

    where = "" if torch.cuda.is_available() else " --gpu cpu"
    yield f"Plan with it:  parplan analyze {options.target}{where} --gpus {devices}"
