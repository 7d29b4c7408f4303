"""Talking with a model: the conversation and its commands, and the terminal around them."""
