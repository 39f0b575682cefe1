"""Chunks and their states."""
