"""Context parallel: every rank has a part of each sequence, and attention alone sees the whole."""
