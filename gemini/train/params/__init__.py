"""Params: which of them are ordinary now, how they are read and written by name, and what a read at rest does."""
