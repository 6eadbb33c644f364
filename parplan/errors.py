"""One tree of errors, so that callers can catch what they can act on.

Every message says what was refused, where, with which numbers, and what would make it work.
"""

from __future__ import annotations

import copyreg
from typing import Any

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ClusterError",
    "InfeasiblePlan",
    "LayerFileError",
    "ModelError",
    "ParplanError",
    "PinError",
    "PlainModuleWarning",
    "PlanError",
    "PlannedMemoryWarning",
    "ProfileError",
    "RankAloneWarning",
    "ReplicaHookWarning",
    "RuleError",
    "RuntimeFailure",
    "SelfCheckError",
    "TargetError",
    "UncheckedWarning",
]


class ParplanError(Exception):
    """Anything parplan refuses; the text says what would make it work."""

    def __reduce__(self) -> Any:
        """Its text and attributes, whatever its constructor takes: errors are sent from process to process."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class TargetError(ParplanError):
    """The model named on the command line cannot be found, or is ambiguous."""


class LayerFileError(TargetError):
    """A cuda-convnet2 layer file cannot be read (the text names file, section, key and value)."""


class CaptureError(ParplanError):
    """The model cannot be captured as a graph (the text names the line)."""


class CheckpointError(ParplanError):
    """A checkpoint cannot be written or read, is damaged, or lacks a part (the text names the file)."""


class ModelError(ParplanError):
    """The model itself fails on the inputs it is given (the text names the line)."""


class ClusterError(ParplanError):
    """The devices or links asked for do not exist or make no sense."""


class PlanError(ParplanError):
    """A plan cannot be read, or does not belong to this model."""


class PinError(PlanError):
    """A pin cannot be read, names no layer, or asks for what the model, the devices or a rule forbid."""


class ProfileError(ParplanError):
    """A profile store, or the text of a profile, cannot be used (the text names the file and what to do)."""


class RuleError(PlanError):
    """A plan breaks a divisibility rule.

    Attributes:
        rule: the rule's short name, "R1" to "R8".
        layer: the dotted name of the layer that breaks it.
        found: the numbers that break it, without what would fix it.
    """

    def __init__(self, rule: str, layer: str, message: str) -> None:
        super().__init__(f"{layer}: {message} ({rule})")
        self.rule = rule
        self.layer = layer
        self.found = message.partition("; ")[0]


class InfeasiblePlan(ParplanError):
    """No plan satisfies the limits (the text names the limit, what is missing and where)."""


class RuntimeFailure(ParplanError):
    """A compiled model was called in a way its plan cannot serve, or a device failed."""


class SelfCheckError(RuntimeFailure):
    """The planned program does not compute what the plain module computes.

    Attributes:
        layer: the first layer that differs; None where it could not be told.
    """

    def __init__(self, message: str, layer: str | None = None) -> None:
        super().__init__(message)
        self.layer = layer


class ReplicaHookWarning(UserWarning):
    """A module hook sees a part of the samples, or is not called in this process; the text names the remedy."""


class UncheckedWarning(UserWarning):
    """The planned program was not compared with the plain module; the text says why."""


class PlainModuleWarning(UserWarning):
    """The plain module ran in place of a plan, with the samples of one process; the text says why."""


class BackendWarning(UserWarning):
    """Layers run as they are, although a backend was to compile them; the text says why."""


class PlannedMemoryWarning(UserWarning):
    """A step may need more memory than its plan was checked for; the text names the shapes and the bytes."""


class RankAloneWarning(UserWarning):
    """A call that every rank has to make was made by some, which wait for the others; the text says by how many."""
