"""Parameters and optimizer state that a plan cuts over processes, as tensors of the whole shape."""
