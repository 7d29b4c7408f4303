"""Measuring: pairs of models with a chosen agreement, kernels, decoding, and the arithmetic of speculation.

A leaf: it uses the engine from outside, and nothing but the command line imports it.
"""
