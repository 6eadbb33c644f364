"""Python values that a forward reads or writes: recorded at capture, guarded at calls, turned into inputs and
results."""
