"""The decoder from scratch, its weights on disk, and its sharding over ranks. Knows transformers, but not RL."""
