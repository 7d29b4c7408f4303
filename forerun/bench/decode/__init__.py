"""Decoding: every way to draft beside plain decoding of the same model, in speed and in joules."""
