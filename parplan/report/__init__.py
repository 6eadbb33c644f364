"""What people read: the report on the terminal, and the same facts as JSON."""
