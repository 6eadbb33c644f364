"""Command line: parsing, commands and their exit codes."""
