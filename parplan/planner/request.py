"""Options of planning, the planner's request, and the listener it reports progress to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from parplan.cluster import Cluster
from parplan.cost_models.optimizers import OPTIMIZER_MEMORY
from parplan.errors import PlanError
from parplan.pins import Pin, read_pins
from parplan.plan import SCHEDULES, Plan
from parplan.planner.option_fields import gpu_count, memory_bytes, option, positive, share, whole_number

__all__ = ["Listener", "PlanOptions", "PlanRequest"]


class Listener(Protocol):
    """Listener to the driver's progress; report/progress.py prints it."""

    def phase(self, name: str) -> None:
        """A phase begins: "capture", "costs" or "solve"."""
        ...

    def advance(self, done: int, total: int) -> None:
        """So much of the phase is done."""
        ...

    def solver(self, objective: float, bound: float) -> None:
        """Best step time and bound so far, in seconds."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan for, and how: the options of `parplan analyze` and the keywords of `parplan.analyze`.

    The functions of api.py spell the keywords out, for editors and `help()`; a test compares them with these fields.
    """

    gpus: int | str | None = option(
        None, "how many, or hosts x GPUs of each, 2x8 (default: the plan's, with --plan, else those that are here, "
        "else 1)", type=gpu_count, metavar="N",
    )  # fmt: skip
    gpu: str | None = option(
        None, "which kind, such as v100-sxm2 or h100-sxm; `parplan presets` lists all (default: those that are here, "
        "else a preset, and the report says so)", metavar="NAME",
    )  # fmt: skip
    link: str | None = option(None, "what joins them (default: the GPU's usual link)", metavar="NAME")
    cluster: Cluster | str | Path | None = option(
        None, "instead of these three: a TOML file with devices, of several kinds if need be, and levels of links "
        "(docs/clusters.md)", metavar="FILE",
    )  # fmt: skip
    memory_bytes: int | None = option(
        None, "memory a plan may use on each, in GiB", flag="memory", type=memory_bytes, metavar="GIB"
    )
    precision: str = option("fp32", None, choices=("fp32", "tf32", "fp16", "bf16"))
    optimizer: str = option("adam", "whose state has to fit in memory (default: adam)", choices=tuple(OPTIMIZER_MEMORY))
    rules: str = option(
        "default", "strict: cuda-convnet2's divisibility rules to the letter, no transfer may bend them",
        choices=("default", "strict"),
    )  # fmt: skip
    scheme: str = option(
        "auto", "how samples get from many replicas to layers with fewer: all at once, one replica's or a share of "
        "each at a time (default: as is fastest)", choices=("auto", "gather", "broadcast", "interleave"),
    )  # fmt: skip
    micro_batches: int | None = option(
        None, "parts of the batch that go forward and backward one after another, their gradients added up (default: "
        "one, or as many as memory asks for)", type=whole_number, metavar="M",
    )  # fmt: skip
    stages: int | None = option(
        None, "groups of devices that work as pipeline stages (default: where memory is short, what is fastest)",
        type=whole_number, metavar="S",
    )  # fmt: skip
    schedule: str | None = option(
        None, "in which order stages take micro-batches; goes with --stages (default: as is fastest)",
        choices=SCHEDULES[1:],
    )  # fmt: skip
    measure: bool = option(False, "time the layers on the device that is here")
    as_profiled: bool = option(
        False, "use measured times at the speed that the device had when they were measured, whatever it has now, so "
        "that two runs print the same",
    )  # fmt: skip
    time_limit_s: float = option(
        60.0, "seconds for the solver (default: 60); then the best plan found, with its gap", flag="time-limit",
        type=positive, metavar="S",
    )  # fmt: skip
    tolerance: float = option(
        0.03, "share of the step to give up for a simpler plan: one written by hand, fewer changes of layout, equal "
        "parts of the batch (default: 0.03; 0: the fastest)", type=share, metavar="X",
    )  # fmt: skip
    plan: Plan | None = option(None, "check and price this plan instead of searching for one", metavar="FILE")
    pins: tuple[Pin, ...] = option(
        (), "decide some layers by hand: 'fc6=shards:4', 'features.*=replicas:4', 'conv1=gpu:0,1'; repeatable, the "
        "later one counts (docs/pins.md)", flag="pin", action="append", metavar="PATTERN=WORDS",
    )  # fmt: skip

    @staticmethod
    def of(keywords: Mapping[str, Any]) -> PlanOptions:
        """The options among a function's keywords, with the plan loaded and the pins read, however they are given.

        Raises:
            PlanError: the plan's file cannot be read.
            PinError: the pins cannot be read, or are given beside a plan.
        """
        named = {one.name: keywords[one.name] for one in fields(PlanOptions) if one.name in keywords}
        plan = named.get("plan")
        named["plan"] = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
        named["pins"] = read_pins(named.get("pins"), with_plan=plan is not None)
        return PlanOptions(**named)

    @property
    def given(self) -> Plan | None:
        """The plan that is given, under the rules that are asked for.

        Raises:
            PlanError: another number of micro-batches is asked for than it has.
        """
        plan = self.plan
        if plan is not None and self.micro_batches not in (None, plan.micro_batches):
            raise PlanError(
                f"the plan's number of micro-batches is {plan.micro_batches}, and {self.micro_batches} were asked for; "
                "leave out --micro-batches (micro_batches=), or the plan"
            )
        return plan if plan is None or self.rules != "strict" else replace(plan, rules=self.rules)

    @property
    def by_hand(self) -> Mapping[str, object]:
        """The plan and the pins that are given, by name, as texts that processes compare."""
        return {"plan": "none" if self.plan is None else self.plan.to_json(), "pins": self.pins or "none"}

    def request(self, **context: Any) -> PlanRequest:
        """The planner's request, with the fields that only a `PlanRequest` has."""
        return PlanRequest(**vars(self), **context)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanOptions):
    """The planner's input beside graph, cluster and costs.

    Args:
        plan: a plan to review instead of the solver's own.
        time_limit_s: for all searches together; the best plan found is returned with its gap.
        notes: sentences that stand first in the report.
        capture_s: how long capture took, for the record.
        started: when the user's call began, on the clock of `time.perf_counter`.
        times_from: the file that layers' times come from, if any.
        pins: what is decided by hand; only the rest is searched.
        price_pins: find out what each pin costs, for a report; that takes a search for every pin.
        started_ranks: every device has a process that is running and brings samples, so that one device cannot be used
            alone.
    """

    notes: tuple[str, ...] = ()
    capture_s: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    times_from: str = ""
    price_pins: bool = True
    started_ranks: bool = False

    @property
    def asked_micro_batches(self) -> int | None:
        """The number of micro-batches that is asked for; None: as many as memory asks for."""
        return self.plan.micro_batches if self.plan is not None else self.micro_batches

    def priced_on(self, cluster: Cluster, plan: Plan) -> Cluster:
        """The cluster that a plan is priced on: one device alone has the inputs, and keeps the results.

        Where each device has its process already, the others' samples have to come from there.
        """
        used = {device for own in plan.layers.values() for device in own.devices}
        alone = len(used) == 1 < cluster.count and cluster.home is None and not self.started_ranks
        return replace(cluster, home=used.pop()) if alone else cluster
