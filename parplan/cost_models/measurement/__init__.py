"""Benchmarks of layer parts, optimizer updates and the reference kernel on a device."""
