"""Sections of the terminal report, each made from a decision."""
