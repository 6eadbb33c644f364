"""Reasons, alternatives and advice for a plan that was chosen."""
