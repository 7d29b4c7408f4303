"""EAGLE-style heads: EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE and multi-token modules."""
