"""The command line: `parplan analyze` plans and explains, `parplan verify` checks a plan's numbers, and so on.

Nothing heavy is imported before a command needs it, so that `--help`, `--version` and typing errors answer at once.
Exit codes: 0 done; 1 a verification, a diff or a check found a difference, or the doctor something broken; 2 refused,
and one message says why; 70 a bug of parplan; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import gc
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from parplan.cli.options import ProfileOptions, RunOptions, TargetOptions, completion, parse
from parplan.cli.outputs import check_outputs
from parplan.errors import ParplanError
from parplan.files import write_files
from parplan.pins import Pin, parse_pin, pins_from_toml, read_pins
from parplan.plan import Plan
from parplan.planner.option_fields import chosen

if TYPE_CHECKING:
    from rich.console import Console

    from parplan.export.program_text import TorchProgram
    from parplan.export.titan_config import TitanConfig
    from parplan.planner.decision import Decision

__all__ = ["main"]

LONGEST_LINE = 2000
"""Characters of a line of a message; the middle of a longer one is left out."""
DONE, DIFFERS, BROKEN, REFUSED, BUG, INTERRUPTED, PIPE_CLOSED = 0, 1, 1, 2, 70, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code (see the module)."""
    argv = sys.argv[1:] if argv is None else argv
    # Python would go through all that torch has once more at exit, which takes a second; triton, which torch's CUDA
    # builds bring, prints what was not collected then.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
    with _noticed() as pressed:
        try:
            return _run(argv)
        except KeyboardInterrupt:
            return _say("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _drop_stdout()
            return PIPE_CLOSED
        except Exception as error:
            if pressed:
                return _say("interrupted", INTERRUPTED)
            if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
                return _say(f"error: {str(error.filename)[:80]}...: {error.strerror}", REFUSED)
            if "--verbose" in argv or not isinstance(error, ParplanError):
                traceback.print_exc()
            if isinstance(error, ParplanError):
                return _say(f"error: {error}", REFUSED)
            return _say(f"error: a bug of parplan, {type(error).__name__}; please report the lines above", BUG)


@contextlib.contextmanager
def _noticed() -> Iterator[list[int]]:
    """Interrupts, also those that are caught on their way here: some imports catch everything, and fail later."""
    before, pressed = signal.getsignal(signal.SIGINT), list[int]()

    def note(number: int, frame: FrameType | None) -> NoReturn:
        pressed.append(number)
        raise KeyboardInterrupt

    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _run(argv: Sequence[str]) -> int:
    try:
        options = parse(argv)
    except SystemExit:
        if sys.stdout is not None:
            _write("")  # the text of `--help` and `--version` is written out before they end the process
        raise
    options.command_line = shlex.join(["parplan", *argv])
    with warnings.catch_warnings():
        if not options.verbose:  # warnings of libraries are for `--verbose`
            warnings.simplefilter("ignore")
        return _COMMANDS[options.command](options)


def _write(text: str, in_files: bool = False) -> None:
    """Text on standard output, now, so that what goes wrong shows here.

    Args:
        in_files: what was asked for is in files, so that a closed standard output is no loss.

    Raises:
        ParplanError: it is closed, or the disk it leads to is full.
        BrokenPipeError: nobody reads it.
    """
    if sys.stdout is None:
        if in_files:
            return
        raise ParplanError("standard output is closed: the report has no place to go; open it, or name a --json FILE")
    with _stdout_trouble():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _stdout_trouble() -> Iterator[None]:
    """Turn a failing write to standard output into a refusal: it is no bug of parplan."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_stdout()
        raise ParplanError(f"cannot write to standard output: {error.strerror or error}") from error


def _say(text: str, code: int) -> int:
    """A message on standard error; names in it come from files, so that what cannot be seen is written as escapes."""
    from parplan.report.pictures.text import visible

    lines = (visible(line, LONGEST_LINE) for line in text.split("\n"))
    print("parplan:", "\n".join(lines), file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """Nothing more may be written, not even when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _analyze(options: argparse.Namespace) -> int:
    from parplan.cli.pictures import picture_paths, picture_texts
    from parplan.planner.decision import Seconds

    began = time.perf_counter()
    kept = None
    if options.check is not None:
        from parplan.report.saved import load_plan_or_report

        kept = load_plan_or_report(options.check)
        if kept.report is None:
            raise ParplanError(f"--check {options.check} is a plan; name a report that --json wrote, which has a step")
    check_outputs(options, ("--out", options.out), ("--json", options.json), *picture_paths(options))
    plan = _plan(options.plan)
    decision = _decide(options, plan, _pins(options, plan))
    seconds, total_s = decision.seconds, time.perf_counter() - began
    decision = replace(decision, seconds=replace(seconds, start=max(0.0, total_s - seconds.total), total=total_s))
    if options.as_profiled:  # no figure of this moment
        decision = replace(decision, seconds=Seconds(0.0, 0.0, 0.0, 0.0), proof=replace(decision.proof, seconds=0.0))
    texts = {options.out: decision.plan.to_json()} if options.out else {}
    if options.json:
        from parplan.report.as_json import to_json

        texts[options.json] = to_json(decision)
    json_alone = texts.pop("-", "") if options.json == "-" else ""
    pictures, said = picture_texts(options, decision)
    texts.update(pictures)
    write_files(texts)

    def report(console: Console) -> None:
        from parplan.report.pictures.text import visible
        from parplan.report.terminal import Detail, render

        detail = Detail.FULL if options.full else Detail.SUMMARY if options.summary else Detail.DEFAULT
        render(decision, console, detail)
        check = f"; this checks its numbers:\n  parplan verify {options.target} --plan {options.out}"
        if options.profile_graph is not None:
            check = ", for reading: a profile has no model that could run it."
        if options.out:
            said.insert(0, f"Plan written to {options.out}{check}")
        for line in "\n".join(said).splitlines():
            console.print(visible(line, LONGEST_LINE), markup=False, highlight=False, soft_wrap=True)

    if kept is None:
        _write(json_alone or _printed(report), in_files=bool(texts) and not json_alone)
        return DONE
    from parplan.cli.reports import check

    write, good = check(kept, decision, options.check_tolerance)
    if json_alone:
        _write(json_alone)
        print(_printed(write), end="", file=sys.stderr)
    else:
        _write(_printed(write), in_files=bool(texts))
    return DONE if good else DIFFERS


def _diff(options: argparse.Namespace) -> int:
    from parplan.cli.reports import diff

    write, good = diff(options.first, options.second, TargetOptions(**chosen(TargetOptions, options)), options)
    _write(_printed(write))
    return DONE if good else DIFFERS


def _explain(options: argparse.Namespace) -> int:
    from parplan.report.explanation import layer_named, render_explanation
    from parplan.report.saved import load_report

    report = load_report(options.report)
    found = layer_named(report, options.layer)
    _write(_printed(lambda console: render_explanation(report, found, console)))
    return DONE


def _plan(path: str | None) -> Plan | None:
    return None if path is None else Plan.load(path)


def _pins(options: argparse.Namespace, plan: Plan | None) -> tuple[Pin, ...]:
    """The pins, those of the file first; refused before the model is loaded if they cannot be read."""
    from_file = () if options.pins_file is None else pins_from_toml(options.pins_file)
    return read_pins((*from_file, *map(parse_pin, options.pins)), with_plan=plan is not None)


def _decide(options: argparse.Namespace, plan: Plan | None, pins: tuple[Pin, ...]) -> Decision:
    from parplan.cost_models.devices.requested import ClusterRequest, check_names
    from parplan.planner.request import PlanOptions
    from parplan.report.progress import Progress

    check_names(ClusterRequest(**chosen(ClusterRequest, options)))
    keywords = {**chosen(PlanOptions, options), "plan": plan, "pins": pins}
    # What the model prints while it runs is not part of the report.
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        from parplan import api

        if options.profile_graph is not None:
            for name in ("measure", "as_profiled", "precision"):  # of a model, and known not to be given
                del keywords[name]
            return api.analyze_profile(options.profile_graph, batch=options.batch, progress=progress, **keywords)
        progress.phase("load")
        auto = options.batch == "auto"
        named = replace(TargetOptions(**chosen(TargetOptions, options)), batch=None if auto else options.batch)
        target = named.load(meta=not options.measure)
        if plan is not None:
            keywords["pins"] = ()
        else:
            keywords["pins"] = (*target.pins, *pins)
            if options.cluster is None and options.gpus is None:
                keywords["gpus"] = target.gpus
        return api.analyze(
            target.module,
            target.args,
            kwargs=target.kwargs,
            batch="auto" if auto else None,
            notes=target.notes,
            name=target.name,
            progress=progress,
            **keywords,
        )


def _printed(write: Callable[[Console], None]) -> str:
    """The text that `write` prints on a console for standard output; so a closed pipe shows in one place only."""
    from rich.console import Console

    wide = os.environ.get("COLUMNS", "").strip()
    console = Console(width=80 if wide.isdigit() and not int(wide) else None)  # terminals without a size say 0
    with _stdout_trouble(), console.capture() as captured:
        write(console)
    return captured.get()


def _verify(options: argparse.Namespace) -> int:
    from parplan.report.progress import Progress

    plan = _plan(options.plan)
    pins = _pins(options, plan)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress.phase("load")
        from parplan import api
        from parplan.report.verification import render_verification

        target = TargetOptions(**chosen(TargetOptions, options)).load()
        progress.phase("verify")
        found = api.verify(
            target.module,
            target.args,
            kwargs=target.kwargs,
            plan=plan,
            pins=(*target.pins, *pins) if plan is None else (),
            devices=options.devices,
            batch=options.batch,
            seed=options.seed,
            name=target.name,
        )
    _write(_printed(lambda console: render_verification(found, console)))
    return DONE if found.passed else DIFFERS


def _export(options: argparse.Namespace) -> int:
    from parplan.report.progress import Progress

    check_outputs(options, ("--out", options.out))
    plan = Plan.load(options.plan)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress.phase("load")
        from parplan.export.titan_config import titan_config
        from parplan.export.torch_program import torch_program
        from parplan.graph.capture.capture import capture

        named = TargetOptions(**chosen(TargetOptions, options))
        target = replace(named, batch=named.batch or plan.batch).load(meta=True)
        progress.phase("capture")
        graph = capture(target.module, target.args, target.kwargs)
        program: TorchProgram | TitanConfig
        if options.to == "torchtitan":
            program = titan_config(graph, plan)
        else:
            program = torch_program(graph, plan, target.module, target.args, target.kwargs)
    if options.out is None:
        _write(program.text())
        return DONE
    write_files({options.out: program.text()})
    left = "; ".join(program.otherwise)
    said = f"Program written to {options.out}.{f' Otherwise than in the plan: {left}.' if left else ''}\n"
    _write(said, in_files=True)
    return DONE


def _profile(options: argparse.Namespace) -> int:
    from parplan.cli.profile import run

    _write(run(TargetOptions(**chosen(TargetOptions, options)), ProfileOptions(**chosen(ProfileOptions, options))))
    return DONE


def _presets(options: argparse.Namespace) -> int:
    from parplan.report.presets import presets_json, render_presets

    check_outputs(options, ("--json", options.json))
    if options.json in (None, "-"):
        _write(presets_json() if options.json else _printed(render_presets))
    else:
        write_files({options.json: presets_json()})
    return DONE


def _doctor(options: argparse.Namespace) -> int:
    from parplan.cli.doctor import examine, report

    findings = examine()
    _write(report(findings))
    return BROKEN if any(finding.broken for finding in findings) else DONE


def _run_report(options: argparse.Namespace) -> int:
    from parplan.report.progress import Progress

    check_outputs(options, ("--json", options.json), ("--html", options.html), ("--trace", options.trace))
    # torch's profiler, which finds the peak memory, announces itself on standard error otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    plan = _plan(options.plan)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress.phase("run")
        from parplan.cli.run_report import Job, run_report

        target, named = TargetOptions(**chosen(TargetOptions, options)), RunOptions(**chosen(RunOptions, options))
        report = run_report(Job(target, named, plan))
    if report is None:
        return DONE
    from parplan.report.predicted_vs_measured import render_comparison, to_json
    from parplan.runtime.measurement.measured_step import notes, title

    found, learned = report
    measured = found.measured
    said = title(measured), [*notes(measured), *learned]
    texts = {options.json: to_json(found.plan, measured.lines, *said)} if options.json else {}
    if options.trace:
        texts[options.trace] = measured.trace()
    if options.html:
        from parplan.report.pictures.page import measured_html

        texts[options.html] = measured_html(measured)
    json_alone = texts.pop("-", "") if options.json == "-" else ""
    write_files(texts)
    if json_alone:
        _write(json_alone)
        return DONE
    layers = found.predicted.layers
    table = _printed(lambda console: render_comparison(measured.lines, layers, *said, console, options.full))
    _write(table, in_files=bool(texts))
    return DONE


def _completion(options: argparse.Namespace) -> int:
    _write(completion(options.shell))
    return DONE


_COMMANDS = {
    "analyze": _analyze,
    "verify": _verify,
    "export": _export,
    "profile": _profile,
    "run-report": _run_report,
    "diff": _diff,
    "explain": _explain,
    "presets": _presets,
    "doctor": _doctor,
    "completion": _completion,
}
