"""Shares of a device's peak that kernels reach: the estimated part of the roofline, in one place.

Measured points behind the constants:
- Matrix products, 16 bit, best shape over peak: A100 SXM 271.2 of 312, A100 PCIe 252.9, H100 SXM 794.5 of 989 (H200 the
  same), B200 1745 of 2250 TFLOP/s (ml-engineering guide, "MAMF").
- K20: about 2 of 3.52 TFLOP/s in matrix products (Krizhevsky 2014, footnote 4); 40 % of peak over a whole step of
  AlexNet, whose convolutions are 92 % of the arithmetic (its Table 1: 327 images/s x 3 x 1.428 GFLOP).
So convolutions reach 0.72 of what products reach on the K20. That ratio is used for every device, and 0.8 for what no
source tells (products elsewhere, memory bandwidth): estimates both.

Small kernels reach less: eff = eff_max x w / (w + w_half). Half of it is reached by the work w_half that takes
as long at peak as the launch of one op: an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parplan.cluster import Device
from parplan.cost_models.ops.work import Engine, Kernel

__all__ = ["Efficiency", "efficiency", "kernel_seconds", "rate_of"]

CONVOLUTION_TO_PRODUCT = 0.72
OTHERWISE = 0.8

# (start of the kind's name, of 16-bit and tf32 products, of fp32 products); the first that fits
_PRODUCTS: tuple[tuple[str, float, float], ...] = (
    ("k20", 0.57, 0.57),
    ("k40", 0.57, 0.57),
    ("k80", 0.57, 0.57),
    ("a100-40g-pcie", 0.81, OTHERWISE),
    ("a100-80g-pcie", 0.81, OTHERWISE),
    ("a100", 0.87, OTHERWISE),
    ("h", 0.80, OTHERWISE),
    ("b200", 0.78, OTHERWISE),
)

# Rates of the CPU are what it achieves, not peaks; only the ratio of convolutions is left.
_ACHIEVED = ("cpu",)


@dataclass(frozen=True)
class Efficiency:
    """Shares of peak that large kernels reach."""

    gemm: float
    conv: float
    memory: float


def efficiency(device: Device, precision: str) -> Efficiency:
    """Estimated efficiencies of `device` with tensors of `precision` ("fp32", "tf32", "fp16", "bf16", "fp64")."""
    like = device.kind if device.like is None else device.like
    if like in _ACHIEVED:
        return Efficiency(1.0, CONVOLUTION_TO_PRODUCT, 1.0)
    row = next((row for row in _PRODUCTS if like.startswith(row[0])), ("", OTHERWISE, OTHERWISE))
    gemm = row[2] if precision in ("fp32", "fp64") else row[1]
    return Efficiency(gemm, gemm * CONVOLUTION_TO_PRODUCT, OTHERWISE)


def kernel_seconds(kernel: Kernel, device: Device, rate: float, reached: Efficiency) -> float:
    """Roofline of one kernel at `rate` FLOP/s peak: the slower of arithmetic and memory, never under a launch."""
    memory_s = kernel.nbytes / (device.bandwidth_bytes_per_s * reached.memory)
    if kernel.engine is Engine.MEMORY:
        return max(device.launch_s, memory_s)
    share = reached.conv if kernel.engine is Engine.CONV else reached.gemm
    compute_s = (kernel.flops + rate * device.launch_s) / (rate * share)
    return max(device.launch_s, memory_s, compute_s)


def rate_of(rates: Mapping[str, float], precision: str) -> float:
    """Peak rate at `precision`; half of fp32 for fp64 and fp32 for 16 bit where the device lists none (estimates)."""
    if precision in rates:
        return rates[precision]
    return rates["fp32"] / 2 if precision == "fp64" else rates["fp32"]
