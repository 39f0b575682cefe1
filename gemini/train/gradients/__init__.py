"""Gradients: where they land, and the scale they have."""
