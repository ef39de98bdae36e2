"""The decoder from scratch, its weights on disk, and how it is spread over ranks. Knows transformers, nothing of RL."""
