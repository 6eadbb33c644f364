"""Rewrites of an exported graph before it is cut into layers: functional ops, late writes, buffers and devices."""
