"""`forerun check`: a certificate that speculation does not change a model's output.

The checks run on the user's own model and machine: the verification rules on toy models by exact
enumeration (`oracle`), forward passes bit by bit, texts token for token and sampled tokens by a
sequential test (`engine_checks`), and known faults that these checks must find (`certificate`).
"""
