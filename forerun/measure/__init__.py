"""What all that measures shares: timed runs and rounds of them, tasks, arithmetic, medians,
counters, tables.

It uses the engine from outside, and knows nothing of who measures.
"""
