"""GGUF files: one file (or its shards) that holds configuration, tokenizer, chat template and
weights of a model."""
