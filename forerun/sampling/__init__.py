"""Sampling parameters, and the filters that turn logits into the law each token is drawn from."""
