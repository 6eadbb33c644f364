"""Figures in README and docs against the JSON of the commands that print them.

    python -m benchmarks.figures [NAME ...] [--from FOLDER]

NAME is one of PRINTED (whole reports, compared line by line) or SOURCES (sentences); without any, those that take
seconds and do not depend on the machine. `--from FOLDER` reads NAME.json of SOURCES there instead of running them.
Exits with 1 and the differing lines and sentences if a document says something else. Commands that documents quote and
of which no sentence is compared are listed: their figures are as old as the documents.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


K20 = ("examples/mlp.py", "--gpus", "4", "--gpu", "k20")
SOURCES: dict[str, tuple[str, ...]] = {
    "published": ("benchmarks.published",),
    "memory": ("benchmarks.memory",),
    "verification": ("benchmarks.verification",),
}
QUICK = ("published",)


@dataclass(frozen=True)
class Printed:
    """A report in a document: the text that `parplan analyze` prints, from `start` to `end` (none: all of it)."""

    document: str
    words: tuple[str, ...]
    columns: int = 80
    start: str = ""
    end: str = ""


PRINTED = {
    "report": Printed("README.md", K20),
    "pins": Printed(
        "docs/pins.md",
        (*K20, "--scheme", "gather", "--pin", "fc2=replicas:4", "--pin", "fc4=shards:2"),
        100,
        "Pins  price",
        "Against other plans",
    ),
}
OF_THE_MOMENT = re.compile(r"solved in +[\d.]+ \S+|parplan took .*?\sreasons\.", re.DOTALL)
"""Figures that differ from run to run."""


@dataclass(frozen=True)
class Claim:
    """A sentence of a document: `text` makes it from the command's JSON; line breaks and blanks do not count."""

    document: str
    source: str
    text: Callable[[Any], str]


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
    Claim("README.md", "published", speedups),
    Claim("docs/predictions.md", "published", table_row(2, 1.95)),
    Claim("docs/predictions.md", "published", table_row(4, 3.74)),
    Claim("docs/predictions.md", "published", table_row(8, 6.25)),
    Claim("README.md", "memory", peaks),
    Claim("README.md", "verification", agreement),
)


_COMMAND = re.compile(r"python -m (benchmarks\.[a-z_]+)|(?:python|torchrun [^\n`]*?) (examples/[a-z_]+\.py)")


def unchecked() -> dict[str, list[str]]:
    """Commands that documents quote with no figure that is compared with what they print, and these documents."""
    known = {f"benchmarks.{name}" for name in ("figures", *(claim.source for claim in CLAIMS))}
    found: dict[str, list[str]] = {}
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for module, script in _COMMAND.findall(file.read_text(encoding="utf-8")):
            command, document = module or script, file.relative_to(ROOT).as_posix()
            if command not in known and document not in found.setdefault(command, []):
                found[command].append(document)
    return found


def differences(source: str, found: Any) -> list[str]:
    """Sentences that the JSON of a source gives and that its documents do not have."""
    wrong = []
    for claim in CLAIMS:
        if claim.source == source:
            text = " ".join((ROOT / claim.document).read_text(encoding="utf-8").split())
            if (said := claim.text(found)) not in text:
                wrong.append(f"{claim.document}: not found: {said}")
    return wrong


def printed(one: Printed) -> str:
    """The text that a report's command prints."""
    command = [sys.executable, "-m", "parplan", "analyze", *one.words]
    environment = {**os.environ, "COLUMNS": str(one.columns)}
    ran = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return ran.stdout


def reports_differ(one: Printed, text: str) -> list[str]:
    """The lines of a report that its document does not have, in a row and without what depends on the moment."""
    begin = text.index(one.start)
    stop = text.index(one.end, begin) if one.end else len(text)
    wanted = [line.split() for line in OF_THE_MOMENT.sub("", text[begin:stop]).splitlines() if line.strip()]
    document = OF_THE_MOMENT.sub("", (ROOT / one.document).read_text(encoding="utf-8"))
    said = [line.split() for line in document.splitlines() if line.strip()]
    first = next((at for at, line in enumerate(said) if line == wanted[0]), len(said))
    found = said[first : first + len(wanted)]
    differing = (" ".join(line) for line, other in zip_longest(wanted, found) if line != other and line)
    return [f"{one.document}: not found: {line}" for line in differing]


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
    names = [*PRINTED, *SOURCES]
    quick = (*PRINTED, *QUICK)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names, []], help=f"default: {' '.join(quick)}")
    parser.add_argument("--from", dest="folder", type=Path, help="read NAME.json here")
    args = parser.parse_args(argv)
    wrong = []
    for name in args.names or quick:
        if name in PRINTED:
            wrong += reports_differ(PRINTED[name], printed(PRINTED[name]))
            print(f"{name}: report of {PRINTED[name].document} checked", flush=True)
            continue
        found = figures(name) if args.folder is None else json.loads((args.folder / f"{name}.json").read_text())
        wrong += differences(name, found)
        print(f"{name}: {sum(claim.source == name for claim in CLAIMS)} figures checked", flush=True)
    for command, documents in unchecked().items():
        print(f"{command}: not checked, needs minutes and gives this machine's figures ({', '.join(documents)})")
    for name in SOURCES.keys() - set(args.names or quick):
        print(f"{name}: not checked this time, needs minutes (python -m benchmarks.figures {name})")
    print(*wrong, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
