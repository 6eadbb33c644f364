"""Executor of a lowered program: forward and backward steps, parameters, buffers, random state and hooks."""
