"""Everything a person needs to review a plan: the one record report and JSON are printed from."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.cluster import Cluster
from parplan.cost_models.costs import Source
from parplan.plan import Plan, Strategy

__all__ = ["Baseline", "Decision", "LayerFacts", "Prediction", "Proof", "Seconds"]


@dataclass(frozen=True)
class LayerFacts:
    """One line of the report.

    `transfer_s` is what bringing the layer its inputs takes (forward and backward), `reduce_s` the
    time its gradient reduction is on the links (overlapped or not), `memory_bytes` what it adds on
    each of its devices, `why` one line against the best alternative, `bends` the strict rules an
    explicit transfer stands in for ("R2: ...").
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


@dataclass(frozen=True)
class Prediction:
    """One step of a plan. Parts add up: forward + backward + transfer + exposed reduce + update + overhead = step.

    `update_s` is the optimizer's, `overhead_s` the runtime's own; the step is between `low_s` and `high_s` if no
    figure is off by more than its uncertainty. `memory_bytes` is the predicted peak of every logical device.
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


@dataclass(frozen=True)
class Baseline:
    """A plan people would write by hand, under the same cost model.

    `step_s` is None when no such plan is legal, and `why_not` says which rule; `fits` is False when
    it needs more memory than a device has. `memory_bytes` is the peak of the device with the least room left, and
    `limit_bytes` what that one has. `on` names the devices it uses where there are several kinds.
    """

    name: str
    step_s: float | None
    memory_bytes: int | None
    fits: bool
    why_not: str = ""
    plan: Plan | None = None
    on: str = ""
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Proof:
    """What the solver vouches for. `objective` and `bound` in seconds; `gap` is relative.

    `given`: the plan is a reviewed one, not what the solver found.
    """

    status: str
    objective: float
    bound: float
    gap: float
    seconds: float
    given: bool = False


@dataclass(frozen=True)
class Seconds:
    """How long parplan itself took, in seconds."""

    capture: float
    costs: float
    solve: float
    total: float


@dataclass(frozen=True)
class Decision:
    """A plan with its prediction, its reasons, its rivals and its proof.

    Args:
        parameters: number of parameters of the model.
        precision: "fp32", "tf32", "bf16", ... assumed by the costs.
        optimizer: whose state the memory figures include.
        notes: things the reader must know first, such as the preset planned for when no GPU is here.
        advice: one sentence: use this plan, plain data parallel, or one device.
        times_from: the file that layers' times come from, when it is not parplan that measured or estimated them.
        links: where the times of transfers and reductions come from.
    """

    parameters: int
    cluster: Cluster
    precision: str
    optimizer: str
    plan: Plan
    layers: tuple[LayerFacts, ...]
    prediction: Prediction
    baselines: tuple[Baseline, ...]
    advice: str
    proof: Proof
    seconds: Seconds
    notes: tuple[str, ...] = ()
    times_from: str = ""
    links: Source = Source.ESTIMATED

    @property
    def speedup(self) -> float | None:
        """Against one device under the same cost model (ignoring whether it fits there)."""
        one = next((b.step_s for b in self.baselines if b.name == "one device"), None)
        return one / self.prediction.step_s if one else None
