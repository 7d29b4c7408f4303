"""Fixtures shared with the tests of `forerun bench`."""

from tests.bench.conftest import fixed_bandwidth, own_cache

__all__ = ["fixed_bandwidth", "own_cache"]
