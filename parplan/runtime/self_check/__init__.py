"""Self-check of a captured program against the plain module, before its first step."""
