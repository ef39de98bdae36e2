"""A miniature run killed, damaged and starved on purpose, and whether it ends as if nothing had happened."""
