"""Which strategy every layer gets: rules, strategies, solver, verifier."""
