"""Modules that users call: the compiled model, its training step, and nn.DataParallel's interface."""
