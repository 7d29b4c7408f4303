"""The engine: requests in, events out. Schedules, drafts, runs one pass, verifies, commits."""
