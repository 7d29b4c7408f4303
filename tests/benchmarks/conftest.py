"""Fixtures shared with the bench verbs."""

from tests.bench.conftest import own_cache, steady

__all__ = ["own_cache", "steady"]
