"""dccot: trains, runs and measures language models that think in parallel (Divide-and-Conquer CoT)."""

__version__ = "0.1.0"
