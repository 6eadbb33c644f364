"""Hand-made decisions: what the report is given, without capturing, pricing or solving anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from parplan.cluster import Cluster, Device, Link
from parplan.cost_models.costs import Source
from parplan.plan import Plan, Scheme, Strategy
from parplan.planner.decision import (
    ANY_BLOCK,
    BRANCHES,
    Arrival,
    Baseline,
    Decision,
    LayerReport,
    Passes,
    PinPrice,
    Pins,
    Prediction,
    Proof,
    SchemePrice,
    Seconds,
)

GIB = 2**30
MS = 1e-3

ONE = Strategy()
DATA = Strategy(4, 1, None, (0, 1, 2, 3))
SHARDED = Strategy(1, 4, "out-features", (0, 1, 2, 3))
HYBRID = Strategy(2, 2, "out-features", (0, 1, 2, 3))


def cluster(count: int = 4, memory_bytes: int = 15 * GIB) -> Cluster:
    """Some V100s on NVLink."""
    device = Device("v100-sxm2", memory_bytes, {"fp32": 15.7e12}, 900e9, 5e-6, "a data sheet", estimated=False)
    return Cluster.of(device, count, (Link("nvlink 2", 8, 5e-6, 150e9, 1.0, "a data sheet", estimated=True),))


def on_two_kinds(decision: Decision) -> Decision:
    """The same with a CPU in place of the last device."""
    gpu = decision.cluster.device
    cpu = replace(gpu, kind="cpu", memory_bytes=4 * GIB)
    kinds = replace(decision.cluster, devices=(*decision.cluster.devices[:-1], cpu))
    one = replace(decision.baselines[0], on="v100-sxm2", limit_bytes=gpu.memory_bytes)
    return replace(decision, cluster=kinds, baselines=(one, *decision.baselines[1:]))


def plan_of(model: str, batch: int, layers: Iterable[LayerReport], devices: int = 4) -> Plan:
    """The plan that the layers' facts describe."""
    return Plan(model, "0123456789abcdef", batch, devices, {layer.name: layer.strategy for layer in layers})


def facts(
    name: str,
    kind: str,
    strategy: Strategy,
    forward_ms: float,
    why: str,
    *,
    transfer_ms: float = 0.0,
    reduce_ms: float = 0.0,
    memory_mib: float = 0.0,
    source: Source = Source.ESTIMATED,
    bends: tuple[str, ...] = (),
) -> LayerReport:
    """Facts of one layer, its backward twice its forward; by its kind it has weights."""
    return LayerReport(name, kind, strategy, forward_ms * MS, 2 * forward_ms * MS, transfer_ms * MS, reduce_ms * MS,
                      int(memory_mib * 2**20), source, why, bends,
                      parameters=1000 * (kind in ("conv", "linear", "bn", "embedding")))  # fmt: skip


def chained(layers: Iterable[LayerReport]) -> tuple[LayerReport, ...]:
    """The layers, each fed by the one in front of it."""
    listed = list(layers)
    feeders: list[tuple[str, ...]] = [(), *((layer.name,) for layer in listed)]
    return tuple(replace(layer, inputs=fed) for layer, fed in zip(listed, feeders, strict=False))


def predict(layers: Iterable[LayerReport], memory_gib: Iterable[float], exposed_ms: float = 0.0) -> Prediction:
    """The sums over the layers."""
    listed = list(layers)
    forward, backward = sum(f.forward_s for f in listed), sum(f.backward_s for f in listed)
    transfer, reduce_s = sum(f.transfer_s for f in listed), sum(f.reduce_s for f in listed)
    step = forward + backward + transfer + exposed_ms * MS
    memory = tuple(int(gib * GIB) for gib in memory_gib)
    return Prediction(step, forward, backward, transfer, reduce_s, exposed_ms * MS, memory)


def taken(name: str, plan: Plan, by_hand: tuple[Baseline, ...]) -> tuple[Baseline, ...]:
    """The plans by hand, of which one is the plan of the report."""
    return tuple(replace(one, plan=plan) if one.name == name else one for one in by_hand)


def rivals(step_s: float, *times: float) -> tuple[Baseline, ...]:
    """The four baselines, so many times slower than the plan."""
    names = ("one device", "pure data parallel", "pure model parallel", "cuda-convnet2's hybrid")
    return tuple(
        Baseline(name, step_s * factor, int((2 + index) * GIB), fits=True)
        for index, (name, factor) in enumerate(zip(names, times, strict=True))
    )


def _alexnet_layers() -> Iterator[LayerReport]:
    convs = {"conv1": (0.512, 0.09), "conv2": (1.634, 1.2), "conv3": (0.794, 2.6), "conv4": (1.058, 3.5),
             "conv5": (0.706, 2.3)}  # fmt: skip
    for name, (forward, weights) in convs.items():
        why = f"3.9 x as fast as on one device; {forward:.2f} ms less than 2 replicas x 2 shards of channels"
        yield facts(name, "conv", DATA, forward, why, reduce_ms=0.04 * weights, memory_mib=60 + 4 * weights)
        yield facts(f"relu{name[-1]}", "relu", DATA, 0.0312, f"works where {name} left its output", memory_mib=48)
        if name[-1] in "125":
            why = f"works where relu{name[-1]} left its output"
            yield facts(f"pool{name[-1]}", "pool", DATA, 0.0275, why, memory_mib=11.5)
    yield facts("flatten", "flatten", DATA, 0.0, "works where pool5 left its output")
    gather = "R2: 4 replicas feed 1 through an all-gather"
    yield facts("fc6", "linear", SHARDED, 0.642, "38 M weights: 4 replicas would reduce 151 MB of gradients, 0.86 ms "
                "longer than moving 18 MB of activations", transfer_ms=0.412, memory_mib=577,
                bends=(gather,))  # fmt: skip
    yield facts("relu6", "relu", SHARDED, 0.0051, "works where fc6 left its output", memory_mib=8)
    yield facts("drop6", "dropout", SHARDED, 0.0051, "works where relu6 left its output", memory_mib=10)
    yield facts("fc7", "linear", SHARDED, 0.286, "0.31 ms less than 4 replicas", transfer_ms=0.12, memory_mib=256)
    yield facts("relu7", "relu", SHARDED, 0.0051, "works where fc7 left its output", memory_mib=8)
    yield facts("drop7", "dropout", SHARDED, 0.0051, "works where relu7 left its output", memory_mib=10)
    yield facts("fc8", "linear", SHARDED, 0.0698, "0.02 ms less than 4 replicas", transfer_ms=0.12, memory_mib=62.5)
    yield facts("loss", "loss", ONE, 0.0104, "a loss is never sharded (R7); 0.01 ms less than 4 replicas",
                transfer_ms=0.031, memory_mib=2)  # fmt: skip


def alexnet() -> Decision:
    """Convolutions replicated, fully-connected layers sharded: 22 layers, all estimated."""
    layers = chained(_alexnet_layers())
    step = predict(layers, (3.21, 3.05, 3.05, 3.05), exposed_ms=0.05)
    return Decision(
        parameters=61_100_840,
        cluster=cluster(),
        precision="fp32",
        optimizer="adam",
        plan=plan_of("AlexNet", 512, layers),
        layers=layers,
        prediction=step,
        baselines=rivals(step.step_s, 3.4312, 1.1623, 1.8049, 1.0),
        advice="Use this plan: 1.16 x as fast as pure data parallel, the best of the usual ways.",
        proof=Proof("OPTIMAL", step.step_s, step.step_s, 0.0, 1.31, covered=("gather", ANY_BLOCK, BRANCHES)),
        seconds=Seconds(2.104, 0.312, 1.31, 4.52),
        notes=("No GPU here and no --gpu: planned for 4 x v100-sxm2 (estimated preset).",),
        passes=schemes(step.step_s, Scheme.GATHER),
    )


def schemes(step_s: float, taken: Scheme, why_not: str = "") -> Passes:
    """One replica behind four, under each scheme; broadcast impossible where a reason is given."""
    memory_bytes = int(3.21 * GIB)
    known = (
        SchemePrice(Scheme.GATHER, 1, step_s, 0.683 * MS, memory_bytes, 512),
        SchemePrice(Scheme.BROADCAST, 4, step_s + 0.113 * MS, 0.51 * MS, memory_bytes, 128),
        SchemePrice(Scheme.INTERLEAVE, 4, step_s + 0.04 * MS, 0.437 * MS, memory_bytes, 128),
    )
    impossible = SchemePrice(Scheme.BROADCAST, 1, None, None, None, None, why_not)
    return Passes(taken, 4, 1, 8, (known[0], impossible if why_not else known[1], known[2]))


def _block(prefix: str, scale: float, first: bool, source: Source) -> Iterator[LayerReport]:
    for index, forward in ((1, 0.21), (2, 0.48), (3, 0.22)):
        for kind, share in (("conv", 1.0), ("bn", 0.2), ("relu", 0.1)):
            if (kind, index) == ("relu", 3):
                continue
            why = f"{3.8 * share:.1f} x as fast as on one device" if kind == "conv" else f"follows conv{index}"
            yield facts(f"{prefix}.{kind}{index}", kind, DATA, forward * scale * share, why, source=source,
                        memory_mib=49 * share, reduce_ms=0.02 if kind == "conv" else 0.001)  # fmt: skip
    if first:
        yield facts(f"{prefix}.downsample.0", "conv", DATA, 0.31 * scale, "3.7 x as fast as on one device",
                    source=source, memory_mib=80, reduce_ms=0.03)  # fmt: skip
        yield facts(f"{prefix}.downsample.1", "bn", DATA, 0.05 * scale, "follows downsample.0", memory_mib=50)
    yield facts(f"{prefix}.add", "add", DATA, 0.03 * scale, "follows bn3", memory_mib=49)
    yield facts(f"{prefix}.relu3", "relu", DATA, 0.02 * scale, "follows add", memory_mib=49)


def _resnet_layers() -> Iterator[LayerReport]:
    yield facts("conv1", "conv", DATA, 1.02, "3.9 x as fast as on one device", reduce_ms=0.01, memory_mib=392,
                source=Source.MEASURED)  # fmt: skip
    yield facts("bn1", "bn", DATA, 0.2, "follows conv1", memory_mib=392, source=Source.MEASURED)
    yield facts("relu", "relu", DATA, 0.1, "follows bn1", memory_mib=392)
    yield facts("maxpool", "pool", DATA, 0.08, "follows relu", memory_mib=98)
    for stage, blocks in ((1, 3), (2, 4), (3, 6), (4, 3)):
        for block in range(blocks):
            source = Source.SHIPPED if stage == 4 else Source.MEASURED
            yield from _block(f"layer{stage}.{block}", 1.2 - 0.1 * stage, block == 0, source)
    yield facts("avgpool", "pool", DATA, 0.01, "follows layer4.2.relu3", memory_mib=0.5)
    yield facts("flatten", "flatten", DATA, 0.0, "follows avgpool")
    yield facts("fc", "linear", DATA, 0.03, "0.02 ms less than 2 replicas x 2 shards of out-features", reduce_ms=0.1,
                memory_mib=35, source=Source.INTERPOLATED)  # fmt: skip


def resnet() -> Decision:
    """A long model in four-digit memory, its times of four sources, out of solver time."""
    layers = chained(_resnet_layers())
    step = predict(layers, (9.87,) * 4)
    plan = plan_of("ResNet", 256, layers)
    return Decision(
        parameters=25_557_032,
        cluster=cluster(),
        precision="fp16",
        optimizer="momentum",
        plan=plan,
        layers=layers,
        prediction=step,
        baselines=taken("pure data parallel", plan, rivals(step.step_s, 3.62, 1.0, 2.9, 1.31)),
        advice="Use plain data parallel on all 4 devices.",
        advised="pure data parallel",
        proof=Proof("FEASIBLE", step.step_s, step.step_s * 0.968, 0.032, 60.0),
        seconds=Seconds(5.2, 1.1, 60.0, 66.4),
    )


def crowded() -> Decision:
    """Two baselines that cannot be: one does not fit, one is not legal; three devices, two passes."""
    split = Strategy(1, 3, "out-features", (0, 1, 2))
    layers = (
        facts("encoder.embed", "embedding", Strategy(2, 1, None, (0, 2)), 14.1, "fits nowhere else", memory_mib=14_000),
        facts("encoder.project_with_a_long_name_that_does_not_fit.in_the_column", "linear", split, 2210.0,
              "4.2 s less than on one device", transfer_ms=31.0, memory_mib=9_400,
              bends=("R2: 2 replicas feed 1", "R4: 2 replicas feed 1 of 3 devices")),
        facts("loss", "loss", Strategy(devices=(1,)), 0.2, "a loss is never sharded (R7)", memory_mib=1),
    )  # fmt: skip
    step = predict(layers, (14.9, 9.2, 14.9))
    one, data, model, hybrid = rivals(step.step_s, 2.1, 1.0, 1.4, 1.2)
    return Decision(
        parameters=2_147_483_648,
        cluster=cluster(3),
        precision="tf32",
        optimizer="adamw",
        plan=plan_of("Crowded", 96, layers, 3),
        layers=layers,
        prediction=step,
        baselines=(
            replace(one, memory_bytes=31 * GIB, fits=False),
            replace(data, step_s=None, memory_bytes=None, fits=False,
                    why_not="encoder.embed: a batch of 96 cannot be cut in 5 (R1); use 3 or 6 replicas, or a batch "
                    "that 5 divides"),
            model,
            hybrid,
        ),
        advice="Use this plan: the model does not fit on one device.",
        proof=Proof("OPTIMAL", step.step_s, step.step_s, 0.0, 0.0421),
        seconds=Seconds(12.0, 0.04, 0.0421, 12.1),
    )  # fmt: skip


def alone() -> Decision:
    """One device, nothing to move: the smallest report."""
    layers = (facts("fc", "linear", ONE, 0.0004, "there is one device", memory_mib=0.3, source=Source.MEASURED),)
    step = predict(layers, (0.0021,))
    plan = plan_of("Linear", 1, layers, 1)
    return Decision(
        parameters=1_010,
        cluster=cluster(1),
        precision="fp32",
        optimizer="sgd",
        plan=plan,
        layers=layers,
        prediction=step,
        baselines=taken("one device", plan, rivals(step.step_s, 1.0, 1.0, 1.0, 1.0)[:1]),
        advice="Use one device: more of them are not faster.",
        advised="one device",
        proof=Proof("GIVEN", step.step_s, float("-inf"), float("inf"), 0.0),
        seconds=Seconds(0.3, 0.0, 0.0, 0.3),
    )


def pinned() -> Decision:
    """Two towers by hand: what is pinned, what is copied, what it costs; a price not known, one below 0, one open."""
    left, right = Strategy(2, 1, None, (0, 1)), Strategy(1, 2, "out-features", (3, 2), update_period=2)
    own, taken = "pinned by *a=gpu:0,1", "on the devices of its first input, *a=gpu:0,1"
    words = "pinned by *b=gpu:3,2 shards:2"
    layers = (
        replace(facts("conva", "conv", left, 3.1, "4 replicas: -1.02 ms, less compute"), pinned=own),
        replace(facts("fcb", "linear", right, 4.2, "2 replicas: -0.31 ms, less to move", transfer_ms=0.41),
                pinned=f"{words}, fcb=update:2", copies=(Arrival("conva", (0, 1)),)),
        replace(facts("relub", "relu", right, 0.1, "follows fcb; any other way costs +0.02 ms"), pinned=words),
        replace(facts("join", "cat", left, 0.2, "2 shards of features: +0.12 ms, activations to move", transfer_ms=0.3),
                pinned=taken, copies=(Arrival("relub", (3, 2)), Arrival("conva", (1, 0)))),
    )  # fmt: skip
    step = predict(layers, (1.2, 1.2, 0.7, 0.7))
    prices = (
        PinPrice("*a=gpu:0,1", "--pin", 2, step.step_s, 0.8 * step.step_s, True),
        PinPrice("*b=gpu:3,2 shards:2", "pins.toml", 2, step.step_s, 1.01 * step.step_s, True),
        PinPrice("fcb=update:2", "pins.toml", 1, step.step_s, step.step_s, False),
        PinPrice("a_module_with_a_long_name.and.what_is_in_it=replicas:2", "--pin", 1, step.step_s, None, True,
                 "pin 'relub=shards:2' (--pin): relub: 2 shards cannot occupy 1 device; use 1 (R6)"),
    )  # fmt: skip
    return replace(
        alexnet(),
        plan=plan_of("Towers", 64, layers),
        layers=layers,
        prediction=step,
        baselines=rivals(step.step_s, 2.5, 0.9, 1.8, 1.0),
        proof=Proof("OPTIMAL", step.step_s, step.step_s, 0.0, 0.11, covered=("gather", ANY_BLOCK, BRANCHES)),
        pins=Pins(step.step_s, 0.62 * step.step_s, False, prices),
    )


DECISIONS = {"alexnet": alexnet, "resnet": resnet, "crowded": crowded, "alone": alone, "pinned": pinned}
