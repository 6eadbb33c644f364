"""Legal strategies of every layer, as a problem for the solver: rules, pins, formulation, verifier."""
