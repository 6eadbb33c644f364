"""`parplan profile`: measure, list, export and import what plans are priced with."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from parplan.errors import ParplanError
from parplan.fields import counted

if TYPE_CHECKING:
    from torch import nn

    from parplan.cli.options import ProfileOptions, TargetOptions

__all__ = ["load_target", "run"]


def load_target(target: TargetOptions) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Load a command line's TARGET (a profiler.session.ModelSource): it, its positional and its keyword arguments."""
    with contextlib.redirect_stdout(sys.stderr):
        found = target.load()
    return found.module, found.args, found.kwargs


def run(target: TargetOptions, options: ProfileOptions) -> str:
    """Do what the command line asks for, and give the text to print.

    Raises:
        ParplanError: the model, the store or a file cannot be used.
    """
    if options.imported and options.exported:
        raise ParplanError("--import and --export are both given; do one after the other")
    if target.target is not None and (options.imported or options.exported):
        raise ParplanError(f"a model ({target.target}) is measured, --import and --export need none; leave out one")
    idle = {"--devices": options.devices, "--batch": target.batch, "--input": target.input, "--again": options.again}
    if target.target is None and any(idle.values()):
        given = " and ".join(option for option, value in idle.items() if value)
        raise ParplanError(f"{given}: there is no TARGET to measure; name a model, such as parplan profile model.py")
    from parplan.cost_models.profile.store import ProfileStore
    from parplan.cost_models.profile.text import export_profile, import_profile

    if options.imported:
        with ProfileStore() as store:
            merged = import_profile(store, options.imported)
            return f"{options.imported}: {merged.describe()}, into {store.path}\n"
    if options.exported:
        with ProfileStore(read_only=True) as store:
            count = export_profile(store, options.exported)
            return f"{count} entr{'y' if count == 1 else 'ies'} written to {options.exported}\n"
    if target.target is not None:
        return "\n".join(_measure(target, options)) + "\n"
    with ProfileStore(read_only=True) as store:
        found = store.groups()
    lines = [f"Profile store: {store.path}{'' if found else ' (empty)'}"]
    for group in found:
        last = f", the last on {group.last_when[:10]}" if group.last_when else ""
        lines.append(f"  {group.conditions.describe()}: {group.describe()}{last}")
    hint = [] if found else ["`parplan profile TARGET --devices N` measures what plans of a model need."]
    return "\n".join([*lines, *hint]) + "\n"


def _measure(target: TargetOptions, options: ProfileOptions) -> Iterator[str]:
    """Measure, and say what was."""
    began = time.perf_counter()
    from parplan.accelerators import accelerator_count, accelerator_type
    from parplan.cost_models.profile.store_file import default_path
    from parplan.profiler.session import Settings, profile
    from parplan.report.progress import Progress

    kind = accelerator_type()
    devices = options.devices or max(1, accelerator_count())
    settings = Settings(
        devices,
        kind or "cpu",
        optimizers=(options.optimizer,),
        time_cap_s=max(0.0, options.time_limit - (time.perf_counter() - began)),
        again=options.again,
    )
    try:
        found = profile(partial(load_target, target), settings, Progress)
    except KeyboardInterrupt:
        print("What was measured is kept; the same command goes on from there.", file=sys.stderr)
        raise
    outcome = found.outcome
    yield f"{counted(outcome.measured, 'part')} measured, {outcome.known} known before, in {found.seconds:.0f} s:"
    for conditions in found.conditions:
        yield f"  {conditions}"
    yield f"Kept in {default_path()}"
    if outcome.left or found.left:
        parts = [f"{outcome.left} part{'s' * (outcome.left != 1)}"] * (outcome.left > 0)
        left = ", ".join([*parts, *found.left])
        yield f"Left after --time-limit {options.time_limit:g} s, unless known: {left}; run again to go on."
    for reason in outcome.failed[:5]:
        yield f"Not measured: {reason}"
    if len(outcome.failed) > 5:
        yield f"... and {len(outcome.failed) - 5} more"
    yield f"Plan with it:  parplan analyze {target.target}{'' if kind is not None else ' --gpu cpu'} --gpus {devices}"
