"""Axes of ATen ops: which dimensions of operands and results are one axis, and what sharding it does."""
