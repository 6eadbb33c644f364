"""Random models, plans and training loops, compiled against plain, in float64: none may be silently wrong.

    python -m benchmarks.fuzz [--resume] [--json FILE] [--cases 500] [--rank-cases 60] [--ranks 2,4] [--seed 0]
    python -m benchmarks.fuzz --spec '{"seed": 17, ...}'     repeat one case, as a failure prints it

Every case is right, or refused by an error of parplan's. Anything else is a failure (numbers that differ, an error that
is not parplan's, a process that ends or hangs), is shrunk and printed with the command that repeats it. Results are
written after every case; with --resume, cases that the file has are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import fuzz_loops, fuzz_models
from benchmarks.training import Outcome, Run, Verdict, judge
from benchmarks.workers import Workers
from parplan.errors import ParplanError
from parplan.files import check_writable, write_files
from parplan.graph.capture.capture import capture
from parplan.graph.layer_graph import Layer

PASSED = (Verdict.RIGHT, Verdict.REFUSED)
LIMIT_S = 120.0  # for one case


@dataclass(frozen=True)
class Spec:
    """One case, as data: what to train, how, and under which plan.

    Attributes:
        seed: of weights, data and the plan.
        ranks: processes; 1 for one process with `devices` logical devices.
        plan: "pins": random legal strategies for every layer; "solver": the solver's own.
        prepare: whether the plan is made at `compile`, from an example, or at the first call.
        float32: train in it, instead of float64.
        micro_batches: of the plan; 0: as the planner decides.
    """

    seed: int
    ranks: int
    devices: int
    family: str
    blocks: tuple[str, ...]
    head: str
    words: bool
    optimizer: str
    actions: tuple[str, ...]
    plan: str
    scheme: str
    threads: bool
    prepare: bool
    float32: bool
    micro_batches: int = 0

    @property
    def key(self) -> str:
        """Its name in a file of results."""
        return f"{self.ranks}/{self.seed}"

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m benchmarks.fuzz --spec {shlex.quote(json.dumps(asdict(self)))}"

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Spec:
        """From what `command` gives."""
        return cls(**{**fields, "blocks": tuple(fields["blocks"]), "actions": tuple(fields["actions"])})


def drawn(seed: int, ranks: int) -> Spec:
    """A case by its seed."""
    draw = random.Random(f"{seed} on {ranks}")
    family = draw.choice(fuzz_models.FAMILIES)
    words = family != "image" and draw.random() < 0.2
    actions = draw.sample(list(fuzz_loops.ACTIONS), draw.choice((0, 1, 1, 2, 2, 3, 4)))
    spec = Spec(
        seed=seed,
        ranks=ranks,
        devices=ranks if ranks > 1 else draw.choice((2, 2, 3, 4)),
        family=family,
        blocks=tuple(fuzz_models.some(draw, fuzz_models.blocks_of(family), 5)),
        head=draw.choice(("scores", "scores", "dictionary", "in turn", "inside")),
        words=words and family == "sequence",
        optimizer=draw.choice(list(fuzz_loops.OPTIMIZERS)),
        actions=tuple(name for name in fuzz_loops.ACTIONS if name in actions),
        plan=draw.choice(("pins", "pins", "pins", "solver")),
        scheme=draw.choice(("auto", "auto", "auto", "gather", "broadcast", "interleave")),
        threads=ranks == 1 and draw.random() < 0.1,
        prepare=draw.random() < 0.5,
        float32=draw.random() < 0.25,
    )
    # With a loss outside a plain call runs the whole batch.
    return replace(spec, micro_batches=draw.choice((0, 2, 4))) if spec.head == "inside" else spec


def run_spec(rank: int, ranks: int, spec: Spec) -> Outcome:
    """Run one case, in this process or as one rank."""

    def make() -> fuzz_models.Drawn:
        return fuzz_models.Drawn(spec.family, list(spec.blocks), spec.head, spec.words)

    def script(run: Run) -> None:
        fuzz_loops.train(run, make, spec.optimizer, spec.actions, spec.prepare and spec.head != "inside")

    options: dict[str, Any] = {"scheme": spec.scheme, "threads": spec.threads}
    if spec.micro_batches:
        options["micro_batches"] = spec.micro_batches
    if spec.ranks == 1:
        options["devices"] = ["cpu"] * spec.devices
    if spec.plan == "pins":
        options["pins"] = random_pins(make, spec)
    run = Run(rank, ranks, compiled=True, options=options, seed=spec.seed)
    return judge(script, run, dtype=torch.float32 if spec.float32 else torch.float64)


def random_pins(make: Callable[[], fuzz_models.Drawn], spec: Spec) -> list[str] | None:
    """A legal strategy for every layer, on random devices; None where the model cannot be captured."""
    draw = random.Random(spec.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        shape = fuzz_models.sample(spec.family, spec.words, fuzz_loops.BATCH)
        x = torch.zeros(shape, dtype=torch.int64) if spec.words else torch.randn(shape)
        classes = (torch.zeros(fuzz_loops.BATCH, dtype=torch.int64),) if spec.head == "inside" else ()
        graph = capture(make(), (x, *classes))
    except ParplanError:
        return None
    finally:
        torch.set_default_dtype(before)
    within = {name for name in graph.layers for other in graph.layers if other.startswith(f"{name}.")}
    return [_pin(layer, spec.devices, draw) for name, layer in graph.layers.items() if name not in within]


def _pin(layer: Layer, devices: int, draw: random.Random) -> str:
    cuts: list[tuple[int, str | None]] = [(1, None)]
    if not layer.is_loss:
        cuts += [(s, axis.name) for axis in layer.axes for s in range(2, devices + 1) if axis.units % s == 0]
    shards, axis = draw.choice(cuts)
    most = devices // shards if (layer.batch is not None and not layer.mixes_batch) or layer.constant else 1
    replicas = draw.choice([n for n in range(1, most + 1) if fuzz_loops.BATCH % n == 0])
    chosen = ",".join(map(str, draw.sample(range(devices), replicas * shards)))
    words = f"replicas:{replicas} shards:{shards} gpu:{chosen}" + (f" axis:{axis}" if axis else "")
    return f"{layer.name}={words}"


def shrunk(workers: Workers, spec: Spec, outcome: Outcome, effort: int = 24) -> Spec:
    """The smallest case found that fails alike: blocks and actions left out one at a time, options made plain."""
    tried = 0
    while tried < effort:
        for smaller in _smaller(spec):
            tried += 1
            if workers.run(run_spec, smaller).verdict is outcome.verdict:
                spec = smaller
                break
            if tried >= effort:
                return spec
        else:
            return spec
    return spec


def _smaller(spec: Spec) -> Iterator[Spec]:
    for number in range(len(spec.actions)):
        yield replace(spec, actions=spec.actions[:number] + spec.actions[number + 1 :])
    for number in range(len(spec.blocks)):
        yield replace(spec, blocks=spec.blocks[:number] + spec.blocks[number + 1 :])
    plain: dict[str, Any] = {"head": "scores", "optimizer": "sgd", "plan": "solver", "scheme": "auto", "threads": False,
                             "float32": False, "micro_batches": 0}  # fmt: skip
    for name, value in plain.items():
        if getattr(spec, name) != value:
            yield replace(spec, **{name: value})
    if spec.ranks == 1 and spec.devices > 2:
        yield replace(spec, devices=2)


def reason(text: str) -> str:
    """The first words of a refusal, without what is particular to a model."""
    line = text.split("\n")[0]
    kind, _, rest = line.partition(": ")
    words = [word for word in rest.split() if not any(mark in word for mark in "0123456789.'=/`")]
    return f"{kind}: {' '.join(words[:12])}"


def fuzz(specs: Sequence[Spec], results: dict[str, dict[str, Any]], save: Callable[[], None]) -> list[str]:
    """Run cases that have no result yet, group by group; what failed, with how to repeat it."""
    failures = []
    for ranks in sorted({spec.ranks for spec in specs}):
        with Workers(ranks, LIMIT_S) as workers:
            for spec in specs:
                if spec.ranks != ranks or spec.key in results:
                    continue
                outcome = workers.run(run_spec, spec)
                found = {"verdict": outcome.verdict.value, "text": outcome.text, "cpu_s": round(outcome.cpu_s, 3)}
                if outcome.verdict not in PASSED:
                    found["repeat"] = shrunk(workers, spec, outcome).command
                    failures.append(f"{spec.key}: {outcome.verdict.value}\n{outcome.text}\n{found['repeat']}\n")
                    print(failures[-1], flush=True)
                results[spec.key] = found
                save()
    return failures


def summary(results: Mapping[str, Mapping[str, Any]]) -> str:
    """How many cases ended how, and why those that were refused were."""
    lines = []
    for ranks in sorted({key.split("/")[0] for key in results}, key=int):
        counts = Counter(found["verdict"] for key, found in results.items() if key.split("/")[0] == ranks)
        seconds = sum(found["cpu_s"] for key, found in results.items() if key.split("/")[0] == ranks)
        told = ", ".join(f"{counts[verdict.value]} {verdict.value}" for verdict in Verdict if counts[verdict.value])
        lines.append(f"{ranks} process{'es' if ranks != '1' else ''}: {told} ({seconds:.0f} s of processor time)")
    reasons = Counter(reason(found["text"]) for found in results.values() if found["verdict"] == "refused")
    lines += [f"  {count:4} refused  {text}" for text, count in reasons.most_common()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and print what failed; the exit status is 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="results, written after every case")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that the file of results has")
    parser.add_argument("--cases", type=int, default=500, help="in one process")
    parser.add_argument("--rank-cases", type=int, default=60, help="over processes, for all of --ranks together")
    parser.add_argument("--ranks", default="2,4", help="how many processes, one number after another")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--spec", help="one case, as a failure prints it")
    options = parser.parse_args(arguments)
    if options.spec:
        return _one(Spec.of(json.loads(options.spec)))
    groups = [int(ranks) for ranks in options.ranks.split(",") if ranks]
    specs = [drawn(options.seed + number, 1) for number in range(options.cases)]
    specs += [drawn(options.seed + n, groups[n % len(groups)]) for n in range(options.rank_cases if groups else 0)]
    results: dict[str, dict[str, Any]] = {}
    if options.json:
        check_writable(options.json, "--json")
        if options.resume and Path(options.json).exists():
            results = json.loads(Path(options.json).read_text(encoding="utf-8"))["cases"]

    def save() -> None:
        if options.json:
            write_files({options.json: json.dumps({"seed": options.seed, "cases": results}, indent=1) + "\n"})

    fuzz(specs, results, save)
    save()
    wanted = {spec.key: results[spec.key] for spec in specs}
    print(summary(wanted))
    return int(any(found["verdict"] not in ("right", "refused") for found in wanted.values()))


def _one(spec: Spec) -> int:
    with Workers(spec.ranks, LIMIT_S) as workers:
        outcome = workers.run(run_spec, spec)
    print(outcome.verdict.value)
    print(outcome.text)
    return int(outcome.verdict not in PASSED)


if __name__ == "__main__":
    sys.exit(main())
