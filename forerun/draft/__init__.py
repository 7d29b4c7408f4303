"""Proposers: whatever runs ahead of the target. A proposer returns data, one `Draft` a request, and
nothing else."""
