"""Search among plans in passes and with concurrent branches, by simulated steps."""
