"""Training drafters: text the target would write, its laws along it, one loop for all recipes, a
directory at the end.

A leaf: it uses the engine from outside, and nothing but the command line imports it.
"""
