"""Tree attention and the fused LM head: tensors only, no knowledge of language models."""
