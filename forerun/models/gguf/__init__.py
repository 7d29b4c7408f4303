"""GGUF files: one file (or its shards) with a model's configuration, tokenizer and weights."""
