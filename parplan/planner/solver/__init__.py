"""Solver of the abstract problem (nodes, options, costs, memory rows); it knows nothing of models."""
