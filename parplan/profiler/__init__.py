"""Measuring what plans need: parts of layers, communication, and what the runtime itself takes."""
