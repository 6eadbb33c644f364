"""Jobs under torchrun that lose ranks or are preempted: no hang, a whole checkpoint, losses of an undisturbed job."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

from examples import preemptible
from parplan.runtime.module.checkpoints import load_checkpoint
from tests.runtime import killed_run

STEPS, SAVE_EVERY = 9, 2
PATIENCE_S = 240
LINE = re.compile(r"step (\d+) rank (\d+) of (\d+) loss (\S+)")
PINS: dict[str, list[str] | None] = {
    "own": None,
    "hybrid": ["0=shards:2", "2=shards:2"],
    "gathered": ["*=state:gathered"],
}


def undisturbed(steps: int) -> list[list[float]]:
    """Losses per step of the plain model, of four equal parts of the batch."""
    net = preemptible.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        x, y = preemptible.batch(step)
        found = net(x)
        losses.append([mse_loss(*part).item() for part in zip(found.chunk(4), y.chunk(4), strict=True)])
        optimizer.zero_grad()
        mse_loss(found, y).backward()
        optimizer.step()
    return losses


class Job:
    """A training under torchrun in a folder, where its checkpoint and what its processes print are.

    Args:
        kills, step_s: as tests/runtime/killed_run.py takes them; torchrun starts the processes again after each kill.
    """

    def __init__(
        self, folder: Path, ranks: int, kind: str, kills: Sequence[tuple[int, str, int]] = (), step_s: float = 0.0
    ) -> None:
        self.checkpoint = folder / "run.pt"
        self._logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
        self._command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "--max-restarts", str(len(kills)), "--redirects", "3", "--log-dir", str(self._logs), killed_run.__file__,
            preemptible.__file__, "--checkpoint", str(self.checkpoint), "--save-every", str(SAVE_EVERY),
        ]  # fmt: skip
        told = {
            "KILLS": json.dumps(kills),
            "PINS": json.dumps(PINS[kind]),
            "STEP_S": str(step_s),
            "OMP_NUM_THREADS": "1",
        }
        root = str(Path(__file__).resolve().parents[2])
        place = {"PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._environment = {**os.environ, **told, **place}

    @contextmanager
    def started(self, steps: int = STEPS) -> Iterator[subprocess.Popen[str]]:
        """torchrun, in a process group of its own, of which nothing is left afterwards."""
        command = [*self._command, "--steps", str(steps)]
        with subprocess.Popen(
            command, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as agent:  # fmt: skip
            try:
                yield agent
            finally:
                for pid in [*self.workers(agent.pid), agent.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def run(self, steps: int = STEPS) -> None:
        """Run to the end."""
        with self.started(steps) as agent:
            said, _ = agent.communicate(timeout=PATIENCE_S)
            assert agent.returncode == 0, said + self.printed("stderr.log")

    def workers(self, agent: int) -> list[int]:
        """The processes that torchrun has started."""
        with suppress(FileNotFoundError):
            return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        return []

    def printed(self, name: str = "stdout.log") -> str:
        """All that the processes of all starts have printed."""
        return "".join(path.read_text() for path in sorted(self._logs.rglob(name)))

    def steps(self) -> set[int]:
        """The steps that rank 0 has printed; all losses have to be those of the undisturbed training."""
        found = [
            (int(step), int(rank), int(ranks), float(loss)) for step, rank, ranks, loss in LINE.findall(self.printed())
        ]
        wanted = undisturbed(1 + max((step for step, *_ in found), default=0))
        for step, rank, ranks, loss in found:
            each = 4 // ranks
            own = wanted[step][rank * each :][:each]
            assert loss == pytest.approx(sum(own) / each, rel=1e-12), (step, rank)
        return {step for step, rank, *_ in found if not rank}

    def wait_for(self, words: str) -> None:
        """Wait until a process has printed this."""
        end = time.monotonic() + PATIENCE_S
        while words not in self.printed():
            assert time.monotonic() < end, self.printed("stderr.log")
            time.sleep(0.02)


def drawn_kills(seed: int, ranks: int, count: int) -> list[tuple[int, str, int]]:
    """Ranks and moments, in a few starts, updates or saves each."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        moment = draw.choice(list(killed_run.MOMENTS))
        rank = 0 if moment in killed_run.WRITING else draw.randrange(ranks)
        times = {"join": 1, "compile": 1, "layer's backward": draw.randrange(1, 9)}
        found.append((rank, moment, times.get(moment, draw.randrange(1, 4))))
    return found


@pytest.mark.parametrize(
    ("kind", "seed", "kills"),
    [
        ("own", 0, 1),
        *(pytest.param(kind, n, 2, marks=pytest.mark.full) for n, kind in ((2, "hybrid"), (3, "gathered"))),
    ],
)
def test_ranks_that_are_killed_change_no_loss(tmp_path: Path, kind: str, seed: int, kills: int) -> None:
    job = Job(tmp_path, 2, kind, drawn_kills(seed, 2, kills))
    job.run()
    assert job.steps() == set(range(STEPS))
    assert load_checkpoint(job.checkpoint)["done"] == STEPS - STEPS % SAVE_EVERY


@pytest.mark.full
@pytest.mark.parametrize(("kind", "before", "after"), [("own", 4, 2), ("gathered", 2, 4)])
def test_a_preempted_job_saves_and_goes_on_by_the_plan_for_other_processes(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    job = Job(tmp_path, before, kind, step_s=0.05)
    with job.started(10**6) as agent:
        job.wait_for(f"step 3 rank {before - 1}")
        agent.send_signal(signal.SIGTERM)  # torchrun hands it on, and waits for its processes
        agent.communicate(timeout=PATIENCE_S)
    done = load_checkpoint(job.checkpoint)["done"]
    assert job.steps() == set(range(done))
    again = Job(tmp_path, after, "own")
    again.run(done + 3)
    assert again.steps() == {done, done + 1, done + 2}


def test_the_loop_of_the_page_is_that_of_the_program() -> None:
    root = Path(__file__).resolve().parents[2]
    section = (root / "docs/checkpoints.md").read_text(encoding="utf-8").partition("## Preempted jobs")[2]
    loop = section[section.index("    done = 0") :].partition("\n\nThe whole program")[0]
    assert loop.endswith("saving.step(done=step + 1)")
    assert loop in Path(preemptible.__file__).read_text(encoding="utf-8")
