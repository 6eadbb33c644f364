"""Predictions against published measurements: Krizhevsky, "One weird trick" (arXiv 1404.5997), Table 1; a DGX-1.

    python -m benchmarks.published [--json FILE]

AlexNet in 90 epochs on 1, 2, 4 and 8 K20, convolutions replicated, fully-connected layers sharded, scheme (b): one
worker at a time broadcasts its samples. One number is calibrated: a factor on all layer times, so that the step on one
GPU takes what the 1-GPU row says. Links, the two islands of four and the shape of the plan are as the paper tells
(cost_models/devices/hardware_table.py has the sources). Nothing is hidden of the weight reduction, because
cuda-convnet2 starts it when the backward pass of all workers is done (worker.cu at 3238bf0: bprop, then updateWeights).

Then the batch at which the fully-connected layers are better replicated (crossover.py), and data parallelism on a DGX-1
with P100: TensorFlow's benchmarks of May 2017 (tensorflow/docs_src/performance/benchmarks.md at 5984ffe), those models
whose gradients NCCL summed. There, too, layer times are scaled so that one GPU takes what was published.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.crossover import Line, analytic, crossover, data_plan, graph_of, hybrid_plan
from benchmarks.scaled_costs import ScaledCosts
from examples import alexnet, vgg16
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.capture.capture import capture
from parplan.graph.resized import at_batch
from parplan.plan import Scheme
from parplan.planner.decide import predict
from parplan.planner.decision import Prediction
from parplan.planner.search.schemes import simulated_prediction
from parplan.planner.simulation.timeline import PassPolicy, simulate

IMAGES = 90 * 1_281_167  # 90 epochs of ILSVRC-2012
EACH = 128  # images per GPU and step
AFTER_BACKWARD = 0.0  # the share of the reduction that cuda-convnet2 hides behind the backward pass


@dataclass(frozen=True)
class Row:
    """A row of Table 1: samples per update of the convolutional and of the fully-connected weights."""

    gpus: int
    conv_batch: int
    fc_batch: int
    hours: float
    speedup: float

    @property
    def step_s(self) -> float:
        """Seconds for `conv_batch` images."""
        return self.hours * 3600 * self.conv_batch / IMAGES


ALONE = Row(1, 128, 128, 98.05, 1.0)
TABLE = (
    Row(2, 256, 256, 50.24, 1.95), Row(4, 512, 512, 26.20, 3.74), Row(8, 1024, 1024, 15.68, 6.25),
    Row(2, 256, 128, 50.90, 1.93), Row(4, 512, 128, 26.78, 3.66), Row(8, 1024, 128, 15.91, 6.16),
)  # fmt: skip


def machine(gpus: int) -> Cluster:
    """The paper's machine with `gpus` K20."""
    return cluster_preset("k20", gpus, "pcie2")


def calibrated() -> float:
    """The factor on layer times that makes the predicted 1-GPU step take what the paper measured."""
    graph = graph_of(EACH)
    costs = RooflineCosts(graph, machine(1), optimizer="momentum")
    return ALONE.step_s / predict(graph, machine(1), costs, hybrid_plan(graph, 1)).step_s


def costs_of(cluster: Cluster, batch: int, factor: float, overlap: float | None = AFTER_BACKWARD) -> CostModel:
    """Calibrated costs of AlexNet at a batch."""
    return ScaledCosts(RooflineCosts(graph_of(batch), cluster, optimizer="momentum"), factor, overlap)


def predicted(
    row: Row, factor: float, scheme: Scheme = Scheme.BROADCAST, prefetch: bool = True, cluster: Cluster | None = None
) -> Prediction:
    """A step of the paper's plan; fully-connected weights are updated once or, in its other rows, in every pass.

    Args:
        prefetch: whether samples travel while others are computed, as the paper says (K-1)/K of them can.
        cluster: in place of the paper's.
    """
    cluster, graph = cluster or machine(row.gpus), graph_of(row.conv_batch)
    costs, plan = costs_of(cluster, row.conv_batch, factor), replace(hybrid_plan(graph, row.gpus), scheme=scheme)
    if row.fc_batch < row.conv_batch:
        plan = plan.with_layers({name: replace(plan.layers[name], update_period=1) for name in ("fc6", "fc7", "fc8")})
    # As cuda-convnet2 does it: each pass goes back before the next one begins, and the sender sends to each other one.
    theirs = PassPolicy(one_f_one_b=True, prefetch=prefetch, scatter_allgather=False)
    return simulated_prediction(predict(graph, cluster, costs, plan), simulate(graph, cluster, costs, plan, theirs))


def data_parallel(gpus: int, factor: float, overlap: float) -> Prediction:
    """A step with every layer replicated."""
    cluster, graph = machine(gpus), graph_of(EACH * gpus)
    return predict(graph, cluster, costs_of(cluster, EACH * gpus, factor, overlap), data_plan(graph, gpus))


def speedup(gpus: int, step: Prediction) -> float:
    """Images per second over those of the paper's single GPU."""
    return gpus * ALONE.step_s / step.step_s


# ---- the tables ------------------------------------------------------------------------------------------------------


def print_table(factor: float) -> dict[str, float]:
    """Table 1 beside what is predicted; the speedups of its first rows by number of GPUs."""
    print(f"Krizhevsky 2014, Table 1; layer times x {factor:.3f}, from its 1-GPU row ({ALONE.step_s * 1e3:.1f} ms).")
    print("Step in ms: paper, predicted, and of that transfers, reduction, update.\n")
    print("        batch   |  step           of that             |  speedup")
    print("GPUs  conv   fc | paper   pred  compute trans red upd | paper  pred   error")
    found = {}
    for row in TABLE:
        step = predicted(row, factor)
        own = speedup(row.gpus, step)
        print(f"{row.gpus:>4} {row.conv_batch:>5} {row.fc_batch:>4} | {_parts(row, step)} | {_errors(row, own)}")
        if row.conv_batch == row.fc_batch:
            found[str(row.gpus)] = round(own, 4)
    return found


def _parts(row: Row, step: Prediction) -> str:
    compute_s = step.forward_s + step.backward_s
    parts = (row.step_s, step.step_s, compute_s, step.transfer_s, step.exposed_reduce_s, step.update_s)
    paper, own, compute, transfer, reduce, update = (f"{seconds * 1e3:.1f}" for seconds in parts)
    return f"{paper:>5} {own:>6} {compute:>8} {transfer:>5} {reduce:>3} {update:>3}"


def _errors(row: Row, own: float) -> str:
    return f"{row.speedup:>5.2f} {own:>5.2f} {own / row.speedup - 1:>+7.1%}"


def print_rivals(factor: float) -> None:
    """What the other schemes and plain data parallelism would take by the same model."""
    print("\nThe same by other ways, in ms (speedup): scheme (b) with nothing hidden, the")
    print("others, and all layers replicated, their reduction after backward or hidden.\n")
    print("GPUs   gather (a)     (b) in turn interleave (c)  replicas, after        hidden")
    for row in TABLE[:3]:
        steps = [
            predicted(row, factor, Scheme.GATHER),
            predicted(row, factor, Scheme.BROADCAST, prefetch=False),
            predicted(row, factor, Scheme.INTERLEAVE),
            *(data_parallel(row.gpus, factor, overlap) for overlap in (AFTER_BACKWARD, 1.0)),
        ]
        cells = [f"{step.step_s * 1e3:.1f} ({speedup(row.gpus, step):.2f})" for step in steps]
        print(f"{row.gpus:>4} " + " ".join(f"{cell:>14}" for cell in cells))


SLOW = Line("a100-80g-sxm, tf32, 10gbe", partial(cluster_preset, "a100-80g-sxm", link="10gbe"), "tf32")


def lines(factor: float) -> tuple[Line, ...]:
    """Machines for the crossover, the slow links first."""
    paper = partial(cluster_preset, "k20", link="pcie2")
    nvlink = partial(cluster_preset, "a100-80g-sxm")
    return (
        SLOW,
        Line("k20, pcie2, reduction after", paper, overlap=AFTER_BACKWARD, factor=factor),
        Line("k20, pcie2, half of it after", paper, factor=factor),
        Line("k20, pcie2, reduction hidden", paper, overlap=1.0, factor=factor),
        Line("a100-80g-sxm, tf32, nvlink3", nvlink, "tf32"),
    )


@dataclass(frozen=True)
class OnDgx:
    """Images per second on 1, 2, 4 and 8 P100 of a DGX-1, synthetic data; `build` makes the model."""

    name: str
    build: Callable[[], nn.Module]
    each: int
    images_per_s: Mapping[int, float]


DGX_1P = (
    OnDgx("alexnet", alexnet.build, 512, {1: 2987, 2: 5658, 4: 10509, 8: 17822}),
    OnDgx("vgg16", vgg16.build, 64, {1: 154, 2: 295, 4: 584, 8: 1081}),
    OnDgx("vgg16", vgg16.build, 32, {1: 144, 2: 281, 4: 549, 8: 820}),
)


def print_dgx(links: Callable[[Cluster], Cluster] = lambda cluster: cluster) -> dict[str, dict[str, float]]:
    """Data parallelism on a DGX-1 beside what was published; the errors of the speedups by model and number of GPUs."""
    print("\nDGX-1 P100, data parallel, TensorFlow of May 2017; the sum as predicted, wholly")
    print("hidden, and after the backward pass.\n")
    print("                            of that |  speedup             with the sum")
    print("model     each GPUs  step ms   sum | paper  pred   error      hidden     after")
    found: dict[str, dict[str, float]] = {}
    for run in DGX_1P:
        captured = capture(run.build(), (torch.zeros(8, 3, 224, 224),))
        factor = 1.0
        for gpus, rate in run.images_per_s.items():
            graph, cluster = at_batch(captured, run.each * gpus), links(cluster_preset("p100-sxm2", gpus))
            roofline, plan = RooflineCosts(graph, cluster, optimizer="sgd"), data_plan(graph, gpus)
            step, hidden, after = (
                predict(graph, cluster, ScaledCosts(roofline, factor, overlap), plan) for overlap in (None, 1.0, 0.0)
            )
            if gpus == 1:
                factor = run.each / rate / step.step_s
                continue
            published, alone_s = rate / run.images_per_s[1], run.each / run.images_per_s[1]
            own, most, least = (gpus * alone_s / one.step_s for one in (step, hidden, after))
            parts = f"{step.step_s * 1e3:>8.1f} {step.reduce_s * 1e3:>5.1f}"
            speedups = f"{published:>5.2f} {own:>5.2f} {own / published - 1:>+7.1%} {most:>11.2f} {least:>9.2f}"
            print(f"{run.name:<9} {run.each:>4} {gpus:>4} {parts} | {speedups}")
            found.setdefault(f"{run.name}-{run.each}", {})[str(gpus)] = round(own / published - 1, 4)
    return found


def print_crossover(factor: float) -> dict[str, int | None]:
    """Images per GPU from which replicas win, on several machines; those on slow links by number of GPUs."""
    print("\nImages per GPU from which fully-connected layers are better replicated:\n")
    print(f"{'GPUs':<32}" + "".join(f"{gpus:>8}" for gpus in (2, 4, 8)))
    print(f"{'equal bytes: 3,368 / GPUs':<32}" + "".join(f"{analytic(gpus):>8.0f}" for gpus in (2, 4, 8)))
    slow: dict[str, int | None] = {}
    for line in lines(factor):
        found = {str(gpus): crossover(line, gpus) for gpus in (2, 4, 8)}
        slow = slow or found
        print(f"{line.name:<32}" + "".join(f"{'never' if b is None else b:>8}" for b in found.values()), flush=True)
    return slow


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    factor = calibrated()
    facts = {"krizhevsky2014": print_table(factor)}
    print_rivals(factor)
    found = {**facts, "crossover": print_crossover(factor), "dgx1-p100": print_dgx()}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
