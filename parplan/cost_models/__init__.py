"""Costs of layers, transfers and memory, each number with its source."""
