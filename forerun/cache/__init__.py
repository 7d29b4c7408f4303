"""The paged KV cache: host allocator, device tensors, and the attention of one forward pass."""
