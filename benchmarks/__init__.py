"""Benchmarks of parts of forerun and of other engines; run from the repository's root, see
README.md."""
