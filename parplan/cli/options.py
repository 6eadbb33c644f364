"""The command line: its commands, their options and help, and one message for a line that cannot be read."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from parplan import __version__
from parplan.cost_models.optimizers import OPTIMIZER_MEMORY
from parplan.errors import ParplanError
from parplan.planner.option_fields import (
    add_options,
    device_count,
    option,
    percentage,
    positive,
    whole_number,
)
from parplan.planner.request import PlanOptions

if TYPE_CHECKING:
    from parplan.target import Target

__all__ = ["ProfileOptions", "RunOptions", "TargetOptions", "completion", "parse"]

TARGETS = """
TARGET is one of
  model.py              its `model`, or what its function `build()` returns
  model.py:name         a model, a class, or a function that returns a model
  package.module:name   the same from a module that can be imported from here
  layers.cfg            a cuda-convnet2 layer file; its gpu= lines are pins
  transformers:gpt2     a model type, an architecture or ./config.json: built
  timm:resnet50         from its configuration, weights are never downloaded
The inputs are `example_inputs` of the same file: a tensor, a tuple of
arguments, a dict of keyword arguments, or a function that returns one;
`--input` replaces them."""

OVERVIEW = """\
Plans a PyTorch model over several devices, proves the plan, explains it,
checks its numbers, and measures what it costs.

  parplan analyze model.py --gpus 4                   plan for 4 GPUs
  parplan analyze model.py --gpus 4 --out plan.json   and keep the plan
  parplan verify model.py --plan plan.json            the plain model's numbers?
  parplan profile model.py --devices 2                measure what plans cost
  parplan run-report model.py --devices 2             predicted and measured
  parplan export model.py --plan plan.json            the plan in torch alone
  parplan explain report.json LAYER                   why this strategy
  parplan diff old.json new.json                      two plans or reports"""

ANALYZE = f"""\
Finds the fastest plan for a model on some GPUs and says why.
The GPUs need not be here.
{TARGETS}

examples:
  parplan analyze model.py --gpus 4
  parplan analyze model.py --gpus 8 --gpu v100-sxm2 --batch 1024
  parplan analyze model.py --gpus 4 --batch auto         the fastest that fits
  parplan analyze net.py:Net --input 64x128:int64 --input mask=64x128:bool
  parplan analyze model.py --gpus 4 --plan edited.json   price a plan of yours
  parplan analyze model.py --gpus 4 --pin 'fc6=shards:4' decide a layer yourself
  parplan analyze model.py --gpus 4 --json - | jq .predicted.step_s
  parplan analyze transformers:llama --seq 2048 --batch 8 --dtype bf16 --gpus 8
  parplan analyze --profile-graph layers.profile --gpus 16   no model at all"""

VERIFY = f"""\
Runs a plan on logical CPU devices in float64 and compares outputs, loss,
gradients and buffers with the plain model's. Exits with 1 if any differs by
more than 1e-9.
{TARGETS}

examples:
  parplan verify model.py --devices 3         the plan parplan chooses
  parplan verify model.py --plan plan.json    a plan of yours
A few of the example samples are run (two for every replica, more where a batch
norm would see few values), or --batch of them."""


EXPORT = f"""\
Writes a plan as a short PyTorch program that needs no parplan: device mesh,
tensor-parallel modules, fully_shard or DDP, checkpoints, micro-batches. What
these cannot say runs otherwise in it, and is listed in it by layer.
{TARGETS}

example:
  parplan export model.py --plan plan.json --to torch --out parallel.py
  # in the training script: mesh, model = parallel.parallelize(model)"""


DIFF = f"""\
Says how two plans, or the plans of two reports, differ, in groups of layers,
and what that costs: as the reports say, and with TARGET as both plans are
priced now. Exits with 1 if they do not run alike.
{TARGETS}

examples:
  parplan diff old.json new.json
  parplan diff plan.json edited.json model.py --gpu k20"""


EXPLAIN = """\
Says why a layer of a report has its strategy: every other one with its price,
and the rule or the cost that decides.

example:
  parplan analyze model.py --gpus 4 --json report.json
  parplan explain report.json fc6"""


PRESETS = """\
Lists the devices and links that --gpu, --link and cluster files know by name,
each number with where it comes from. A ~ marks what is estimated: from memory,
derived from another number, or assumed."""


SHELLS = ("bash", "zsh", "tcsh")
COMPLETION = """\
Prints the script with which a shell completes commands, options and files:
  parplan completion bash > ~/.local/share/bash-completion/completions/parplan"""


DOCTOR = """\
Says in about ten lines what torch, devices, links, cache and profile this
machine has: paste it into an issue. Exits with 1 if something is broken."""


RUN_REPORT = f"""\
Runs training steps of a plan on this machine and prints, per layer and per
transfer, what was predicted beside what was measured.
{TARGETS}

examples:
  parplan run-report model.py --devices 2               the plan parplan chooses
  parplan run-report model.py --devices 2 --processes   one process per device
  parplan run-report model.py --plan plan.json --learn  and learn from it
Without --processes the logical devices share this process; those on one
processor take turns, so the step as a whole is not the predicted one.
Under torchrun its processes are taken."""


PROFILE = f"""\
Measures what plans of a model are priced with, on the devices that are here:
every part of every layer, communication, the optimizer, and the runtime's own
time. Kept in the user's cache (PARPLAN_CACHE), so nothing is measured twice;
an interrupted run goes on where it stopped. Without TARGET: lists what is kept.
{TARGETS}

examples:
  parplan profile model.py                   one device
  parplan profile model.py --devices 2       two CPU processes, at work together
  parplan profile --export here.json         to share it
  parplan profile --import theirs.json"""

FILE: Mapping[str, Any] = {"metavar": "FILE"}
JSON = "as JSON; - is standard output, alone"
VERBOSE = "show warnings, and where an error was raised"
BATCH = "samples in one step over all devices, instead of the example inputs' batch"
DEVICES = "logical devices (default: the plan's, else 2)"


@dataclass(frozen=True)
class TargetOptions:
    """A model and its inputs; no `target` where a command line names none."""

    target: str | None = None
    batch: int | None = option(None, BATCH, type=whole_number, metavar="N")
    input: tuple[str, ...] = option(
        (), "a positional input such as 64x3x224x224 or 64x128:int64, or a keyword one, mask=64x128:bool; repeatable",
        action="append", metavar="SHAPE",
    )  # fmt: skip
    layer_params: str | None = option(
        None, "of a cuda-convnet2 layer file (default: layer-params-X.cfg beside layers-X.cfg)", **FILE
    )

    seq: int | None = option(None, "tokens per sample of a transformers model", type=whole_number, metavar="N")
    dtype: str | None = option(None, "of a library model's weights, such as bf16 (default: fp32)", metavar="TYPE")

    def load(self, meta: bool = False) -> Target:
        """Load the model and its inputs; with `meta` a library's model has no weights."""
        from parplan.target import load

        sizes: dict[str, Any] = {"sequence": self.seq, "dtype": self.dtype}
        return load(self.target or "", self.input, self.batch, self.layer_params, meta=meta, **sizes)


@dataclass(frozen=True)
class RunOptions:
    """How `parplan run-report` runs a model.

    Args:
        plan: the plan's file; None for the plan that parplan chooses.
        devices: how many logical devices; None for the plan's, else 2.
        processes: one process of one thread per device instead of devices that share this one; under torchrun its
            ranks are taken.
        steps: how many steps are recorded.
        learn: keep what was measured in the profile store, and plan again with it.
    """

    plan: str | None = option(None, "the plan to run (default: the one parplan chooses)", **FILE)
    devices: int | None = option(None, DEVICES, type=device_count, metavar="N")
    processes: bool = option(False, "one process of one thread for each device")
    steps: int = option(20, "steps to record (default: 20)", type=whole_number, metavar="K")
    optimizer: str = option("adam", "what updates in every step (default: adam)", choices=tuple(OPTIMIZER_MEMORY))
    learn: bool = option(
        False, "keep what layers took in the profile store, plan again with it, and say whether the choice would change"
    )


@dataclass(frozen=True)
class ProfileOptions:
    """Scope of `parplan profile`: what is measured, or the export and import of measurements."""

    devices: int | None = option(
        None, "how many to plan for later (default: the GPUs that are here, else 1 CPU device)", type=device_count,
        metavar="N",
    )  # fmt: skip
    optimizer: str = option("adam", "whose updates are timed (default: adam)", choices=tuple(OPTIMIZER_MEMORY))
    time_limit: float = option(
        600.0, "seconds for the whole command (default: 600); the same command goes on from there", type=positive,
        metavar="S",
    )  # fmt: skip
    again: bool = option(False, "measure also what is known")
    exported: str | None = option(None, "write everything that is kept, as text", flag="export", **FILE)
    imported: str | None = option(None, "add what somebody exported", flag="import", **FILE)


class _Parser(argparse.ArgumentParser):
    """Refuses as everything else here does: one message."""

    def error(self, message: str) -> NoReturn:
        raise ParplanError(f"{message} (see `{self.prog} --help`)")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of one command line.

    Raises:
        ParplanError: an option, a value or a command that is not known.
        SystemExit: after `--help` and `--version`.
    """
    parser, commands = _parsers()
    if not argv:
        parser.print_help(sys.stderr)
        raise ParplanError(f"say what to do, such as parplan analyze TARGET; commands are {', '.join(commands)}")
    if not argv[0].startswith("-") and argv[0] not in commands:
        close = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(commands)}"
        raise ParplanError(f"{argv[0]} is no command; {hint} (see `parplan --help`)")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[options.command]
        known = [string for action in command._actions for string in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else ""
        command.error(f"{unknown[0]} is not known{hint}")
    if options.command != "analyze":
        return options
    # A model or a profile, and with a profile nothing that a model is needed for.
    command, file = commands[options.command], options.profile_graph
    if options.target is None and file is None:
        command.error("the following arguments are required: TARGET")
    if file is None:
        return options
    if options.target is not None:
        command.error(f"a model ({options.target}) and --profile-graph {file} are both given; leave out one")
    given = {
        "--measure": options.measure,
        "--as-profiled": options.as_profiled,
        "--input": options.input,
        "--precision": options.precision != "fp32",
    }
    if options.batch == "auto":
        command.error(f"--batch auto needs a model, and the times of {file} are of one batch; say --batch N")
    for name in (name for name, is_given in given.items() if is_given):
        command.error(f"{name} needs a model, and --profile-graph {file} has none; leave out {name}")
    return options


def completion(shell: str) -> str:
    """The script with which a shell completes commands, options and files.

    Raises:
        ParplanError: shtab, which writes it, is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ParplanError("completion is written by shtab; pip install 'parplan[completion]'") from error
    parser, commands = _parsers()
    for command in commands.values():
        for action in command._actions:  # argparse has no public list of them, and shtab reads this one too
            if action.metavar == "FILE" or action.dest in ("target", "first", "second", "report"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell)
    return script


_HELPS = {
    "analyze": ("find, prove and explain a plan", ANALYZE),
    "verify": ("compare a plan's numbers", VERIFY),
    "export": ("write a plan as a PyTorch program", EXPORT),
    "diff": ("compare two plans or reports", DIFF),
    "explain": ("say why a layer has its strategy", EXPLAIN),
    "presets": ("list devices and links known by name", PRESETS),
    "profile": ("measure what plans cost here", PROFILE),
    "run-report": ("run a plan and look back", RUN_REPORT),
    "doctor": ("say what this machine has", DOCTOR),
    "completion": ("print what completes commands and options in a shell", COMPLETION),
}
"""By command: its line in the list of commands, and its own text."""


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and those of its commands by name."""
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="parplan", description=OVERVIEW, **style)
    parser.add_argument("--version", action="version", version=f"parplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    found: dict[str, _Parser] = {
        name: commands.add_parser(name, help=line, description=text, **style) for name, (line, text) in _HELPS.items()
    }
    analyze, verify, export, diff, explain, presets, profile, run, doctor, shell = found.values()
    shell.add_argument("shell", choices=SHELLS, help="the shell")
    diff.add_argument("first", metavar="A", help="a plan or a report, as JSON")
    diff.add_argument("second", metavar="B", help="another one")
    _add_target(diff, nargs="?")
    # The devices that both plans are priced for, as many as each has.
    add_options(
        diff, PlanOptions, "gpu", "link", "cluster", "memory_bytes", "precision", "optimizer",
        gpu={"help": "which kind (default: those that are here, else a preset)"},
        cluster={"help": "instead of these: a TOML file (docs/clusters.md)"},
        memory_bytes={"help": "memory of each, in GiB"}, optimizer={"help": "whose state has to fit (default: adam)"},
    )  # fmt: skip
    explain.add_argument("report", metavar="REPORT", help="a report that `parplan analyze --json` wrote")
    explain.add_argument("layer", metavar="LAYER", help="its name, or the end of it")
    _add_target(profile, nargs="?")
    add_options(profile, ProfileOptions)
    presets.add_argument("--json", help=f"the same {JSON}", **FILE)
    for command in (explain, presets, doctor, shell):
        command.add_argument("--verbose", action="store_true", help=VERBOSE)

    pins_file: dict[str, Any] = {
        "dest": "pins_file", "help": "the same in a TOML file with a table [pins], before --pin", **FILE,
    }  # fmt: skip
    fastest = f"{BATCH}; auto: the smallest of nearly the most samples/s"
    _add_target(analyze, nargs="?", batch={"type": _batch, "help": fastest})
    analyze.add_argument("--profile-graph", help="instead of TARGET: layers, edges, times and sizes that somebody "
                         "measured (the format: docs/profile-graph.md)", **FILE)  # fmt: skip
    group = analyze.add_argument_group("what to plan for")
    add_options(group, PlanOptions)
    group.add_argument("--pins", **pins_file)
    group = analyze.add_argument_group("what to write")
    group.add_argument("--out", help="the plan, as JSON", **FILE)
    group.add_argument("--json", help=f"the report's facts, {JSON}", **FILE)
    group.add_argument("--html", help="the report with pictures, as one page", **FILE)
    group.add_argument("--svg", help="the net on the devices; the step beside it, as FILE-step.svg", **FILE)
    group.add_argument("--trace", help="the predicted step, for Perfetto or chrome://tracing", **FILE)
    group.add_argument("--check", help="compare with a report that was kept instead of printing this one; exits with 1 "
                       "if the plan changed or the step got slower", **FILE)  # fmt: skip
    group.add_argument("--check-tolerance", type=percentage, default=0.05, metavar="X",
                       help="how much slower the step may be, 5%% or 0.05 (default: 5%%)")  # fmt: skip
    much = group.add_mutually_exclusive_group()
    much.add_argument("--summary", action="store_true", help="only the verdict and the groups of layers")
    much.add_argument("--full", action="store_true", help="everything, with a line for every layer")

    _add_target(verify)
    verify.add_argument("--plan", help="the plan to verify (default: the one parplan chooses)", **FILE)
    add_options(verify, PlanOptions, "pins")
    verify.add_argument("--pins", **pins_file)
    verify.add_argument("--devices", type=device_count, metavar="N", help=DEVICES)
    verify.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the random inputs (default: 0)")

    _add_target(export)
    export.add_argument("--plan", required=True, help="the plan that `parplan analyze --out` wrote", **FILE)
    export.add_argument(
        "--to",
        choices=("torch", "torchtitan"),
        default="torch",
        help="PyTorch's own (default), or torchtitan's configuration",
    )
    export.add_argument("--out", help="the program; else it is printed", **FILE)

    _add_target(run)
    add_options(run, RunOptions)
    run.add_argument("--json", help=f"the comparison {JSON}", **FILE)
    run.add_argument("--html", help="the comparison with both steps over time, as one page", **FILE)
    run.add_argument("--trace", help="the predicted and a measured step, for Perfetto or chrome://tracing", **FILE)
    run.add_argument("--full", action="store_true", help="a line for every layer; else long models are folded")
    return parser, found


def _add_target(command: _Parser, nargs: str | None = None, **changes: Mapping[str, Any]) -> None:
    command.add_argument("target", nargs=nargs, metavar="TARGET", help="the model, see above")
    add_options(command, TargetOptions, **changes)
    command.add_argument("--verbose", action="store_true", help=VERBOSE)


def _seed(text: str) -> int:
    """A seed as torch takes it."""
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number") from None
    if not 0 <= seed < 2**64:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not from 0 to 2**64 - 1")
    return seed


def _batch(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return whole_number(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None
