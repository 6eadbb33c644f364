"""A decoder that no process holds: it starts on the meta device, trains and is saved by block, on gloo processes.

    python -m benchmarks.large_start [--layers 30] [--width 1024] [--processes 4] [--limit-gb 0.6] [--json FILE]

By default the decoder has 1.55 GB of float32 parameters, in gathered state on 4 processes. Each phase prints, for the
process that takes the most, its peak of resident memory (the kernel's, Linux only) above what it had when the first
value was made, and what of that is neither gradients nor the optimizer's state: parameters, with activations, messages
and what Python takes. Exit 1 where that is more than the limit. It takes minutes, 8 GB of memory and 5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional

import parplan
from examples.gpt2 import GPT2, Sizes
from parplan.errors import UncheckedWarning
from parplan.runtime.processes import in_processes
from parplan.runtime.sharded_state.sharded_tensor import local_tensor

TOKENS, POSITIONS, STEPS = 8192, 16, 2


@dataclass(frozen=True)
class Phase:
    """Bytes of one process, the most over a phase, and seconds.

    Args:
        resident_bytes: above what was resident when the first value was made.
        other_bytes: of those, neither gradients nor optimizer state.
    """

    name: str
    wall_s: float
    resident_bytes: int
    other_bytes: int


class Decoder(nn.Module):
    """GPT-2 with its loss inside, on [texts, POSITIONS + 1] tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.net = GPT2(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss."""
        return functional.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    """Print a line per phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--limit-gb", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.layers, arguments.width, heads=16, tokens=TOKENS, positions=POSITIONS)
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")  # else glibc's heap keeps much of what is freed
    with torch.device("meta"):
        whole_bytes = sum(parameter.nbytes for parameter in Decoder(sizes).parameters())
    with tempfile.TemporaryDirectory(prefix="parplan-") as folder:
        ranks = in_processes(arguments.processes, partial(phases, sizes, Path(folder)), timeout_s=1200)
        saved_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    print(f"{whole_bytes / 1e9:.2f} GB of parameters on {arguments.processes} processes; GB of the fullest process")
    print(f"{'':8}{'seconds':>9}{'resident':>10}{'parameters and the rest':>25}")
    for found in zip(*ranks, strict=True):
        resident, other = (max(getattr(p, key) for p in found) / 1e9 for key in ("resident_bytes", "other_bytes"))
        print(f"{found[0].name:8}{max(p.wall_s for p in found):9.1f}{resident:10.3f}{other:25.3f}")
    print(f"{saved_bytes / 1e9:.2f} GB saved")
    if arguments.json:
        rows = [[asdict(phase) for phase in rank] for rank in ranks]
        arguments.json.write_text(json.dumps({"whole_bytes": whole_bytes, "ranks": rows}, indent=1), encoding="utf-8")
    sys.exit(max(phase.other_bytes for rank in ranks for phase in rank) > arguments.limit_gb * 1e9)


def phases(sizes: Sizes, folder: Path, rank: int, ranks: int) -> list[Phase]:
    """Start, train and save, in one process."""
    torch.manual_seed(0)
    before: list[int] = []

    def first_value(part: nn.Module) -> None:
        if not before:
            before.append(status_bytes("VmRSS") - sum(p.nbytes for p in part.parameters(recurse=False)))
            reset_peak()

    def phase(name: str, run: Callable[[], object], states: int) -> Phase:
        started = time.perf_counter()
        if before:
            reset_peak()
        run()
        resident = status_bytes("VmHWM") - before[0]
        own = sum(local_tensor(parameter).nbytes for parameter in net.parameters())
        return Phase(name, time.perf_counter() - started, resident, resident - states * own)

    with torch.device("meta"):
        net = Decoder(sizes)
    tokens = torch.randint(TOKENS, (1, POSITIONS + 1))
    model = parplan.compile(net, pins=[f"net.*=replicas:{ranks} state:gathered"], initialise=first_value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    def save() -> None:
        weights, updates = get_state_dict(model, optimizer)
        state_dict_saver.save({"model": weights, "optimizer": updates}, checkpoint_id=folder)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedWarning)
        found = [phase("start", partial(model.prepare, tokens), 0)]
        # The first step makes the optimizer's state behind all gradients.
        found += [phase(f"step {number + 1}", step, 3) for number in range(STEPS)]
    return [*found, phase("save", save, 3)]


def status_bytes(name: str) -> int:
    """A figure of this process's memory from the kernel."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> None:
    """Let the kernel's peak of resident memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


if __name__ == "__main__":
    main()
