"""Models: configuration, weights and the one decoder."""
