"""Figures in README and docs against the JSON of the commands that print them.

    python -m benchmarks.figures [NAME ...] [--from FOLDER]

NAME is one of SOURCES; without any, those that take seconds and do not depend on the machine. `--from FOLDER` reads
NAME.json there instead of running the command. Exits with 1 and the differing sentences if a document says something
else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.report import units

ROOT = Path(__file__).resolve().parent.parent


SOURCES: dict[str, tuple[str, ...]] = {
    "report": ("parplan", "analyze", "examples/mlp.py", "--gpus", "4", "--gpu", "k20"),
    "published": ("benchmarks.published",),
    "memory": ("benchmarks.memory",),
    "verification": ("benchmarks.verification",),
}
QUICK = ("report", "published")


@dataclass(frozen=True)
class Claim:
    """A sentence of a document: `text` makes it from the command's JSON; line breaks and blanks do not count."""

    document: str
    source: str
    text: Callable[[Any], str]


def speed(found: Any) -> str:
    """The verdict's second sentence."""
    step_s, samples = found["predicted"]["step_s"], found["batch"] / found["predicted"]["step_s"]
    speedup, times = found["predicted"]["speedup"], units.step(step_s)
    by_hand = [one for one in found["baselines"] if one["fits"] and one["name"] != "one device"]
    best = min(by_hand, key=lambda one: one["step_s"])
    against = f"{best['step_s'] / step_s:.2f} x the best by hand ({best['name']})"
    return f"{times.text(step_s)} a step, {samples:,.0f} samples/s, {speedup:.2f} x one device, {against}."


def baseline(name: str) -> Callable[[Any], str]:
    """A row of the table of other plans."""

    def row(found: Any) -> str:
        one = next(one for one in found["baselines"] if one["name"] == name)
        plan_s = found["predicted"]["step_s"]
        sizes = units.size([other["memory_bytes"] for other in found["baselines"] if other["memory_bytes"]])
        ratio = f"{one['step_s'] / plan_s:.2f} x"
        return f"{name} {units.step(plan_s).text(one['step_s'])} {ratio} {sizes.text(one['memory_bytes'])}"

    return row


def table_row(gpus: int, paper: float) -> Callable[[Any], str]:
    """Speedups measured and predicted in the table of Krizhevsky 2014."""

    def row(found: Any) -> str:
        return f"| {paper}x | {found['krizhevsky2014'][str(gpus)]:.2f}x |"

    return row


def speedups(found: Any) -> str:
    """Predicted and measured speedups of Krizhevsky 2014."""
    predicted = ", ".join(f"{found['krizhevsky2014'][gpus]:.2f}x" for gpus in ("2", "4", "8"))
    return f"{predicted} where 1.95x, 3.74x, 6.25x were measured on 2, 4, 8 GPUs"


def peaks(rows: Any) -> str:
    """How many peaks of memory are predicted well."""
    return f"{sum(abs(row['ratio'] - 1) <= 0.05 for row in rows)} of {len(rows)} within 5 %"


def agreement(rows: Any) -> str:
    """How many plans agree with the plain model."""
    worst = max(row["difference"] for row in rows)
    return f"all {sum(row['passed'] for row in rows)} agree (largest relative difference measured: {worst:.1e},"


CLAIMS = (
    Claim("README.md", "report", speed),
    Claim("README.md", "report", baseline("one device")),
    Claim("README.md", "report", baseline("pure data parallel")),
    Claim("README.md", "report", baseline("pure model parallel")),
    Claim("README.md", "published", speedups),
    Claim("docs/predictions.md", "published", table_row(2, 1.95)),
    Claim("docs/predictions.md", "published", table_row(4, 3.74)),
    Claim("docs/predictions.md", "published", table_row(8, 6.25)),
    Claim("README.md", "memory", peaks),
    Claim("README.md", "verification", agreement),
)


def differences(source: str, found: Any) -> list[str]:
    """Sentences that the JSON of a source gives and that its documents do not have."""
    wrong = []
    for claim in CLAIMS:
        if claim.source == source:
            text = " ".join((ROOT / claim.document).read_text(encoding="utf-8").split())
            if (said := claim.text(found)) not in text:
                wrong.append(f"{claim.document}: not found: {said}")
    return wrong


def figures(name: str) -> Any:
    """The JSON that a source's command writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [sys.executable, "-m", *SOURCES[name], "--json", str(file)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    """Check, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*SOURCES, []], help=f"default: {' '.join(QUICK)}")
    parser.add_argument("--from", dest="folder", type=Path, help="read NAME.json here")
    args = parser.parse_args(argv)
    wrong = []
    for name in args.names or QUICK:
        found = figures(name) if args.folder is None else json.loads((args.folder / f"{name}.json").read_text())
        wrong += differences(name, found)
        print(f"{name}: {sum(claim.source == name for claim in CLAIMS)} figures checked", flush=True)
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
