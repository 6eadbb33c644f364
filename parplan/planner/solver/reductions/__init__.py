"""Exact reductions: from a problem to a smaller one with the way back."""
