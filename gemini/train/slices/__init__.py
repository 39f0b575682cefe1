"""Tensor parallel: matrices of every layer in slices, one for each rank of a mesh's ``tp``."""
