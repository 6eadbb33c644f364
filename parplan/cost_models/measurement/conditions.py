"""Conditions that measurements made now are stored under: device, torch, CUDA, and the switches that are set."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch

from parplan.accelerators import accelerator_name
from parplan.cost_models.devices.local_devices import preset_of
from parplan.cost_models.profile.records import Conditions

__all__ = ["cpu_name", "current_conditions", "switches"]

_CPU_INFO = Path("/proc/cpuinfo")


def current_conditions(device: torch.device, busy: int) -> Conditions:
    """The conditions of measurements made now on `device` while `busy` logical devices work at once."""
    version = torch.__version__.split("+")[0]
    flags = ", ".join(switches(device))
    if device.type != "cpu":
        name = accelerator_name(device)
        runtime = torch.version.cuda or "" if device.type == "cuda" else ""
        return Conditions(preset_of(name) or name, busy, version, runtime, flags)
    return Conditions(f"{cpu_name()}, 1 thread", busy, version, "", flags)


def cpu_name(info: Path = _CPU_INFO) -> str:
    """The processor's model name as its maker gives it, where the system tells; else its architecture."""
    try:
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    pairs = (line.partition(":") for line in lines)
    names = (" ".join(value.split()) for key, _, value in pairs if key.strip() == "model name")
    return next((name for name in names if name), "") or platform.processor() or platform.machine() or "cpu"


def switches(device: torch.device) -> list[str]:
    """Torch's switches that change the kernels of `device` and are not as torch sets them, in words, sorted."""
    table = {"cuda": _CUDA, "cpu": _CPU}.get(device.type, ())  # torch.backends has none for other types
    values = [(switch, attrgetter(switch.name)(torch.backends)) for switch in table]
    words = [switch.words.format(value) for switch, value in values if value not in switch.usual]
    return sorted([*words, "deterministic"] if torch.are_deterministic_algorithms_enabled() else words)


@dataclass(frozen=True)
class _Switch:
    """An attribute in torch.backends, the values that are torch's default, and words for any other."""

    name: str
    usual: tuple[str | bool, ...]
    words: str


# Of precision, the settings of one backend each: the older switches (allow_tf32, set_float32_matmul_precision) set
# these too, and refuse to be read once something was set that they cannot express.
_FULL = ("none", "ieee")
_CPU = (
    _Switch("mkldnn.matmul.fp32_precision", _FULL, "{} matmul"),
    _Switch("mkldnn.conv.fp32_precision", _FULL, "{} convolution"),
    _Switch("mkldnn.rnn.fp32_precision", _FULL, "{} rnn"),
    _Switch("mkldnn.enabled", (True,), "no mkldnn"),
)
_CUDA = (
    _Switch("cuda.matmul.fp32_precision", _FULL, "{} matmul"),
    _Switch("cudnn.conv.fp32_precision", ("tf32",), "no tf32 cudnn convolution"),
    _Switch("cudnn.rnn.fp32_precision", ("tf32",), "no tf32 cudnn rnn"),
    _Switch("cudnn.enabled", (True,), "no cudnn"),
    _Switch("cudnn.benchmark", (False,), "cudnn benchmark"),
    _Switch("cudnn.deterministic", (False,), "cudnn deterministic"),
)
