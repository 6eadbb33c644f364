"""Capture: torch.export of a model, its batch axis checked, and its graph cut into layers."""
