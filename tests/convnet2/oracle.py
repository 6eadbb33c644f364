"""Layers one number at a time, as cuda-convnet2's guide describes them; slow, and with no torch function in them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["conv", "cross_map_norm", "pool", "same_map_norm"]


def _at(image: Tensor, channel: int, y: int, x: int) -> float:
    """A pixel, zero outside the image."""
    side = image.shape[-1]
    return float(image[channel, y, x]) if 0 <= y < side and 0 <= x < side else 0.0


def conv(image: Tensor, weight: Tensor, stride: int, padding: int, groups: int) -> Tensor:
    """(channels, side, side) under (filters, channels / groups, size, size); windows cover image and border."""
    weight = weight.detach()
    filters, depth, size, _ = weight.shape
    side = -(-(image.shape[-1] + 2 * padding - size) // stride) + 1
    out = torch.zeros(filters, side, side, dtype=image.dtype)
    for f in range(filters):
        first = f // (filters // groups) * depth
        for y in range(side):
            for x in range(side):
                top, left = y * stride - padding, x * stride - padding
                out[f, y, x] = sum(
                    float(weight[f, c, v, u]) * _at(image, first + c, top + v, left + u)
                    for c in range(depth)
                    for v in range(size)
                    for u in range(size)
                )
    return out


def pool(image: Tensor, kind: str, size: int, stride: int, start: int, outputs: int) -> Tensor:
    """Greatest or mean of the pixels that a window has inside the image."""
    channels, side, _ = image.shape
    out = torch.zeros(channels, outputs, outputs, dtype=image.dtype)
    for c in range(channels):
        for y in range(outputs):
            for x in range(outputs):
                top, left = start + y * stride, start + x * stride
                seen = [
                    float(image[c, v, u])
                    for v in range(max(top, 0), min(top + size, side))
                    for u in range(max(left, 0), min(left + size, side))
                ]
                out[c, y, x] = max(seen) if kind == "max" else sum(seen) / len(seen)
    return out


def cross_map_norm(image: Tensor, size: int, scale: float, power: float, least: float) -> Tensor:
    """Over `size` maps around each; the one in excess lies before."""
    out = image.clone()
    channels, side, _ = image.shape
    for c in range(channels):
        near = range(max(c - size // 2, 0), min(c - size // 2 + size, channels))
        for y in range(side):
            for x in range(side):
                squares = sum(float(image[n, y, x]) ** 2 for n in near)
                out[c, y, x] = float(image[c, y, x]) * (least + scale / size * squares) ** -power
    return out


def same_map_norm(image: Tensor, size: int, scale: float, power: float, least: float) -> Tensor:
    """Over size x size pixels around each; those in excess lie before."""
    out = image.clone()
    channels, side, _ = image.shape
    for c in range(channels):
        for y in range(side):
            for x in range(side):
                rows, columns = (range(n - size // 2, n - size // 2 + size) for n in (y, x))
                squares = sum(_at(image, c, v, u) ** 2 for v in rows for u in columns)
                out[c, y, x] = float(image[c, y, x]) * (least + scale / size**2 * squares) ** -power
    return out
