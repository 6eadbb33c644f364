"""Reports for people: on the terminal, and the same facts as JSON."""
