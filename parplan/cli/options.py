"""What the command line understands: options, their help, and one message for what it does not understand."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from parplan import __version__
from parplan.cluster import MOST_DEVICES
from parplan.cost_models.optimizers import OPTIMIZER_STATES
from parplan.errors import ParplanError

__all__ = ["parse"]

TARGETS = """
TARGET is one of
  model.py              its `model`, or what its function `build()` returns
  model.py:name         a model, a class, or a function that returns a model
  package.module:name   the same from a module that can be imported from here
  layers.cfg            a cuda-convnet2 layer file; its gpu= lines are pins
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
  parplan run-report model.py --devices 2             predicted and measured"""

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
  parplan analyze --profile-graph layers.profile --gpus 16   no model at all"""

VERIFY = f"""\
Runs a plan on logical CPU devices in float64 and compares outputs, loss,
gradients and buffers with the plain model's. Exits with 1 if any differs by
more than 1e-9.
{TARGETS}

examples:
  parplan verify model.py --devices 3         the plan parplan chooses
  parplan verify model.py --plan plan.json    a plan of yours
A few of the example samples are run (two for every replica), or --batch of them."""


PRESETS = """\
Lists the devices and links that --gpu, --link and cluster files know by name,
each number with where it comes from. A ~ marks what is estimated: from memory,
derived from another number, or assumed."""


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

# Optimizers whose state and updates are known.
OPTIMIZERS = ("adam", "adamw", "momentum", "sgd", "rmsprop", "adagrad")


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
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[options.command]
        known = [string for action in command._actions for string in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else ""
        command.error(f"{unknown[0]} is not known{hint}")
    if options.command == "analyze":
        _check_profile_graph(options, commands[options.command])
    return options


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="parplan", description=OVERVIEW, **style)
    parser.add_argument("--version", action="version", version=f"parplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    analyze = commands.add_parser("analyze", help="find, prove and explain a plan", description=ANALYZE, **style)
    verify = commands.add_parser("verify", help="compare a plan's numbers", description=VERIFY, **style)
    presets = commands.add_parser("presets", help="list devices and links known by name", description=PRESETS, **style)
    profile = commands.add_parser("profile", help="measure what plans cost here", description=PROFILE, **style)
    _add_profile(profile)
    presets.add_argument("--json", metavar="FILE", help="the same as JSON; - is standard output, alone")
    presets.add_argument("--verbose", action="store_true", help="show warnings, and where an error was raised")
    _add_target(analyze, needed=False, auto=True)
    _add_profile_graph(analyze)
    _add_cluster(analyze)
    _add_outputs(analyze)
    _add_target(verify)
    verify.add_argument("--plan", metavar="FILE", help="the plan to verify (default: the one parplan chooses)")
    _add_pins(verify)
    verify.add_argument("--devices", type=_devices, metavar="N", help="logical devices (default: the plan's, else 2)")
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0)")
    run = commands.add_parser("run-report", help="run a plan and look back", description=RUN_REPORT, **style)
    _add_target(run)
    _add_run(run)
    return parser, {"run-report": run, "analyze": analyze, "verify": verify, "presets": presets, "profile": profile}


def _add_target(command: _Parser, needed: bool = True, auto: bool = False) -> None:
    command.add_argument("target", nargs=None if needed else "?", metavar="TARGET", help="the model, see above")
    fastest = "; auto: the smallest of nearly the most samples/s" if auto else ""
    command.add_argument("--batch", type=_batch if auto else _count, metavar="N", help="samples in one step over all "
                         f"devices, instead of the example inputs' batch{fastest}")  # fmt: skip
    command.add_argument("--input", action="append", default=[], metavar="SHAPE", help="a positional input such as "
                         "64x3x224x224 or 64x128:int64, or a keyword one, mask=64x128:bool; repeatable")  # fmt: skip
    command.add_argument("--layer-params", metavar="FILE", help="of a cuda-convnet2 layer file (default: "
                         "layer-params-X.cfg beside layers-X.cfg)")  # fmt: skip
    command.add_argument("--verbose", action="store_true", help="show warnings, and where an error was raised")


def _add_run(command: _Parser) -> None:
    command.add_argument("--plan", metavar="FILE", help="the plan to run (default: the one parplan chooses)")
    command.add_argument("--devices", type=_devices, metavar="N", help="logical devices (default: the plan's, else 2)")
    command.add_argument("--processes", action="store_true", help="one process of one thread for each device")
    command.add_argument("--steps", type=_count, default=20, metavar="K", help="steps to record (default: 20)")
    command.add_argument("--optimizer", choices=tuple(OPTIMIZER_STATES), default="adam",
                         help="what updates in every step (default: adam)")  # fmt: skip
    command.add_argument("--learn", action="store_true", help="keep what layers took in the profile store, plan again "
                         "with it, and say whether the choice would change")  # fmt: skip
    command.add_argument("--json", metavar="FILE", help="the comparison as JSON; - is standard output, alone")
    command.add_argument("--all-layers", action="store_true", help="a line for every layer; else long ones are folded")


def _add_profile(command: _Parser) -> None:
    _add_target(command, needed=False)
    command.add_argument("--devices", type=_devices, metavar="N", help="how many to plan for later (default: the GPUs "
                         "that are here, else 1 CPU device)")  # fmt: skip
    command.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="whose updates are timed "
                         "(default: adam)")  # fmt: skip
    command.add_argument("--time-limit", type=_positive, default=600.0, metavar="S", help="seconds for the parts of "
                         "layers (default: 600); the same command goes on from there")  # fmt: skip
    command.add_argument("--again", action="store_true", help="measure also what is known")
    command.add_argument("--export", dest="exported", metavar="FILE", help="write everything that is kept, as text")
    command.add_argument("--import", dest="imported", metavar="FILE", help="add what somebody exported")


def _add_profile_graph(command: _Parser) -> None:
    command.add_argument("--profile-graph", metavar="FILE", help="instead of TARGET: layers, edges, times and sizes "
                         "that somebody measured (the format: docs/profile-graph.md)")  # fmt: skip


def _check_profile_graph(options: argparse.Namespace, command: _Parser) -> None:
    """A model or a profile, and with a profile nothing that a model is needed for."""
    if options.command != "analyze":
        return
    file = options.profile_graph
    if options.target is None and file is None:
        command.error("the following arguments are required: TARGET")
    if file is None:
        return
    if options.target is not None:
        command.error(f"a model ({options.target}) and --profile-graph {file} are both given; leave out one")
    given = {"--measure": options.measure, "--input": options.input, "--precision": options.precision != "fp32"}
    if options.batch == "auto":
        command.error(f"--batch auto needs a model, and the times of {file} are of one batch; say --batch N")
    for option, set_ in given.items():
        if set_:
            command.error(f"{option} needs a model, and --profile-graph {file} has none; leave out {option}")


def _add_cluster(command: _Parser) -> None:
    group = command.add_argument_group("what to plan for")
    group.add_argument("--gpus", type=_gpus, metavar="N", help="how many, or hosts x GPUs of each, 2x8 (default: the "
                       "plan's, with --plan, else those that are here, else 1)")  # fmt: skip
    group.add_argument("--gpu", metavar="NAME", help="which kind, such as v100-sxm2 or h100-sxm; `parplan presets` "
                       "lists all (default: those that are here, else a preset, and the report says so)")  # fmt: skip
    group.add_argument("--link", metavar="NAME", help="what joins them (default: the GPU's usual link)")
    group.add_argument("--cluster", metavar="FILE", help="instead of these three: a TOML file with devices, of several "
                       "kinds if need be, and levels of links (docs/clusters.md)")  # fmt: skip
    group.add_argument("--memory", type=_memory, metavar="GIB", help="memory a plan may use on each, in GiB")
    group.add_argument("--precision", choices=("fp32", "tf32", "fp16", "bf16"), default="fp32")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZER_STATES), default="adam",
                       help="whose state has to fit in memory (default: adam)")  # fmt: skip
    group.add_argument("--rules", choices=("default", "strict"), default="default", help="strict: cuda-convnet2's "
                       "divisibility rules to the letter, no transfer may bend them")  # fmt: skip
    group.add_argument("--scheme", choices=("auto", "gather", "broadcast", "interleave"), default="auto",
                       help="how samples get from many replicas to layers with fewer: all at once, one replica's or a "
                       "share of each at a time (default: as is fastest)")  # fmt: skip
    group.add_argument("--measure", action="store_true", help="time the layers on the device that is here")
    group.add_argument("--time-limit", type=_positive, default=60.0, metavar="S",
                       help="seconds for the solver (default: 60); then the best plan found, with its gap")  # fmt: skip
    group.add_argument("--plan", metavar="FILE", help="check and price this plan instead of searching for one")
    _add_pins(group)


def _add_pins(command: argparse._ActionsContainer) -> None:
    command.add_argument("--pin", action="append", default=[], metavar="PATTERN=WORDS", help="decide some layers by "
                         "hand: 'fc6=shards:4', 'features.*=replicas:4', 'conv1=gpu:0,1'; repeatable, the later one "
                         "counts (docs/pins.md)")  # fmt: skip
    command.add_argument("--pins", metavar="FILE", help="the same in a TOML file with a table [pins], before --pin")


def _add_outputs(command: _Parser) -> None:
    group = command.add_argument_group("what to write")
    group.add_argument("--out", metavar="FILE", help="the plan, as JSON")
    group.add_argument("--json", metavar="FILE", help="the report's facts, as JSON; - is standard output, alone")
    group.add_argument("--all-layers", action="store_true", help="a line for every layer; else long models are folded")


def _gpus(text: str) -> int | str:
    """A number, or hosts x GPUs left as text; what is too many or too few is told by who counts them."""
    hosts, times, each = text.partition("x")
    if text.lstrip("+-").isdecimal() and len(text) <= 12:
        return int(text)
    if times and hosts.isdecimal() and each.isdecimal():
        return text
    raise argparse.ArgumentTypeError(f"{text} is neither a number, such as 16, nor hosts x GPUs of each, such as 2x8")


# GiB: from a byte-sized slip up to more than any device has; outside it is a mistake of unit.
LEAST_MEMORY, MOST_MEMORY = 1e-6, 2.0**20


def _memory(text: str) -> float:
    value = _positive(text)
    if not LEAST_MEMORY <= value <= MOST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text} GiB is not plausible; give GiB (2^30 bytes) of a device, such as 16")
    return value


def _batch(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return _count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor auto") from None


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _devices(text: str) -> int:
    value = _count(text)
    if value > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text}: parplan plans for up to {MOST_DEVICES} devices")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value
