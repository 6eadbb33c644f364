"""Pictures of a decision: one HTML page, SVG drawings and a trace of the predicted step."""
