"""Measurement code shared by training, the certificate, `forerun tune` and `forerun bench`.

It uses the engine from outside and does not import any of its users.
"""
