"""The paged KV cache: host allocator, device tensors, and who sees whom in one pass."""
