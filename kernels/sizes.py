"""Sizes of what kernels hold at a time, which decide the memory of a run: known without torch."""

from __future__ import annotations

# of the LM head
DEFAULT_CHUNK_ROWS = 8192
BLOCK_ELEMENTS = 2**26  # of logits: 256 MB in fp32

# of a forest that ranks share (mask.split)
CHUNKS = 8  # of each rank: more balance attention and loss rows better and cut attention into more pieces
# chunks of at least ALIGNED_FROM tokens are a multiple of ALIGNED, so that few tiles of the kernels are incomplete
ALIGNED, ALIGNED_FROM = 128, 1024


def largest_share(tokens: int, ranks: int) -> int:
    """The most tokens that `mask.split` may give to a rank."""
    size = chunk(tokens, ranks)
    return min(tokens, -(-tokens // (size * ranks)) * size)


def chunk(tokens: int, ranks: int) -> int:
    size = max(1, -(-tokens // (CHUNKS * ranks)))
    return size if size < ALIGNED_FROM else -(-size // ALIGNED) * ALIGNED
