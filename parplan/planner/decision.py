"""The decision: a plan with its prediction, proof and reasons, from which report and JSON are printed."""

from __future__ import annotations

from dataclasses import dataclass, field

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel, Source
from parplan.fields import ranges
from parplan.graph.layer_graph import LayerGraph
from parplan.plan import LISTED_DEVICES, Plan, Scheme, Strategy

__all__ = [
    "ANY_BLOCK", "BRANCHES", "MESHES", "NOT_COMPARED", "SHARDED", "SOME_BRANCHES", "STAGES", "WIDEST",
    "Alternative", "Arrival", "Baseline", "BatchTried", "ConcurrentBranches", "Decision", "DeviceTrack",
    "LayerReport", "MicroBatchesTried", "Passes", "Phase", "PinPrice", "Pins", "Prediction", "PricedGraph", "Proof",
    "SchemePrice", "Seconds", "Simpler", "Without",
]  # fmt: skip

ANY_BLOCK, BRANCHES = "layers on any block of devices", "branches at the same time"
SOME_BRANCHES = "branches at the same time on blocks that make up the first devices"
SHARDED = "sharded state"
STAGES = "pipeline stages"
MESHES = "meshes of equal blocks"
WIDEST = "layers on one device, or on as many as can share them"
"""Words for shapes of plans that a proof covers (search_space/shape.py)."""

NOT_COMPARED = "not at all"
"""How plans of a shape were compared that may be faster, where none was."""


@dataclass(frozen=True)
class Arrival:
    """An input that a layer takes from other devices: the output of `layer`, which runs on `devices`."""

    layer: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Alternative:
    """Another strategy of one layer while all others stay, and by how many seconds the step grows (below 0: shrinks).

    `fits`: False where it would be faster and needs more memory than there is. `layers`: so many layers, copies in
    repeated blocks that are planned alike, change together.
    """

    strategy: Strategy
    compute_s: float
    transfer_s: float
    exposed_s: float
    fits: bool = True
    layers: int = 1

    @property
    def total_s(self) -> float:
        """Seconds the whole step takes longer."""
        return self.compute_s + self.transfer_s + self.exposed_s


@dataclass(frozen=True)
class LayerReport:
    """The report of one layer: its strategy, its predicted times (seconds per step) and memory, and the reason.

    Args:
        transfer_s: bringing the layer its inputs, forward and backward.
        reduce_s: its gradient reduction on the links, overlapped or not.
        memory_bytes: its addition to the peak of each of its devices.
        why: one line against the best alternative.
        bends: the strict rules that an explicit transfer stands in for ("R2: ...").
        copies: the inputs that come from other devices.
        pinned: the part of its strategy that pins decide, in words.
        parameters: number of its parameters.
        inputs: the layers that feed it.
        alternatives: its other strategies, the fastest first; of those that read alike the fastest.
        refused: the rules that leave out other ways to use all devices, in words.
        stage: its pipeline stage, from 1 on; 0 where there are none.
    """

    name: str
    kind: str
    strategy: Strategy
    forward_s: float
    backward_s: float
    transfer_s: float
    reduce_s: float
    memory_bytes: int
    source: Source
    why: str
    bends: tuple[str, ...] = ()
    copies: tuple[Arrival, ...] = ()
    pinned: str = ""
    parameters: int = 0
    inputs: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    refused: tuple[str, ...] = ()
    stage: int = 0


@dataclass(frozen=True)
class Prediction:
    """One step of a plan. Parts add up: forward + backward + transfer + exposed reduce + update + overhead = step.

    `update_s` is the optimizer's, `overhead_s` the runtime's own; the step is between `low_s` and `high_s` if no
    figure is off by more than its uncertainty. `memory_bytes` is the predicted peak of every logical device.
    `most_hidden` is the share of `reduce_s` that the backward pass could hide at most. `simulated`: the parts are of
    the simulated step, of the device that is done last. `batch_norm_s` is how much of the transfers, of all layers
    together, exchanges statistics, so that batch norm sees the whole batch.
    """

    step_s: float
    forward_s: float
    backward_s: float
    transfer_s: float
    reduce_s: float
    exposed_reduce_s: float
    memory_bytes: tuple[int, ...]
    update_s: float = 0.0
    overhead_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    most_hidden: float = 1.0
    simulated: bool = False
    batch_norm_s: float = 0.0


@dataclass(frozen=True)
class Baseline:
    """A plan people would write by hand, under the same cost model.

    `step_s` is None when no such plan is legal, and `why_not` says which rule; `fits` is False when
    it needs more memory than a device has. `memory_bytes` is the peak of the device with the least room left, and
    `limit_bytes` what that one has. `on` names the devices it uses where there are several kinds. `bends` says which
    parts of the batch its replicas have where they differ ("R1: ..."). `batch_norm_s` is what batch norm over the whole
    batch would add, where the step is that of batch norm over each device's samples, as DistributedDataParallel has it.
    `micro_batches` is how many it has, of as many samples in all.
    """

    name: str
    step_s: float | None
    memory_bytes: int | None
    fits: bool
    why_not: str = ""
    plan: Plan | None = None
    on: str = ""
    limit_bytes: int | None = None
    bends: str = ""
    batch_norm_s: float = 0.0
    micro_batches: int = 1

    @property
    def whole_s(self) -> float | None:
        """Seconds of its step with batch norm over the whole batch, as the plan itself has it."""
        return None if self.step_s is None else self.step_s + self.batch_norm_s


@dataclass(frozen=True)
class Without:
    """A plan that lacks something of the chosen one: "stages", "tensor shards", "state in slices", "recomputation" or
    "micro-batches". `ratio` is its step over the chosen plan's. Of a mesh it is the fastest one that fits, counted, and
    None where none does; else the plan itself, with that undone, which need not fit: `memory_bytes` are its peak."""

    name: str
    ratio: float | None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Simpler:
    """The fastest plan that was found, where a simpler one within the tolerance is taken instead.

    `fastest_s` is its step in seconds; `changes` the edges between layers on which it changes layout, `kept` those on
    which the plan taken does. `by_hand` names the plan by hand that is taken, if it is one; `differs` says where layers
    with weights have other strategies in the fastest ("8 shards of wte")."""

    fastest_s: float
    changes: int
    kept: int
    by_hand: str = ""
    differs: str = ""


@dataclass(frozen=True)
class Proof:
    """The proof over all shapes of plans. `objective`, the plan's step, and `bound` in seconds; `gap` is relative.

    `given`: the plan is a reviewed one, not what the solver found. `covered`: the shapes that the bound is of.
    `equal_parts`: the bound is of plans that keep R1, as bending it gains too little. `simpler`: the fastest plan,
    where a simpler one is taken. `alike`: the equal blocks of layers that all compared plans split alike, in words.
    `stages`: how plans in pipeline stages, which may be faster, were compared, in words; empty where none can be.
    """

    status: str
    objective: float
    bound: float
    gap: float
    seconds: float
    given: bool = False
    covered: tuple[str, ...] = ()
    equal_parts: bool = False
    simpler: Simpler | None = None
    alike: str = ""
    stages: str = ""


@dataclass(frozen=True)
class Seconds:
    """How long parplan itself took, in seconds; `start` is before its own work: imports, and loading the model."""

    capture: float
    costs: float
    solve: float
    total: float
    start: float = 0.0


@dataclass(frozen=True)
class PinPrice:
    """The price of one pin while the others are kept, or of several with the same text.

    `without_s` is the best step without it, None if there is none (`why_not` says why). Where not `proven`, a plan
    faster than those compared may exist. `layers` is how many layers it names, `patterns` how.
    """

    pin: str
    origin: str
    layers: int
    step_s: float
    without_s: float | None
    proven: bool
    why_not: str = ""
    patterns: tuple[str, ...] = ()

    @property
    def price_s(self) -> float | None:
        """Seconds a step takes longer because of it; below 0 where another pin costs more without this one."""
        return None if self.without_s is None else self.step_s - self.without_s


@dataclass(frozen=True)
class Pins:
    """The price of all pins together, against the fastest plan without any (None: no such plan fits), and of each."""

    step_s: float
    free_s: float | None
    proven: bool
    each: tuple[PinPrice, ...]

    @property
    def price_s(self) -> float | None:
        """Seconds a step takes longer because of all pins."""
        return None if self.free_s is None else self.step_s - self.free_s


@dataclass(frozen=True)
class SchemePrice:
    """The predicted step of a plan under one scheme.

    `samples` of the batch meet at a time in the layers with fewer replicas. Where the scheme is impossible, or not
    legal for this plan, there are no figures and `why_not` says why.
    """

    scheme: Scheme
    passes: int
    step_s: float | None
    exposed_transfer_s: float | None
    memory_bytes: int | None
    samples: int | None
    why_not: str = ""


@dataclass(frozen=True)
class Passes:
    """A boundary between layers of `max_replicas` replicas and layers of fewer, at the least `min_replicas`.

    `layers` run in passes under the scheme that was taken; `schemes` has all three, as far as they are possible.
    `updated` are the layers pinned to be updated between passes, because of which there have to be some; `in_front`
    those that have an update period and run once all the same.
    """

    taken: Scheme
    max_replicas: int
    min_replicas: int
    layers: int
    schemes: tuple[SchemePrice, ...]
    updated: tuple[str, ...] = ()
    in_front: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Trips through the layers with fewer replicas."""
        return next(one.passes for one in self.schemes if one.scheme is self.taken)


@dataclass(frozen=True)
class DeviceTrack:
    """Layers of a branch, or of several on the same devices, and their forward and backward one after another."""

    layers: tuple[str, ...]
    devices: tuple[int, ...]
    compute_s: float

    def describe(self) -> str:
        """Words for a report: `b.0 .. b.7 on device 1`."""
        ends = " .. ".join(dict.fromkeys((self.layers[0], self.layers[-1])))
        listed = ranges(self.devices) if len(self.devices) > LISTED_DEVICES else ", ".join(map(str, self.devices))
        return f"{ends} on device{'s' if len(self.devices) > 1 else ''} {listed}"


@dataclass(frozen=True)
class Phase:
    """Tracks on disjoint devices that run at the same time; one after the other they would take `saved_s` longer."""

    tracks: tuple[DeviceTrack, ...]
    saved_s: float


@dataclass(frozen=True)
class ConcurrentBranches:
    """The branches that a plan runs at the same time: none, where they were tried in vain.

    `without_s` is the step of the best plan known that does not (None: no other was sought), `tried` how many plans
    were compared.
    """

    phases: tuple[Phase, ...]
    without_s: float | None = None
    tried: int = 0


@dataclass(frozen=True)
class BatchTried:
    """A batch that was considered, over all devices.

    `step_s` and `memory_bytes` (of the device with the least room left, which has `limit_bytes`) are None where no plan
    fits.
    """

    batch: int
    step_s: float | None
    memory_bytes: int | None
    limit_bytes: int | None
    fits: bool

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 where no plan fits."""
        return self.batch / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class MicroBatchesTried:
    """A number of micro-batches compared (with `sharded` state, layers `replayed`, `staged`): seconds and bytes (of the
    fullest device) of its best plan, or the nearest to fitting (not `fits`); None where none fits, or is faster."""

    count: int
    step_s: float | None
    memory_bytes: int | None
    fits: bool
    sharded: bool = False
    replayed: bool = False
    staged: bool = False


@dataclass(frozen=True, eq=False)
class PricedGraph:
    """The graph at the size of a micro-batch, with the costs it was planned by: what a step is simulated from."""

    graph: LayerGraph
    costs: CostModel


@dataclass(frozen=True)
class LossOutside:
    """A loss that is not part of the plan.

    Args:
        results: the values that are handed out for it.
        nbytes: of these.
        moved_s: to hand them out and to take their gradients back, in every step.
        share: of the step.
    """

    results: tuple[str, ...]
    nbytes: int
    moved_s: float
    share: float

    def __str__(self) -> str:
        count = f"{len(self.results)} results" if len(self.results) > 1 else "results"
        return (
            f"The loss is outside of the plan: handing out {count} of {self.nbytes / 2**20:,.1f} MiB and taking the "
            f"gradients back is {self.share:.0%} of the step ({self.moved_s * 1e3:.2f} ms). With loss=fn, targets=... "
            "it is planned as well, and runs where the results are."
        )


@dataclass(frozen=True)
class Decision:
    """A plan with its prediction, its reasons, its baselines and its proof.

    Args:
        parameters: number of parameters of the model.
        precision: "fp32", "tf32", "bf16", ... assumed by the costs.
        optimizer: whose state the memory figures include.
        notes: things the reader must know first, such as the preset planned for when no GPU is here.
        advice: one sentence: use this plan, plain data parallel, or one device.
        advised: the name of the baseline that the advice is: this plan, or one that is better than a plan which the
            user decided.
        times_from: the file that layers' times come from, when it is not parplan that measured or estimated them.
        links: where the times of transfers and reductions come from.
        pins: what was pinned by hand and what it costs; None where nothing was.
        batches, micro_batches: those that were compared, smallest first; empty where there was one.
        passes: the schemes that were compared; None where all layers have equally many replicas.
        branches: branches that run at the same time, or were tried to; None where the model has no branches worth it.
        priced: the graph and its costs, for pictures of the step; None in a decision that was put together by hand.
        loss_outside: the price of a loss outside of the plan; None where it is inside, or costs next to nothing.
        without: plans that lack one of its ways to need less memory.
    """

    parameters: int
    cluster: Cluster
    precision: str
    optimizer: str
    plan: Plan
    layers: tuple[LayerReport, ...]
    prediction: Prediction
    baselines: tuple[Baseline, ...]
    advice: str
    proof: Proof
    seconds: Seconds
    notes: tuple[str, ...] = ()
    times_from: str = ""
    links: Source = Source.ESTIMATED
    pins: Pins | None = None
    batches: tuple[BatchTried, ...] = ()
    micro_batches: tuple[MicroBatchesTried, ...] = ()
    passes: Passes | None = None
    branches: ConcurrentBranches | None = None
    advised: str = ""
    priced: PricedGraph | None = field(default=None, repr=False, compare=False)
    loss_outside: LossOutside | None = None
    without: tuple[Without, ...] = ()

    @property
    def speedup(self) -> float | None:
        """Against one device under the same cost model (ignoring whether it fits there)."""
        one = next((b.step_s for b in self.baselines if b.name == "one device"), None)
        return one / self.prediction.step_s if one else None
