"""Plans before and after a change of the code: what the planner decides must not change by accident.

    python -m benchmarks.plan_snapshots write FILE [--only NAME]
    python -m benchmarks.plan_snapshots compare OLD NEW

`write` plans the examples on 1 to 8 GPUs, and their small networks and those of benchmarks/sound_models.py on 2, 4 and
8, on two machines. It writes every plan with its predicted step and memory. `compare` prints what differs and exits 1
where anything does.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

import parplan
from benchmarks.sound_models import SOUND
from examples import alexnet, mlp, resnet50, two_tower, vgg16

EXAMPLES = {"alexnet": alexnet, "mlp": mlp, "resnet50": resnet50, "two_tower": two_tower, "vgg16": vgg16}
MACHINES = ("k20", "h100-sxm")
TOLERANCE = 1e-9  # of seconds: sums in another order

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


def cases() -> Iterator[tuple[str, Build, tuple[int, ...]]]:
    """Names, models with their inputs, and the numbers of GPUs that they are planned for."""
    for name, example in EXAMPLES.items():
        yield name, lambda example=example: (example.build(), example.example_inputs()), tuple(range(1, 9))  # type: ignore[misc]
        yield f"{name} (small)", example.small, (2, 4, 8)
    for name, build in SOUND.items():
        yield name, build, (2, 4, 8)


def snapshot(model: nn.Module, inputs: tuple[Any, ...], gpus: int, gpu: str) -> dict[str, Any]:
    """The plan of a model, with what was predicted of it; or the error that said why there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decision = parplan.analyze(model, inputs, gpus=gpus, gpu=gpu)
    except parplan.ParplanError as error:
        return {"error": str(error)}
    return {
        "status": decision.proof.status,
        "step_s": decision.prediction.step_s,
        "memory_bytes": list(decision.prediction.memory_bytes),
        "baselines": {baseline.name: baseline.step_s for baseline in decision.baselines},
        "advice": decision.advice,
        "plan": json.loads(decision.plan.to_json()),
    }


def differences(old: Any, new: Any, where: str) -> Iterator[str]:
    """Lines that name each place in which two snapshots differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{where} / {key}")
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > TOLERANCE * max(abs(old), abs(new)):
            yield f"{where}: {old:.9g} -> {new:.9g} ({new / old:.4f})" if old else f"{where}: {old} -> {new}"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where} / {index}")
    elif old != new:
        yield f"{where}: {old} -> {new}"


def main() -> None:
    """Write snapshots, or compare two files of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="models whose name contains this")
    arguments = parser.parse_args()
    if len(arguments.files) != (1 if arguments.what == "write" else 2):
        parser.error("`write` takes one file, `compare` two")
    if arguments.what == "compare":
        old, new = (json.loads(file.read_text(encoding="utf-8")) for file in arguments.files)
        lines = list(differences({name: old.get(name) for name in new}, new, ""))
        print("\n".join(lines) or f"{len(new)} plans, none differs")
        sys.exit(1 if lines else 0)
    taken: dict[str, Any] = {}
    for name, build, counts in cases():
        if arguments.only in name:
            model, inputs = build()
            for gpu in MACHINES:
                for gpus in counts:
                    taken[f"{name} on {gpus} x {gpu}"] = snapshot(model, inputs, gpus, gpu)
            print(name, flush=True)
    arguments.files[0].write_text(json.dumps(taken, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
