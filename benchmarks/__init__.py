"""Benchmarks of forerun and other engines, see README.md."""
