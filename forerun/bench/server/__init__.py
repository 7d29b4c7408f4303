"""A running server under load, whoever wrote it."""
