"""The command line: one module for each command, and shared helpers."""
