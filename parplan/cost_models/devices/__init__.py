"""Devices and links to plan for: presets, cluster files, and the devices of this machine."""
