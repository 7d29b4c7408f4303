"""Other engines beside forerun: the same weights, prompts and lengths, greedy, run in turn."""
