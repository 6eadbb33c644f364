"""Captured graphs and lowered programs of a compiled model, by the shapes and values of its calls."""
