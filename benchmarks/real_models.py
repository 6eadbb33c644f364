"""Twelve well-known models trained by processes under every kind of plan, against the plain model in float64.

    python -m benchmarks.real_models [--models gpt2,bert] [--ranks 2,4] [--kinds sequence] [--json FILE] [--part 1/4]

Each is a small configuration with random weights. Every process brings its own samples, takes three steps with SGD and
momentum and then three with AdamW, and compares with the plain model on all samples: results, loss, every gradient, and
after each of the optimizers every parameter and buffer, by name. Casts to float32 inside the models are casts to
float64 on both sides, so that nothing but rounding may differ. Rows are written to the file as they come, and cases
that it has are not run again. Needs `pip install -e '.[zoo]'`; exit 1 where a case is not right.

Kinds of plan: `replicas` (samples), `shards` (parameters, heads, vocabulary, experts), `sequence` (positions of texts
and images, which no parameter has), `mixed-0`, `mixed-1` ... (legal strategies on devices, both drawn), and `solver`
(the plan of `parplan.compile`, with its self-check). A layer that takes fewer shards than there are devices has
replicas beside them; one that cannot take the kind is cut by samples, or whole.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import parplan
from benchmarks.real_model_configs import MODELS, Subject
from benchmarks.training import TOLERANCE, Outcome, Verdict, in_type
from benchmarks.workers import Workers
from parplan.graph.layer_graph import Axis, Layer, LayerGraph
from parplan.plan import Plan, Strategy
from parplan.planner.search_space.verifier import check
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.self_check.double_copy import double_casts
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor

KINDS = ("replicas", "shards", "sequence", "mixed-0", "mixed-1", "solver")
STEPS = 3
SMALLEST = 1e-3  # a tensor whose largest entry is smaller counts as this large
LIMIT_S = 300.0  # for one case


def forced_plan(graph: LayerGraph, kind: str, devices: int) -> Plan:
    """A legal plan in which every layer that can is of one kind; see the module's docstring."""
    draw = random.Random(f"{kind} of {graph.model} on {devices}")
    chosen = {name: _strategy(layer, kind, devices, graph.batch or 1, draw) for name, layer in graph.layers.items()}
    plan = Plan(graph.model, graph.fingerprint, graph.batch or 1, devices, chosen)
    check(plan, graph)
    return plan


def _strategy(layer: Layer, kind: str, devices: int, batch: int, draw: random.Random) -> Strategy:
    if kind.startswith("mixed"):
        return _drawn(layer, devices, batch, draw)
    units = batch if layer.constant else layer.batch.units if layer.batch is not None else 1
    able = [axis for axis in layer.axes if kind != "replicas" and of_sequence(layer, axis) == (kind == "sequence")]
    able.sort(key=lambda axis: axis.dims.keys().isdisjoint(layer.parameters))  # those that cut parameters first
    found = [
        Strategy(devices // shards, shards, axis.name if axis is not None else None, tuple(range(devices)))
        for shards in range(devices, 0, -1)
        for axis in (able if shards > 1 else [None])
        if devices % shards == 0 and units % (devices // shards) == 0 and (axis is None or axis.units % shards == 0)
    ]
    fewer = [Strategy(1, n, axis.name, tuple(range(n))) for axis in able for n in (2, 3) if axis.units % n == 0]
    return (found or [one for one in fewer if one.shards < devices] or [Strategy()])[0]


def of_sequence(layer: Layer, axis: Axis) -> bool:
    """Whether an axis cuts positions of a sequence, and no parameter."""
    return axis.name == "sequence" and axis.dims.keys().isdisjoint(layer.parameters)


def _drawn(layer: Layer, devices: int, batch: int, draw: random.Random) -> Strategy:
    """A random legal strategy on random devices in random order."""
    cuts: list[tuple[int, str | None]] = [(1, None)]
    cuts += [(n, axis.name) for axis in layer.axes for n in range(2, devices + 1) if axis.units % n == 0]
    shards, axis = draw.choice(cuts)
    units = batch if layer.constant else layer.batch.units if layer.batch is not None else 1
    replicas = draw.choice([n for n in range(1, devices // shards + 1) if units % n == 0])
    return Strategy(replicas, shards, axis, tuple(draw.sample(range(devices), replicas * shards)))


@dataclass
class Rank:
    """One process of a group, or all samples in one process without a group."""

    rank: int = 0
    ranks: int = 1

    def own(self, whole: Tensor) -> Tensor:
        """This process's samples of a whole batch."""
        size = len(whole) // self.ranks
        return whole.narrow(0, self.rank * size, size).contiguous() if self.ranks > 1 else whole


def train(model: nn.Module, subject: Subject, rank: Rank) -> dict[str, Tensor]:
    """Train and give everything that can be compared, by name; results are the process's own."""
    optimizers = {
        "sgd": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        # It is not to make much of rounding in gradients that are zero (of the bias of an attention's keys).
        "adamw": torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6),
    }
    found: dict[str, Tensor] = {}
    for name, optimizer in optimizers.items():
        for step in range(STEPS):
            whole = subject.batch(torch.Generator().manual_seed(step))
            batch = {key: rank.own(value) for key, value in whole.items()}
            optimizer.zero_grad()
            result = model(**{key: value for key, value in batch.items() if key != "targets"}, **subject.settings)
            loss = subject.loss(result, batch)
            loss.backward()
            at = f"{name} step {step}"
            found[f"loss of {at}"] = _mean(loss.detach().clone(), rank)
            if step == 0:
                leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
                found |= {f"result {n} of {at}": leaf.detach().clone() for n, leaf in enumerate(leaves)}
            found |= {f"gradient of {key} at {at}": value for key, value in gradients(model, rank).items()}
            optimizer.step()
        found |= {f"{key} after {name}": value.detach().clone() for key, value in model.state_dict().items()}
    return found


def gradients(model: nn.Module, rank: Rank) -> dict[str, Tensor]:
    """Whole gradients of the parameters that have one in some process."""
    own = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    every: list[set[str]] = [own] * rank.ranks
    if rank.ranks > 1:
        dist.all_gather_object(every, own)
    found = {}
    for name, parameter in model.named_parameters():
        if name in set().union(*every):
            gradient = parameter.grad
            if isinstance(parameter, ShardedTensor):
                gradient = parameter.like(torch.zeros_like(parameter.local)) if gradient is None else gradient
                gradient = gradient.whole() if isinstance(gradient, ShardedTensor) else gradient
            if gradient is not None:
                found[name] = gradient.detach().clone()
    return found


def _mean(value: Tensor, rank: Rank) -> Tensor:
    if rank.ranks > 1:
        dist.all_reduce(value)
        value /= rank.ranks
    return value


def difference(found: Tensor, plain: Tensor, rank: Rank) -> float:
    """The largest relative difference; infinite for another shape. A result may be the process's own samples."""
    if found.shape != plain.shape and plain.dim() and found.shape == rank.own(plain).shape:
        plain = rank.own(plain)
    if found.shape != plain.shape:
        return float("inf")
    if not plain.numel():
        return 0.0
    off = (found.double() - plain.double()).abs().max().item()
    off /= max(plain.double().abs().max().item(), SMALLEST)
    return off if off == off else float("inf")  # NaN


def run_case(rank: int, ranks: int, subject: Subject, kind: str) -> Outcome:
    """Train one model under one kind of plan, as one rank of a group, and compare; the outcome's text is JSON."""

    def compared() -> Outcome:
        with double_casts():
            plain = train(subject.build(), subject, Rank())
            net = subject.build()
            model = parplan.compile(net) if kind == "solver" else Compiled(net, planner(kind, ranks), check="off")
            mine = Rank(rank, ranks)
            found = train(model, subject, mine)
        missing = [key for key in [*plain, *found] if (key in plain) != (key in found)]
        off = {key: difference(value, plain[key], mine) for key, value in found.items() if key in plain}
        worst = max(off, key=lambda key: off[key])
        assert model.graph is not None
        assert model.plan is not None
        facts = {
            "difference": off[worst],
            "worst": worst,
            "wrong": [f"{key}: {value:.1e}" for key, value in off.items() if value > TOLERANCE][:8],
            "missing": missing[:8],
            "compared": len(off),
            "kinds": Counter(of_kind(model.graph.layers[n], own) for n, own in model.plan.layers.items()),
        }
        right = not missing and off[worst] <= TOLERANCE
        return Outcome(Verdict.RIGHT if right else Verdict.WRONG, json.dumps(facts))

    return in_type(compared)


def of_kind(layer: Layer, strategy: Strategy) -> str:
    """The kind of a layer's strategy, in a word."""
    axis = layer.axis(strategy.axis)
    if strategy.shards > 1 and axis is not None:
        kind = "sequence" if of_sequence(layer, axis) else "shards"
        return f"replicas x {kind}" if strategy.replicas > 1 else kind
    return "replicas" if strategy.replicas > 1 else "whole"


def planner(kind: str, devices: int) -> Callable[[LayerGraph], Plan]:
    """Makes plans of one kind."""
    return partial(forced_plan, kind=kind, devices=devices)


def line(key: str, row: Mapping[str, Any]) -> str:
    """A case in words."""
    facts = row.get("facts")
    if facts is None:
        text = row["text"].strip().splitlines()
        return f"{key:28} {row['verdict']:>8}  {text[-1 if row['verdict'] == 'crashed' else 0][:200] if text else ''}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(facts["kinds"].items()))
    wrong = "".join(f"\n    {one}" for one in (*facts["wrong"], *facts["missing"]))
    return f"{key:28} {row['verdict']:>8}  {facts['difference']:.1e} of {facts['compared']}; layers: {kinds}{wrong}"


def table(rows: Mapping[str, Mapping[str, Any]], kinds: Sequence[str]) -> str:
    """Models and ranks by kinds of plan: the largest relative difference, or how it ended, as Markdown."""
    lines = [f"| model | ranks | {' | '.join(kinds)} |", f"| --- | --: |{' --: |' * len(kinds)}"]
    for name, ranks in dict.fromkeys(tuple(key.split("/")[:2]) for key in rows):
        cells = [rows.get(f"{name}/{ranks}/{kind}", {"verdict": ""}) for kind in kinds]
        words = [f"{own['facts']['difference']:.0e}" if own["verdict"] == "right" else own["verdict"] for own in cells]
        lines.append(f"| {name} | {ranks} | {' | '.join(words)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per case and a table; 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES", help=f"default: {','.join(MODELS)}")
    parser.add_argument("--ranks", default="2,4", metavar="NUMBERS", help="processes (default: 2,4)")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="KINDS", help=f"default: {','.join(KINDS)}")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th model, from the K-th on")
    parser.add_argument("--json", type=Path, help="results by case; those it has are not run again")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    number, _, count = options.part.partition("/")
    names = options.models.split(",")[int(number) - 1 :: int(count or 1)]
    kinds_known = (*KINDS, *(kind for kind in kinds if kind.startswith("mixed-")))
    if unknown := [one for one in (*names, *kinds) if one not in (*MODELS, *kinds_known)]:
        parser.error(f"{unknown[0]} is neither a model ({', '.join(MODELS)}) nor a kind of plan ({', '.join(KINDS)})")
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for ranks in map(int, options.ranks.split(",")):
        with Workers(ranks, LIMIT_S, collective_s=120.0) as workers:
            for name, kind in ((name, kind) for name in names for kind in kinds):
                key = f"{name}/{ranks}/{kind}"
                if key not in rows:
                    outcome = workers.run(run_case, MODELS[name], kind)
                    rows[key] = {"verdict": outcome.verdict.value, "cpu_s": round(outcome.cpu_s, 1)}
                    known = outcome.text.startswith("{")
                    rows[key] |= {"facts": json.loads(outcome.text)} if known else {"text": outcome.text}
                    if options.json:
                        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
                print(line(key, rows[key]), flush=True)
    print(table(rows, kinds))
    print(", ".join(f"{n} {verdict}" for verdict, n in Counter(row["verdict"] for row in rows.values()).items()))
    return 0 if all(row["verdict"] == "right" for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
