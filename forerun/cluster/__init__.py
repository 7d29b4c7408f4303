"""Serve several replicas of a model on a Ray cluster."""
