"""Compute-heavy operations: `reference` in plain torch, `native` in C++ for CPUs."""
