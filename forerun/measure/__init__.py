"""Counters of this machine, below everything that measures with them."""
