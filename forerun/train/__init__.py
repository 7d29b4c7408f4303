"""Training of drafters: data, the target's outputs along them, one loop for all recipes, and the
exported directory.

The package uses the engine from outside; only the command line imports it.
"""
