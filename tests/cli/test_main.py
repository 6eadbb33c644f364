"""The command line: what reaches the planner, what is written where, and one message for everything refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from parplan import __version__, api
from parplan.cli.main import main
from parplan.errors import CaptureError, ClusterError, InfeasiblePlan, RuleError
from parplan.plan import Plan
from parplan.planner.decision import Seconds
from parplan.report.analysis import Analysis
from parplan.report.as_json import to_json
from parplan.verification import VerificationRow
from tests.report.decisions import alexnet

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn
print("a print of the model's file")
class Net(nn.Linear):
    pass
model = Net(6, 2)
example_inputs = torch.randn(8, 6)
"""


@dataclass
class Calls:
    """What the planner was asked, and what it does."""

    arguments: dict[str, Any]
    result: Callable[[], Any]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model file in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A planner and a verifier that answer at once."""
    seen = Calls({}, alexnet)

    def answer(module: Any, inputs: Any = None, **options: Any) -> Any:
        seen.arguments = {"module": type(module).__name__, "shape": tuple(inputs[0].shape), **options}
        print("a print of the model while it runs")
        return seen.result()

    monkeypatch.setattr(api, "analyze", answer)
    monkeypatch.setattr(api, "verify", answer)
    return seen


def raising(error: BaseException) -> Callable[[], Any]:
    """A planner that fails."""

    def fail() -> Any:
        raise error

    return fail


def test_analyze_prints_the_report_and_nothing_else_on_stdout(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", model, "--gpus", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Use     this plan on all 4 devices, a hybrid of data and model parallel")
    assert "OPTIMAL: no plan of this model is faster" in " ".join(out.split())
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert err.splitlines() == ["a print of the model's file", "a print of the model while it runs"]


def test_defaults_reach_the_planner(model: str, calls: Calls) -> None:
    assert main(["analyze", model]) == 0
    given = calls.arguments
    assert given.pop("progress") is not None
    assert given == {
        "module": "Net", "shape": (8, 6), "kwargs": {}, "batch": None, "gpus": None, "gpu": None, "link": None,
        "cluster": None, "rules": "default", "scheme": "auto", "micro_batches": None, "stages": None,
        "schedule": None,
        "precision": "fp32", "optimizer": "adam", "memory_bytes": None, "measure": False, "as_profiled": False,
        "time_limit_s": 60.0,
        "tolerance": 0.03,
        "plan": None, "pins": (), "notes": (), "name": "Net",
    }  # fmt: skip


CLUSTER = str(next((ROOT / "examples" / "clusters").glob("*.toml")))
OPTIONS = [
    ("--gpus 8", "gpus", 8),
    ("--gpus 2x8", "gpus", "2x8"),
    (f"--cluster {CLUSTER}", "cluster", CLUSTER),
    ("--gpu v100-sxm2", "gpu", "v100-sxm2"),
    ("--link pcie3", "link", "pcie3"),
    ("--rules strict", "rules", "strict"),
    ("--scheme broadcast", "scheme", "broadcast"),
    ("--micro-batches 4", "micro_batches", 4),
    ("--stages 2", "stages", 2),
    ("--schedule gpipe", "schedule", "gpipe"),
    ("--precision bf16", "precision", "bf16"),
    ("--optimizer sgd", "optimizer", "sgd"),
    ("--memory 1.5", "memory_bytes", 3 * 2**29),
    ("--measure", "measure", True),
    ("--as-profiled", "as_profiled", True),
    ("--time-limit 2.5", "time_limit_s", 2.5),
    ("--tolerance 5%", "tolerance", 0.05),
    ("--batch 64", "shape", (64, 6)),
    ("--batch auto", "batch", "auto"),
    ("--batch auto", "shape", (8, 6)),
    ("--input 5x6 --batch 10", "shape", (10, 6)),
]


@pytest.mark.parametrize(("words", "name", "value"), OPTIONS)
def test_options_reach_the_planner(model: str, calls: Calls, words: str, name: str, value: object) -> None:
    assert main(["analyze", model, *words.split()]) == 0
    assert calls.arguments[name] == value


def test_a_plan_is_read_before_the_model(model: str, calls: Calls, tmp_path: Path) -> None:
    plan = alexnet().plan
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert main(["analyze", model, "--plan", "plan.json"]) == 0
    assert calls.arguments["plan"] == plan


def test_summary_and_full(model: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.report.decisions import resnet

    calls.result = resnet
    lengths = []
    for more in (["--summary"], [], ["--full"]):
        assert main(["analyze", model, *more]) == 0
        lengths.append(len(capsys.readouterr().out.splitlines()))
    assert lengths[0] < 24 < lengths[1] < 90 < 175 < lengths[2]
    assert main(["analyze", model, "--summary", "--full"]) == 2


def test_the_time_that_parplan_took_is_that_of_the_whole_command(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.result = lambda: replace(alexnet(), seconds=Seconds(0.0, 0.0, 0.0, 0.0))
    assert main(["analyze", model, "--json", "report.json"]) == 0
    assert "from the start of the command to the plan:" in " ".join(capsys.readouterr().out.split())
    seconds = json.loads(Path("report.json").read_text())["seconds"]
    assert seconds["start"] == seconds["total"] > 0


# ---- what is written ------------------------------------------------------------------------------------------------


def test_out_and_json_are_written(model: str, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", model, "--out", "plan.json", "--json", "report.json"]) == 0
    assert Plan.load(tmp_path / "plan.json") == alexnet().plan
    assert json.loads((tmp_path / "report.json").read_text())["schema"] == "parplan.report/1"
    out = capsys.readouterr().out
    assert out.endswith(
        "Plan written to plan.json; this checks its numbers:\n  parplan verify net.py --plan plan.json\n"
    )


def test_json_on_stdout_is_alone(model: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", model, "--json", "-", "--out", "plan.json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "AlexNet"
    assert Path("plan.json").exists()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        pytest.param(KeyboardInterrupt(), 130, "parplan: interrupted", id="interrupt"),
        pytest.param(InfeasiblePlan("no"), 2, "parplan: error: no", id="refusal"),
        pytest.param(ZeroDivisionError(), 70, "a bug of parplan, ZeroDivisionError", id="bug"),
    ],
)
def test_a_failure_leaves_files_as_they_were(
    model: str, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int,
    words: str,
) -> None:  # fmt: skip
    calls.result = raising(error)
    (tmp_path / "plan.json").write_text("as it was")
    assert main(["analyze", model, "--out", "plan.json", "--json", "report.json"]) == code
    assert words in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "plan.json").read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["net.py", "plan.json"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("analyze net.py --out net.py", "--out net.py would overwrite what is read, net.py"),
        ("analyze net.py --json ./net.py", "--json ./net.py would overwrite what is read, net.py"),
        ("analyze net.py --pins pins.toml --json pins.toml", "would overwrite what is read, --pins pins.toml"),
        ("analyze net.py --cluster c.toml --json c.toml", "would overwrite what is read, --cluster c.toml"),
        ("analyze net.py:model --out net.py", "--out net.py would overwrite what is read, net.py:model"),
        ("analyze net:model --html net.py", "--html net.py would overwrite what is read, net:model"),
        ("analyze net.py --check r.json --json ./r.json", "would overwrite what is read, --check r.json"),
        ("analyze net.py --plan p.json --json p.json", "would overwrite what is read, --plan p.json"),
        ("export net.py --plan p.json --out p.json", "would overwrite what is read, --plan p.json"),
        ("run-report net.py --plan p.json --trace p.json", "would overwrite what is read, --plan p.json"),
        ("analyze net.py --out one --json ./one", "--out and --json both name ./one"),
        ("analyze net.py --out -", "only --json writes to standard output"),
        ("verify net.py --seed 99999999999999999999999", "is not from 0 to 2**64 - 1"),
        ("verify net.py --seed x", "'x' is no whole number"),
    ],
)
def test_what_is_read_is_not_overwritten(
    model: str, calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, words: str
) -> None:
    (tmp_path / "c.toml").write_text("")
    (tmp_path / "pins.toml").write_text("[pins]\n")
    (tmp_path / "p.json").write_text(alexnet().plan.to_json())
    (tmp_path / "r.json").write_text(to_json(alexnet()))
    before = {path: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert main(asked.split()) == 2
    assert words in capsys.readouterr().err
    assert {path: path.read_text() for path in before} == before
    assert not (tmp_path / "one").exists()


def test_a_plan_that_is_priced_again_may_keep_its_file(model: str, calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(replace(alexnet().plan, note="old").to_json())
    assert main(["analyze", model, "--plan", "p.json", "--out", "p.json"]) == 0
    assert Plan.load("p.json") == alexnet().plan


def test_a_terminal_without_a_size_has_a_usual_one(
    model: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pseudo-terminals without a size say COLUMNS=0, and nothing was printed."""
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["analyze", model]) == 0
    assert "Proven" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("analyze {} --gpus 0", "--gpus 0: a plan needs at least 1 device"),
        ("analyze {} --gpus 3x0", "--gpus 3x0: a plan needs at least 1 device"),
        ("analyze {} --gpu nope", "there is no device preset 'nope'"),
        ("analyze {} --link nope", "there is no link preset 'nope'"),
        ("analyze {} --gpus 4 --cluster c.toml", "leave out --gpus"),
        ("analyze {} --gpu k20 --measure", "--measure times the devices of this machine, which cannot stand for k20"),
        ("analyze {} --cluster c.toml --measure", "which cannot stand for those of --cluster"),
        ("verify {} --devices 0", "--devices: 0 is not a whole number of at least 1"),
        ("run-report {} --devices 0", "--devices: 0 is not a whole number of at least 1"),
    ],
)
def test_devices_that_cannot_be_are_refused_before_the_model_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str, words: str
) -> None:
    model = tmp_path / "model.py"
    model.write_text("raise RuntimeError('imported')\n")
    assert main(asked.format(model).split()) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "imported" not in said


@pytest.mark.parametrize("error", [AttributeError("half imported"), InfeasiblePlan("no")], ids=["bug", "refusal"])
def test_an_interrupt_that_a_library_swallows_is_no_bug(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Some imports catch everything, and what they leave half done fails later."""

    def swallow() -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    calls.result = swallow
    before = signal.getsignal(signal.SIGINT)
    assert main(["analyze", model]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    err = capsys.readouterr().err
    assert err.splitlines()[-1] == "parplan: interrupted"
    assert "Traceback" not in err


# ---- what is refused ------------------------------------------------------------------------------------------------

USAGE = [
    ("", "say what to do, such as parplan analyze TARGET; commands are "),
    (
        "xyz net.py",
        "xyz is no command; commands are analyze, verify, export, diff, explain, presets, profile, run-report, doctor, "
        "completion",
    ),
    ("anlyze net.py", "anlyze is no command; did you mean analyze? (see `parplan --help`)"),
    ("analyze nowhere.py --gpus 0", "--gpus 0: a plan needs at least 1 device"),
    ("analyze nowhere.py --gpu a200", "there is no device preset 'a200' (did you mean"),
    ("analyze nowhere.py --link nvlnk3", "there is no link preset 'nvlnk3' (did you mean"),
    ("analyze nowhere.py --cluster none.toml", "cannot read the cluster none.toml"),
    ("analyze", "the following arguments are required: TARGET (see `parplan analyze --help`)"),
    ("analyze net.py --gps 4", "--gps is not known; did you mean --gpus? (see `parplan analyze --help`)"),
    ("analyze net.py --gpu=x --bach=3", "--bach=3 is not known; did you mean --batch?"),
    ("analyze net.py --zzz", "--zzz is not known (see"),
    ("analyze net.py other.py", "other.py is not known"),
    ("analyze net.py --prec fp16", "--prec is not known; did you mean --precision?"),
    ("analyze net.py --gpus four", "argument --gpus: four is neither a number, such as 16, nor hosts x GPUs"),
    ("analyze net.py --gpus 2x", "argument --gpus: 2x is neither a number"),
    ("analyze net.py --memory 1e300", "argument --memory: 1e300 GiB is not plausible; give GiB (2^30 bytes)"),
    ("analyze net.py --memory 1e-300", "argument --memory: 1e-300 GiB is not plausible"),
    ("analyze net.py --out=", "--out: the name of the file is empty; name one"),
    ("analyze net.py --json=", "--json: the name of the file is empty; name one"),
    ("presets --json=", "--json: the name of the file is empty; name one"),
    ("presets k20", "k20 is not known (see `parplan presets --help`)"),
    ("analyze net.py --precision fp8", "argument --precision: invalid choice: 'fp8'"),
    ("analyze net.py --batch 0", "argument --batch: 0 is not a whole number of at least 1"),
    ("analyze net.py --batch 1.5", "argument --batch: 1.5 is not a whole number of at least 1, nor auto"),
    ("analyze net.py --check-tolerance x%", "argument --check-tolerance: x% is not a share from 0 on"),
    ("analyze net.py --tolerance 100%", "argument --tolerance: 100% is not a share from 0 up to 1, such as 1% or 0.01"),
    ("analyze net.py --check none.json", "cannot read the report none.json"),
    ("analyze --profile-graph a.profile --as-profiled", "--as-profiled needs a model"),
    ("diff net.py net.py", "net.py is neither a plan nor a report: it is not JSON"),
    ("explain net.py fc", "net.py is neither a plan nor a report: it is not JSON"),
    ("analyze net.py --memory 0", "argument --memory: 0 is not a number above 0"),
    ("analyze net.py --time-limit inf", "argument --time-limit: inf is not a number above 0"),
    ("analyze net.py --out nowhere/plan.json", "--out nowhere/plan.json: there is no folder"),
    ("analyze net.py --json .", "--json .: that is a folder; name a file in it"),
    ("analyze net.py --out x --json x", "--out and --json both name x; give each a file of its own"),
    ("analyze net.py --out - --json -", "--out and --json both name -; give each a file of its own"),
    ("run-report net.py --json - --trace -", "--json and --trace both name -; give each a file of its own"),
    ("analyze net.py --plan none.json", "cannot read the plan none.json"),
    ("analyze net.py --plan net.py", "net.py is not a plan"),
    ("analyze nett.py", "nett.py: no such file; did you mean net.py?"),
    ("analyze net.py --input 3,4", "--input 3,4: write sizes with x between them"),
    ("analyze --profile-graph net.profile --batch auto", "--batch auto needs a model, and the times of net.profile"),
    ("verify net.py --batch auto", "argument --batch: auto is not a whole number of at least 1"),
    ("verify net.py --gpus 4", "--gpus is not known (see `parplan verify --help`)"),
    ("verify net.py --devices 0", "argument --devices: 0 is not a whole number of at least 1"),
    ("verify net.py --devices 99999999", "argument --devices: 99999999: parplan plans for up to 1024 devices"),
    ("run-report net.py --devices 1025", "argument --devices: 1025: parplan plans for up to 1024 devices"),
    ("profile net.py --devices 1025", "argument --devices: 1025: parplan plans for up to 1024 devices"),
]


@pytest.mark.parametrize(("line", "words"), USAGE)
def test_what_is_typed_wrong_is_one_message(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    (message,) = (text for text in err.splitlines() if text.startswith("parplan: "))
    assert message.startswith(f"parplan: error: {words}")
    assert "Traceback" not in err
    assert out == ""
    assert calls.arguments == {}


@pytest.mark.parametrize(
    "error",
    [
        ClusterError("0 devices: a plan needs at least 1"),
        CaptureError("net.py:12: data-dependent branch"),
        InfeasiblePlan("fc6 is 3.2 GiB short"),
        RuleError("R1", "conv1", "batch 10 cannot be cut in 4"),
    ],
)
def test_what_the_planner_refuses_is_one_message(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    calls.result = raising(error)
    assert main(["analyze", model]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", f"parplan: error: {error}")
    assert "Traceback" not in err


def test_verbose_says_where(model: str, calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    calls.result = raising(InfeasiblePlan("no"))
    assert main(["analyze", model, "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


# ---- verify ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A verification."""

    rows: tuple[VerificationRow, ...]
    passed: bool
    batch: int = 8
    plan: Plan = alexnet().plan
    notes: tuple[str, ...] = ()


@pytest.mark.parametrize(("difference", "passed", "code"), [(1e-16, True, 0), (1e-3, False, 1)])
def test_verify(
    model: str, calls: Calls, capsys: pytest.CaptureFixture[str], difference: float, passed: bool, code: int
) -> None:
    calls.result = lambda: Found((VerificationRow("gradients", 2, difference, "weight"),), passed)
    assert main(["verify", model, "--devices", "3", "--batch", "12", "--seed", "7"]) == code
    out = capsys.readouterr().out
    assert ("PASSED" in out, "FAILED" in out) == (passed, not passed)
    given = calls.arguments
    assert (given["shape"], given["devices"], given["seed"], given["plan"]) == ((12, 6), 3, 7, None)


# ---- as a process ---------------------------------------------------------------------------------------------------


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "parplan", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("--version", f"parplan {__version__}\n"),
        ("--help", "usage: parplan "),
        ("analyze --help", "usage: parplan analyze"),
    ],
)
def test_help_and_version(words: str, starts: str) -> None:
    done = run(*words.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(starts)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_command_leaves_nothing_for_the_collector_at_exit() -> None:
    """Going through torch's objects once more took a second of every command."""
    code = (
        "import atexit, gc\natexit.register(lambda: print(gc.get_freeze_count() > 1000))\n"
        "from parplan.cli.main import main\nmain(['presets'])\nprint(gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["0", "True"]


@pytest.mark.parametrize("words", [["--version"], ["analyze", "--help"], ["analyze", "--gps"]])
def test_answers_without_loading_anything_heavy(words: list[str]) -> None:
    code = (
        "import sys, contextlib\nfrom parplan.cli.main import main\n"
        f"with contextlib.suppress(SystemExit):\n    main({words!r})\n"
        "print(*sorted({'torch', 'ortools', 'networkx', 'numpy', 'rich'} & sys.modules.keys()), 'loaded')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded"]


def test_an_interrupt_of_the_first_imports_is_no_traceback() -> None:
    code = (
        "import signal, sys\nfrom parplan.__main__ import main\n"
        "class Interrupting:\n    def find_spec(self, name, *_):\n"
        "        name == 'parplan.cli.options' and signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "parplan: interrupted\n")


@pytest.mark.full
def test_a_refusal_as_a_process(tmp_path: Path) -> None:
    done = run("analyze", "model.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "parplan: error: model.py: no such file\n")


@pytest.mark.full
def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """The reader is gone before the report is printed."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nfrom parplan import api\nfrom parplan.cli.main import main\n"
        "from tests.report.decisions import alexnet\n"
        "api.analyze = lambda *args, **options: alexnet()\n"
        "sys.exit(main(['analyze', 'net.py', '--out', 'plan.json']))\n"
    )
    (tmp_path / "net.py").write_text(MODEL)
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True, env=environment,
        check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "a print of the model's file\n")
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("words", [["presets"], ["presets", "--json", "-"], ["--help"], ["--version"]])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_full_disk_is_refused_and_no_bug(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "parplan", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2, "parplan: error: cannot write to standard output: No space left on device\n",
    )  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="closes file descriptor 1 as a POSIX shell does")
def test_a_closed_standard_output_is_refused_and_no_bug() -> None:
    command = f"exec {sys.executable} -m parplan presets >&-"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("parplan: error: standard output is closed")


@pytest.mark.parametrize("words", [["--json", "report.json"], ["--out", "plan.json"], ["--html", "page.html"]])
def test_a_report_that_a_file_keeps_needs_no_standard_output(
    model: str, calls: Calls, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["analyze", model, *words]) == 0
    assert Path(words[1]).stat().st_size


# ---- presets --------------------------------------------------------------------------------------------------------


def test_presets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    assert "a100-80g-sxm" in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["presets", "--json", "-"]) == main(["presets", "--json", "presets.json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "presets.json").read_text())


def test_an_empty_target(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", ""]) == 2
    assert capsys.readouterr().err.startswith("parplan: error: the target is empty; name a model.py")


def test_the_decision_is_what_the_real_signature_gives() -> None:
    """The stand-ins above take any keyword; the real functions have to know those that the commands use."""
    import inspect

    used = {"kwargs", "gpus", "gpu", "link", "cluster", "rules", "precision", "optimizer", "memory_bytes", "measure",
            "time_limit_s", "plan", "name", "progress", "scheme"}  # fmt: skip
    assert used <= set(inspect.signature(api.analyze).parameters)
    assert {"kwargs", "plan", "devices", "seed"} <= set(inspect.signature(api.verify).parameters)
    assert inspect.signature(api.analyze).return_annotation == Analysis.__name__


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("analyze", "run-report", "--tolerance", "--check-tolerance", "doctor"))


def test_completion_without_its_library_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'parplan[completion]'" in capsys.readouterr().err
