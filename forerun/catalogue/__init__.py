"""The registry of drafters: what they are, whom they fit, where they are, and what they were
measured to give."""
