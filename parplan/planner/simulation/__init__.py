"""Simulation of a plan's step: tasks of every device, served in order, with transfers on lanes."""
