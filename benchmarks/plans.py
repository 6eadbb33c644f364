"""Every example on 1 to 8 GPUs: is the plan proven, and how long does the whole command take?

    python -m benchmarks.plans [--gpu NAME] [--json FILE] [EXAMPLE ...]

Each row is one `parplan analyze` in a process of its own, imports and capture included, as a user
would wait for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLES = ("alexnet", "two_tower", "vgg16", "resnet50", "mlp")
ROOT = Path(__file__).parents[1]


def analyze(example: str, gpus: int, gpu: str | None) -> dict[str, Any]:
    """One run of the command; its facts with the seconds it took."""
    command = [sys.executable, "-m", "parplan", "analyze", f"examples/{example}.py", "--gpus", str(gpus), "--json", "-"]
    begin = time.perf_counter()
    done = subprocess.run(
        command + (["--gpu", gpu] if gpu else []), cwd=ROOT, capture_output=True, text=True, check=True
    )
    wall_s = time.perf_counter() - begin
    facts = json.loads(done.stdout)
    one = next(b["step_s"] for b in facts["baselines"] if b["name"] == "one device")
    return {
        "example": example,
        "gpus": gpus,
        "status": facts["proof"]["status"],
        "gap": facts["proof"]["gap"],
        "solve_s": facts["proof"]["seconds"],
        "wall_s": wall_s,
        "speedup": one / facts["predicted"]["step_s"],
    }


def main() -> None:
    """Print the table; exit 1 when a plan is not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=EXAMPLES)
    parser.add_argument("--gpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'example':12} {'gpus':>4} {'status':>9} {'speedup':>8} {'solve s':>8} {'wall s':>7}")
    for example in arguments.examples:
        for gpus in range(1, 9):
            row = analyze(example, gpus, arguments.gpu)
            rows.append(row)
            print(
                f"{example:12} {gpus:>4} {row['status']:>9} {row['speedup']:>8.2f} "
                f"{row['solve_s']:>8.2f} {row['wall_s']:>7.1f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(row["status"] == "OPTIMAL" for row in rows) else 1)


if __name__ == "__main__":
    main()
