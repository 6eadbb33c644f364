"""Lowering of a plan to a program: slots for values, steps per device, transfers and gradient reductions."""
