"""Measurement of a running step, per layer and device, and of its peak memory."""
