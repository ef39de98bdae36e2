"""Tree attention and the fused LM head: tensors only, nothing of language models."""
