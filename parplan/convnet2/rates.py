"""The layer-parameter file: learning rates and their schedules, momentum, weight decay, how often weights are updated.

cuda-convnet2 keeps what may change during training in a second file, a section per layer. Its momentum and decay are
those of torch.optim.SGD; a schedule's value at the beginning is its base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from parplan.convnet2.ini import IniSection

__all__ = ["Rates", "Schedule", "rates_of", "unused_notes"]

_FORM = re.compile(r"(?P<kind>\w+)\s*\[(?P<fields>[^\]]*)\]")
_FIELDS = {
    "const": ("base",),
    "linear": ("base", "tgtfactor"),
    "exp": ("base", "tgtfactor"),
    "dexp": ("base", "tgtfactor", "numsteps"),
}
_UNUSED = ("wball", "superEps", "superMom", "wcNormMin", "wcNormMax")


@dataclass(frozen=True)
class Schedule:
    """A rate over training: `base` at the beginning, base / factor at the end (`const`: base throughout)."""

    base: float
    kind: str = "const"
    factor: float = 1.0
    steps: int = 1

    def at(self, progress: float) -> float:
        """The rate after a share `progress` (0 to 1) of training.

        >>> [round(Schedule(0.01, "dexp", 1000.0, 4).at(share), 6) for share in (0.0, 0.25, 0.3, 0.6, 1.0)]
        [0.01, 0.01, 0.001, 0.0001, 1e-05]
        """
        share = min(max(progress, 0.0), 1.0)
        if self.kind == "linear":
            return self.base * (1 - share) + self.base / self.factor * share
        if self.kind == "dexp":
            step = max(math.ceil(share * self.steps) - 1, 0)
            share = step / (self.steps - 1) if self.steps > 1 else 1.0
        return float(self.base / self.factor**share)


@dataclass(frozen=True)
class Rates:
    """Learning rates, momentum and decay of one layer.

    Args:
        weights, biases: learning rates.
        momentum, bias_momentum, decay: of torch.optim.SGD; biases do not decay.
        update_period: passes between updates; None where the file leaves it to the program.
    """

    weights: Schedule
    biases: Schedule
    momentum: float
    bias_momentum: float
    decay: float
    update_period: int | None = None


def rates_of(params: IniSection) -> Rates:
    """The rates of a layer with weights.

    Raises:
        LayerFileError: one that is missing, is no schedule, or differs between a layer's inputs.
    """
    period = params.integer("updatePeriod", 0, 0)
    return Rates(
        weights=_schedule(params, "epsW"),
        biases=_schedule(params, "epsB"),
        momentum=_same(params, "momW"),
        bias_momentum=params.number("momB", least=0.0),
        decay=_same(params, "wc", 0.0),
        update_period=(period or 1) if params.has("updatePeriod") else None,
    )


def unused_notes(params: Mapping[str, IniSection]) -> list[str]:
    """Numbers in the file that change training in cuda-convnet2 and are not applied here."""
    found = [
        f"{name} {key}={section.text(key)}"
        for name, section in params.items()
        for key in _UNUSED
        if section.has(key) and any(section.numbers(key, len(section.names(key))))
    ]
    file = next(iter(params.values())).file if params else ""
    return [f"{file}: not applied here: {', '.join(found)}."] if found else []


def _same(params: IniSection, key: str, default: float | None = None) -> float:
    """A number that is one for all inputs."""
    if default is not None and not params.has(key):
        return default
    found = params.numbers(key, len(params.names(key)))
    if len(set(found)) > 1:
        raise params.error(key, "a layer's inputs share one number here; give the same for all")
    return found[0]


def _schedule(params: IniSection, key: str) -> Schedule:
    """`0.01`, or `dexp[base=0.01;tgtFactor=250;numSteps=4]`; a list says the same for every input."""
    schedules = set()
    for text in params.names(key):
        found = _FORM.fullmatch(text)
        kind = found["kind"] if found else "const"
        pairs = [part.partition("=") for part in found["fields"].split(";")] if found else [("base", "=", text)]
        try:
            numbers = {name.strip().lower(): float(value) for name, _, value in pairs}
        except ValueError:
            numbers = {}
        steps = numbers.get("numsteps", 1.0)
        # Finite, a rate of at least 0, a factor above 0, whole steps.
        sensible = all(map(math.isfinite, numbers.values())) and steps >= 1 and steps % 1 == 0
        sensible = sensible and numbers.get("base", -1.0) >= 0 and numbers.get("tgtfactor", 1.0) > 0
        if kind not in _FIELDS or set(numbers) != set(_FIELDS[kind]) or not sensible:
            raise params.error(key, "it is no learning rate; write a number, or linear[base=0.01;tgtFactor=250], "
                               "exp[base=0.01;tgtFactor=250] or dexp[base=0.01;tgtFactor=250;numSteps=4]")  # fmt: skip
        schedules.add(Schedule(numbers["base"], kind, numbers.get("tgtfactor", 1.0), int(steps)))
    if len(schedules) > 1:
        raise params.error(key, "a layer's inputs share one learning rate here; give the same for all")
    return schedules.pop()
