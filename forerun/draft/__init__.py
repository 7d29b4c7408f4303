"""Proposers: whatever runs ahead of the target. A proposer returns data, one `Draft` a request, and nothing else."""

from forerun.draft.base import Proposer, Row

__all__ = ["Proposer", "Row"]
