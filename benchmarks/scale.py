"""Planning at scale: how long it takes, how much memory, and what is proven, on up to 16,384 devices.

    python -m benchmarks.scale [--only NAME] [--time-limit S] [--kill-after S] [--json FILE]

Each case plans in a process of its own, imports and capture included. `--time-limit` is the planner's own; a case that
goes on is ended after `--kill-after` seconds, and its row says in which phase, and the last gap that was known. The
405 B-parameter transformer, one sequence per host, is a layer profile (docs/profile-graph.md): capturing 126 blocks
takes longer than planning may.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
POLL_S = 0.2


@dataclass(frozen=True)
class Case:
    """A model (`mlp`, `blocks` or `405b`) and hosts x GPUs of each; `depth` is the number of blocks."""

    model: str
    hosts: int
    per_host: int
    depth: int = 0

    @property
    def name(self) -> str:
        """Such as `blocks-96 16x8`."""
        depth = f"-{self.depth}" if self.depth else ""
        return f"{self.model}{depth} {self.hosts}x{self.per_host}"


CASES = (
    *(Case("mlp", hosts, 8) for hosts in (1, 4, 16, 64, 128)),
    Case("blocks", 128, 8, 8),
    Case("blocks", 16, 8, 96),
    *(Case("405b", hosts, 8) for hosts in (1, 8, 64, 256, 2048)),
)


@dataclass(frozen=True)
class Row:
    """How one case ended.

    Args:
        status: the proof's, "NO PLAN FITS", "FAILED", or "ENDED" where it went on for too long.
        gap: relative; None where no bound is known.
        capture_s, costs_s, solve_s: as the planner says; None where it did not end.
        detail: the phase in which it was ended, or the first line of the error.
    """

    case: str
    devices: int
    status: str
    gap: float | None
    wall_s: float
    memory_bytes: int
    capture_s: float | None = None
    costs_s: float | None = None
    solve_s: float | None = None
    step_s: float | None = None
    detail: str = ""


class Progress:
    """Tells the parent, a line of JSON each, which phase begins and what the solver knows."""

    def phase(self, name: str) -> None:
        """A phase begins."""
        _tell({"phase": name})

    def advance(self, done: int, total: int) -> None:
        """Nothing to tell."""

    def solver(self, objective: float, bound: float) -> None:
        """Best step time and bound so far, in seconds."""
        _tell({"gap": (objective - bound) / objective if objective > 0 else 0.0})


def _tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


def plan(case: Case, time_limit_s: float) -> dict[str, Any]:
    """Plan one case, in this process."""
    from parplan.errors import InfeasiblePlan, ParplanError

    try:
        decision = _decided(case, time_limit_s)
    except InfeasiblePlan as error:
        return {"status": "NO PLAN FITS", "detail": str(error).splitlines()[0]}
    except ParplanError as error:
        return {"status": "FAILED", "detail": str(error).splitlines()[0]}
    return {
        "status": decision.proof.status,
        "gap": decision.proof.gap,
        "capture_s": decision.seconds.capture,
        "costs_s": decision.seconds.costs,
        "solve_s": decision.seconds.solve,
        "step_s": decision.prediction.step_s,
    }


def _decided(case: Case, time_limit_s: float) -> Any:
    import torch

    import parplan
    from benchmarks.scale_models import LLAMA_405B, block_stack, transformer_profile
    from examples import mlp
    from parplan.cost_models.devices.presets import cluster_preset
    from parplan.cost_models.layer_profile.costs import ProfileCosts
    from parplan.cost_models.layer_profile.graph import profile_graph
    from parplan.planner.decide import decide
    from parplan.planner.request import PlanRequest

    started, told = time.perf_counter(), Progress()
    devices = case.hosts * case.per_host
    cluster = cluster_preset("h100-sxm" if case.model == "405b" else "a100-80g-sxm", devices, None, case.hosts)
    if case.model == "405b":
        profile = transformer_profile(replace(LLAMA_405B, samples=case.hosts))
        graph = profile_graph(profile)
        request = PlanRequest(time_limit_s=time_limit_s, started=started, capture_s=time.perf_counter() - started)
        return decide(graph, cluster, ProfileCosts(profile, graph, cluster), request, told)
    if case.model == "mlp":
        model, inputs = mlp.build(), mlp.example_inputs()
    else:
        model, inputs = block_stack(case.depth), (torch.zeros(1024, 128, 1024, device="meta"),)
    return parplan.analyze(model, inputs, cluster=cluster, time_limit_s=time_limit_s, progress=told)


def measure(case: Case, time_limit_s: float, kill_after_s: float) -> Row:
    """Run one case in a process of its own, and end that when it takes too long."""
    command = [sys.executable, "-m", "benchmarks.scale", "--child", case.name, "--time-limit", str(time_limit_s)]
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=errors)
        ended = False
        while True:
            pid, code, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if not ended and time.perf_counter() - begin > kill_after_s:
                child.kill()
                ended = True
            time.sleep(POLL_S)
        child.returncode = os.waitstatus_to_exitcode(code)
        wall_s = time.perf_counter() - begin
        said.seek(0)
        errors.seek(0)
        facts: dict[str, Any] = {}
        for line in said:
            facts |= json.loads(line)
        if ended:
            facts |= {
                "status": "ENDED",
                "detail": f"after {kill_after_s:g} s, in phase {facts.get('phase', 'imports')}",
            }
        elif "status" not in facts:
            last = errors.read().strip().splitlines()[-1:]
            facts |= {"status": "FAILED", "detail": f"exit code {child.returncode}: {' '.join(last)}"}
    known = {name: facts[name] for name in Row.__dataclass_fields__ if name in facts}
    known.setdefault("gap", None)
    return Row(case.name, case.hosts * case.per_host, wall_s=wall_s, memory_bytes=usage.ru_maxrss * 1024, **known)


def main() -> None:
    """Print a row per case; write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAME", help="the cases whose names contain this")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="the planner's own (default: 60)")
    parser.add_argument("--kill-after", type=float, metavar="S", help="end a case then (default: twice that and 60 s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        atexit.register(gc.freeze)  # as the command does
        _tell(plan(next(case for case in CASES if case.name == options.child), options.time_limit))
        return
    kill_after_s = options.kill_after or 2 * options.time_limit + 60
    rows = []
    print(f"{'case':18} {'devices':>7} {'status':>12} {'gap':>8} {'wall s':>7} {'capture':>7} {'costs':>7} {'GiB':>6}")
    for case in (case for case in CASES if options.only in case.name):
        row = measure(case, options.time_limit, kill_after_s)
        rows.append(row)
        gap = "-" if row.gap is None else f"{row.gap:.1%}"
        parts = " ".join(f"{'-' if part is None else f'{part:.1f}':>7}" for part in (row.capture_s, row.costs_s))
        figures = f"{row.wall_s:>7.1f} {parts} {row.memory_bytes / 2**30:>6.2f}"
        print(f"{row.case:18} {row.devices:>7,} {row.status:>12} {gap:>8} {figures}  {row.detail}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
