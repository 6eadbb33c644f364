"""What the command line understands: options, their help, and one message for what it does not understand."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from parplan import __version__
from parplan.errors import ParplanError

__all__ = ["parse"]

TARGETS = """
TARGET is one of
  model.py              its `model`, or what its function `build()` returns
  model.py:name         a model, a class, or a function that returns a model
  package.module:name   the same from a module that can be imported from here
The inputs are `example_inputs` of the same file: a tensor, a tuple of
arguments, a dict of keyword arguments, or a function that returns one;
`--input` replaces them."""

OVERVIEW = """\
Plans a PyTorch model over several devices, proves the plan, explains it,
and checks its numbers.

  parplan analyze model.py --gpus 4                   plan for 4 GPUs
  parplan analyze model.py --gpus 4 --out plan.json   and keep the plan
  parplan verify model.py --plan plan.json            the plain model's numbers?"""

ANALYZE = f"""\
Finds the fastest plan for a model on some GPUs and says why.
The GPUs need not be here.
{TARGETS}

examples:
  parplan analyze model.py --gpus 4
  parplan analyze model.py --gpus 8 --gpu v100-sxm2 --batch 1024
  parplan analyze net.py:Net --input 64x128:int64 --input mask=64x128:bool
  parplan analyze model.py --gpus 4 --plan edited.json   price a plan of yours
  parplan analyze model.py --gpus 4 --json - | jq .predicted.step_s"""

VERIFY = f"""\
Runs a plan on logical CPU devices in float64 and compares outputs, loss,
gradients and buffers with the plain model's. Exits with 1 if any differs by
more than 1e-9.
{TARGETS}

examples:
  parplan verify model.py --devices 3         the plan parplan chooses
  parplan verify model.py --plan plan.json    a plan of yours
A few of the example samples are run (two for every replica), or --batch of them."""


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
        raise ParplanError("say what to do: " + " or ".join(f"parplan {name} TARGET" for name in commands))
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[options.command]
        known = [string for action in command._actions for string in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.7)
        hint = f"; did you mean {close[0]}?" if close else ""
        command.error(f"{unknown[0]} is not known{hint}")
    return options


def _parsers() -> tuple[_Parser, dict[str, _Parser]]:
    style: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = _Parser(prog="parplan", description=OVERVIEW, **style)
    parser.add_argument("--version", action="version", version=f"parplan {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    analyze = commands.add_parser("analyze", help="find, prove and explain a plan", description=ANALYZE, **style)
    verify = commands.add_parser("verify", help="compare a plan's numbers", description=VERIFY, **style)
    _add_target(analyze)
    _add_cluster(analyze)
    _add_outputs(analyze)
    _add_target(verify)
    verify.add_argument("--plan", metavar="FILE", help="the plan to verify (default: the one parplan chooses)")
    verify.add_argument("--devices", type=_count, metavar="N", help="logical devices (default: the plan's, else 2)")
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="of the random inputs (default: 0)")
    return parser, {"analyze": analyze, "verify": verify}


def _add_target(command: _Parser) -> None:
    command.add_argument("target", metavar="TARGET", help="the model, see above")
    command.add_argument("--batch", type=_count, metavar="N", help="samples in one step over all devices, instead of "
                         "the example inputs' batch")  # fmt: skip
    command.add_argument("--input", action="append", default=[], metavar="SHAPE", help="a positional input such as "
                         "64x3x224x224 or 64x128:int64, or a keyword one, mask=64x128:bool; repeatable")  # fmt: skip
    command.add_argument("--verbose", action="store_true", help="show warnings, and where an error was raised")


def _add_cluster(command: _Parser) -> None:
    group = command.add_argument_group("what to plan for")
    group.add_argument("--gpus", type=int, metavar="N", help="how many (default: those that are here, else 1)")
    group.add_argument("--gpu", metavar="NAME", help="which kind, such as v100-sxm2 or h100-sxm; a wrong name lists "
                       "all (default: those that are here, else a preset, and the report says so)")  # fmt: skip
    group.add_argument("--link", metavar="NAME", help="what joins them (default: the GPU's usual link)")
    group.add_argument("--memory", type=_positive, metavar="GIB", help="memory a plan may use on each, in GiB")
    group.add_argument("--precision", choices=("fp32", "tf32", "fp16", "bf16"), default="fp32")
    group.add_argument("--optimizer", choices=("adam", "adamw", "momentum", "sgd"), default="adam",
                       help="whose state has to fit in memory (default: adam)")  # fmt: skip
    group.add_argument("--rules", choices=("default", "strict"), default="default", help="strict: cuda-convnet2's "
                       "divisibility rules to the letter, no transfer may bend them")  # fmt: skip
    group.add_argument("--measure", action="store_true", help="time the layers on the device that is here")
    group.add_argument("--time-limit", type=_positive, default=60.0, metavar="S",
                       help="seconds for the solver (default: 60); then the best plan found, with its gap")  # fmt: skip
    group.add_argument("--plan", metavar="FILE", help="check and price this plan instead of searching for one")


def _add_outputs(command: _Parser) -> None:
    group = command.add_argument_group("what to write")
    group.add_argument("--out", metavar="FILE", help="the plan, as JSON")
    group.add_argument("--json", metavar="FILE", help="the report's facts, as JSON; - is standard output, alone")
    group.add_argument("--all-layers", action="store_true", help="a line for every layer; else long models are folded")


def _count(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value
