"""Seconds and bytes of transfers and reductions over links."""
