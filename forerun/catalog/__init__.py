"""The registry of drafters: kinds, targets that they fit, places and measurements."""
