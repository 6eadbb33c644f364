"""Profiles: measured times with the conditions they were taken under, stored and read back."""
