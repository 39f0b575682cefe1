"""Ranks: who holds which part, all-gather and reduce-scatter, and that all do the same."""
