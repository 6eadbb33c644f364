"""Programs of other libraries, and with parplan, give the same numbers, from each other's checkpoints on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.coming_from.tasks import Decoder

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples/coming_from"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Of plans that cut parameters; without pins parplan plans by itself.
PINS = {"ddp": ["5=shards:2", "7=shards:2"], "fsdp2": ["*=state:gathered"]}


def run(program: str, checkpoint: Path, epochs: int, *arguments: str) -> list[list[float]]:
    """The numbers that a program prints, by epoch."""
    command = [*TORCHRUN, "-m", f"examples.coming_from.{program}", "--checkpoint", str(checkpoint)]
    given = [*command, "--epochs", str(epochs), *arguments]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = re.findall(r"^epoch \d+ loss (\S+)(?: right (\S+))?$", done.stdout, re.MULTILINE)
    return [[float(number) for number in line if number] for line in lines]


@pytest.mark.full
@pytest.mark.parametrize("program", PINS)
def test_a_program_with_parplan_gives_the_same_numbers(program: str, tmp_path: Path) -> None:
    arguments = list[str]()
    if program == "fsdp2":
        torch.manual_seed(0)
        torch.save(Decoder().double().state_dict(), tmp_path / "weights.pt")
        arguments = ["--weights", str(tmp_path / "weights.pt")]
    first, other, own = (tmp_path / name for name in ("first", "other", "own"))
    wanted = run(program, first, 1, *arguments)
    shutil.copytree(first, other) if first.is_dir() else shutil.copy(first, other)
    wanted += run(program, first, 2, *arguments)
    assert len(wanted) == 2
    compiled = f"{program}_to_parplan"
    assert run(compiled, other, 2, *arguments, "--pins", *PINS[program]) == [pytest.approx(wanted[1], rel=1e-9)]
    assert run(compiled, own, 1, *arguments) == [pytest.approx(wanted[0], rel=1e-9)]
    assert run(program, own, 2, *arguments) == [pytest.approx(wanted[1], rel=1e-9)]


def test_the_page_shows_lines_of_the_programs() -> None:
    """What the page says of a line with a call in it is in the program before, and in the one with parplan."""
    text = (ROOT / "docs/coming-from.md").read_text()
    for program, heading in (("ddp", "## DistributedDataParallel"), ("fsdp2", "## fully_shard")):
        section = text.partition(heading)[2].partition("\n## ")[0]
        for line in re.findall(r"`((?:model = )?parplan\.compile\(.+?\))` \|", section):
            assert line in (PROGRAMS / f"{program}_to_parplan.py").read_text(), line
        for line in re.findall(r"^\| `(model.+?)`", section, re.MULTILINE):
            assert line in (PROGRAMS / f"{program}.py").read_text() or "convert" in line, line
