"""Checkpoints: their format, saving behind the training, loading, and export."""
