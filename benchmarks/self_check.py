"""False alarms of the self-check, and the share of time that it adds until the first step.

    python -m benchmarks.self_check alarms [--devices 2] [--json FILE]
    python -m benchmarks.self_check time [--rounds 7] [--json FILE]

`alarms` runs the examples' small networks and those of benchmarks/sound_models.py in float32, bfloat16 and under
autocast, with replicas, with shards and with the solver's plan, in training and evaluation; an error or a warning of
the self-check is an alarm. `time` compiles each example anew with and without the check, in turns, and runs its first
training step: every round gives one ratio, of this process's CPU seconds as other programs on a machine change the time
by the clock; the median counts, with the quartiles as its spread.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import parplan
from benchmarks.sound_models import SOUND, Sound
from examples import alexnet, mlp, resnet50, two_tower, vgg16
from parplan.compat import pytree
from parplan.errors import ParplanError, SelfCheckError
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.plan import Plan, Strategy
from parplan.runtime.module.compiled import Compiled

EXAMPLES: dict[str, Sound] = {
    "examples/alexnet": alexnet.small,
    "examples/mlp": mlp.small,
    "examples/resnet50": resnet50.small,
    "examples/two_tower": two_tower.small,
    "examples/vgg16": vgg16.small,
}
PRECISIONS = ("float32", "bfloat16", "autocast")
PLANS = ("replicas", "shards", "solver")


@dataclass(frozen=True)
class Trial:
    """A model under a plan in a precision, and what its checks said.

    Args:
        outcome: "agrees", "agrees in float64", "unchecked: ...", "alarm: ...", or "refused: ..." where the model or
            its plan cannot run at all.
    """

    model: str
    plan: str
    precision: str
    outcome: str


@dataclass(frozen=True)
class Timing:
    """CPU seconds until the first step of an example without the check, and the ratio with it: median, quartiles."""

    model: str
    seconds: float
    ratio: float
    low: float
    high: float


def planner_of(kind: str, devices: int) -> Callable[[LayerGraph], Plan]:
    """Makes plans with replicas of all layers, or with shards where a layer has an axis."""

    def strategy(layer: Layer) -> Strategy:
        everyone = tuple(range(devices))
        axis = next((axis.name for axis in layer.axes if axis.units % devices == 0), None)
        if kind == "shards" and axis is not None:
            return Strategy(1, devices, axis, everyone)
        return Strategy(devices, 1, None, everyone) if layer.batch is not None else Strategy()

    def plan(graph: LayerGraph) -> Plan:
        chosen = {name: strategy(layer) for name, layer in graph.layers.items()}
        return Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, chosen)

    return plan


def compiled(module: nn.Module, plan: str, devices: int) -> Compiled:
    """The model under one kind of plan on logical CPU devices."""
    if plan == "solver":
        return parplan.compile(module, devices=["cpu"] * devices)
    return Compiled(module, planner_of(plan, devices), devices=["cpu"] * devices)


def trials(models: dict[str, Sound], plans: Sequence[str], precisions: Sequence[str], devices: int) -> Iterator[Trial]:
    """Run each model under each plan in each precision, in training and then in evaluation."""
    for name, make in models.items():
        for plan in plans:
            for precision in precisions:
                torch.manual_seed(0)
                module, args = make()
                yield Trial(name, plan, precision, outcome(module, args, plan, precision, devices))


def outcome(module: nn.Module, args: Sequence[Any], plan: str, precision: str, devices: int) -> str:
    """What the checks of two first steps say."""
    if precision == "bfloat16":
        module = module.bfloat16()
        args = pytree.tree_map(lambda t: t.bfloat16() if t.is_floating_point() else t, args)
    casts = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()
    with warnings.catch_warnings(), casts:
        warnings.simplefilter("ignore")
        try:
            model = compiled(module, plan, devices)
            model(*args)
            model.eval()
            model(*args)
        except SelfCheckError as error:
            return f"alarm: {error}"
        except (ParplanError, RuntimeError) as error:
            return f"refused: {next(iter(str(error).splitlines()), '')}"
    unchecked = [record.unchecked for record in model.checked if record.unchecked]
    if unchecked:
        return f"unchecked: {unchecked[0]}"
    return "agrees in float64" if any(record.note for record in model.checked) else "agrees"


def first_step_s(module: nn.Module, args: Sequence[Any], devices: int, check: str) -> float:
    """CPU seconds to compile and run one training step."""
    started = time.process_time()
    model = parplan.compile(module, devices=["cpu"] * devices, check=check)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves = pytree.tree_leaves(model(*args))
    torch.stack([leaf.float().mean() for leaf in leaves]).sum().backward()
    optimizer.step()
    return time.process_time() - started


def timed(name: str, make: Sound, devices: int, rounds: int) -> Timing:
    """The paired ratios of one example; the first round, which warms up, does not count."""
    pairs = []
    for number in range(rounds + 1):
        torch.manual_seed(number)
        module, args = make()
        order = ("off", "first") if number % 2 else ("first", "off")
        found = {check: first_step_s(copy.deepcopy(module), args, devices, check) for check in order}
        pairs.append((found["off"], found["first"] / found["off"]))
    ratios = [ratio for _, ratio in pairs[1:]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Timing(name, statistics.median(seconds for seconds, _ in pairs[1:]), middle, low, high)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description="false alarms and cost of the self-check")
    parser.add_argument("what", choices=("alarms", "time"))
    parser.add_argument("--devices", type=int, default=2, help="logical CPU devices")
    parser.add_argument("--rounds", type=int, default=7, help="pairs per example, of `time`")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = EXAMPLES if args.what == "time" else EXAMPLES | SOUND
    models = {name: make for name, make in known.items() if args.only in name}
    figures: list[Any] = []
    if args.what == "time":
        for name, make in models.items():
            figures.append(timed(name, make, args.devices, args.rounds))
            print(f"{name:24} {figures[-1].seconds:7.2f} s  x {figures[-1].ratio:.3f} "
                  f"({figures[-1].low:.3f} to {figures[-1].high:.3f})", flush=True)  # fmt: skip
        ratios = [figure.ratio for figure in figures]
        print(f"median over the examples: {statistics.median(ratios) - 1:.1%} more time until the first step")
    else:
        for trial in trials(models, args.plans, PRECISIONS, args.devices):
            figures.append(trial)
            print(f"{trial.model:24} {trial.plan:9} {trial.precision:9} {trial.outcome}", flush=True)
        alarms = sum(trial.outcome.startswith("alarm") for trial in figures)
        checked = sum(trial.outcome.startswith("agrees") for trial in figures)
        print(f"{alarms} alarms, {checked} of {len(figures)} checked and in agreement")
    if args.json:
        args.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
