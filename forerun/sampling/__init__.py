"""Sampling parameters, and the filters between logits and the distribution of a token."""
