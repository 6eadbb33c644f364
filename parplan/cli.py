"""The command line: `parplan analyze` plans and explains, `parplan verify` checks a plan's numbers.

Nothing heavy is imported before a command needs it, so that `--help`, `--version` and typing errors answer at once.
Exit codes: 0 done; 1 a verification found a difference; 2 refused, and one message says why; 70 a bug of parplan;
130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from parplan.cli_options import parse
from parplan.errors import ParplanError

if TYPE_CHECKING:
    from rich.console import Console

    from parplan.plan import Plan
    from parplan.planner.decision import Decision

__all__ = ["main"]

DONE, DIFFERS, REFUSED, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 70, 130, 141
GIB = 2**30


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code (see the module)."""
    verbose = "--verbose" in (sys.argv[1:] if argv is None else argv)
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        with _warnings(shown=options.verbose):
            code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except ParplanError as error:
        if verbose:
            traceback.print_exc()
        return _say(f"error: {error}", REFUSED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _pipe_closed()
    except Exception as error:
        traceback.print_exc()
        return _say(f"error: a bug of parplan, {type(error).__name__}; please report the lines above", BUG)


def _say(text: str, code: int) -> int:
    print(f"parplan: {text}", file=sys.stderr)
    return code


def _pipe_closed() -> int:
    """Nothing to say; and nothing more may be written, not even when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return PIPE_CLOSED


@contextlib.contextmanager
def _warnings(shown: bool) -> Iterator[None]:
    """Warnings of libraries are for `--verbose`."""
    with warnings.catch_warnings():
        if not shown:
            warnings.simplefilter("ignore")
        yield


def _analyze(options: argparse.Namespace) -> int:
    from parplan.report.output import check_writable, write_files

    files = {path: option for option, path in (("--out", options.out), ("--json", options.json)) if path}
    if options.out and options.out == options.json:
        raise ParplanError(f"--out and --json both name {options.out}; give each a file of its own")
    for path, option in files.items():
        if not (path == "-" and option == "--json"):
            check_writable(path, option)
    decision = _decide(options, _plan(options.plan))
    texts = {options.out: decision.plan.to_json()} if options.out else {}
    if options.json:
        from parplan.report.facts import to_json

        texts[options.json] = to_json(decision)
    json_alone = texts.pop("-", "") if options.json == "-" else ""
    write_files(texts)
    sys.stdout.write(json_alone or _report(decision, options))
    return DONE


def _plan(path: str | None) -> Plan | None:
    if path is None:
        return None
    from parplan.plan import Plan

    return Plan.load(path)


def _decide(options: argparse.Namespace, plan: Plan | None) -> Decision:
    from parplan.report.progress import Progress

    # What the model prints while it runs is not part of the report.
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress.phase("load")
        from parplan import api
        from parplan.target import load

        target = load(options.target, options.input, options.batch)
        return api.analyze(
            target.module,
            target.args,
            kwargs=target.kwargs,
            gpus=options.gpus,
            gpu=options.gpu,
            link=options.link,
            rules=options.rules,
            precision=options.precision,
            optimizer=options.optimizer,
            memory_bytes=None if options.memory is None else int(options.memory * GIB),
            measure=options.measure,
            time_limit_s=options.time_limit,
            plan=plan,
            name=target.name,
            progress=progress,
        )


def _report(decision: Decision, options: argparse.Namespace) -> str:
    from parplan.report.terminal import render

    def written(console: Console) -> None:
        render(decision, console, options.all_layers)
        if options.out:
            lines = f"Plan written to {options.out}; this checks its numbers:\n  parplan verify {options.target} "
            console.print(f"{lines}--plan {options.out}", markup=False, highlight=False, soft_wrap=True)

    return _printed(written)


def _printed(write: Callable[[Console], None]) -> str:
    """What `write` prints on a console for standard output, as one text, so that a closed pipe shows in one place."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        write(console)
    return captured.get()


def _verify(options: argparse.Namespace) -> int:
    from parplan.report.progress import Progress

    plan = _plan(options.plan)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress.phase("load")
        from parplan import api
        from parplan.report.verification import render_verification
        from parplan.target import load

        target = load(options.target, options.input, options.batch)
        progress.phase("verify")
        found = api.verify(
            target.module,
            target.args,
            kwargs=target.kwargs,
            plan=plan,
            devices=options.devices,
            batch=options.batch,
            seed=options.seed,
        )
    sys.stdout.write(_printed(lambda console: render_verification(found, console)))
    return DONE if found.passed else DIFFERS


_COMMANDS = {"analyze": _analyze, "verify": _verify}
