"""A check of the files that a command writes, before the work that would be lost."""

from __future__ import annotations

import argparse
import os

from parplan.errors import ParplanError
from parplan.files import check_writable

__all__ = ["check_outputs"]

INPUTS = {
    "pins_file": "--pins",
    "cluster": "--cluster",
    "profile_graph": "--profile-graph",
    "layer_params": "--layer-params",
    "plan": "--plan",
    "check": "--check",
}
"""Options that name a file to read, by where argparse keeps them."""


def check_outputs(options: argparse.Namespace, *outputs: tuple[str, str | None]) -> None:
    """A refusal of outputs that overwrite each other or an input, or cannot be written.

    Args:
        outputs: options and the files that they name; `--json -` is standard output.

    Raises:
        ParplanError: such an output, by name.
    """
    inputs = _inputs(options)
    named: dict[str, tuple[str, str]] = {}
    for option, path in outputs:
        if path is not None:
            place = path if path == "-" else os.path.realpath(path)
            if place in named:
                raise ParplanError(f"{named[place][0]} and {option} both name {path}; give each a file of its own")
            named[place] = option, path
    for place, (option, path) in named.items():
        if path == "-" and option != "--json":
            raise ParplanError(f"{option} -: only --json writes to standard output; name a file")
        if path != "-":
            check_writable(path, option)
        # A plan that is priced again may be kept in its own file, with a note or the batch it was priced for.
        again = options.command == "analyze" and option == "--out"
        if place in inputs and not (again and inputs[place].startswith("--plan ")):
            raise ParplanError(f"{option} {path} would overwrite what is read, {inputs[place]}; name another file")


def _inputs(options: argparse.Namespace) -> dict[str, str]:
    """The files that a command reads, by their real paths, as its line names them."""
    found, target = dict[str, str](), getattr(options, "target", None) or ""
    # model.py, model.py:name, package.module:name or transformers:./config.json
    head, _, name = target.partition(":")
    named = dict.fromkeys((target, target.rpartition(":")[0], name, f"{head.replace('.', '/')}.py"), target)
    for field, option in INPUTS.items():
        if path := getattr(options, field, None):
            named[path] = f"{option} {path}"
    for path, words in named.items():
        if os.path.isfile(path):
            found.setdefault(os.path.realpath(path), words)
    return found
