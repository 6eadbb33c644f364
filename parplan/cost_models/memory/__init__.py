"""Memory of layers and of whole plans over a step."""
