"""Watching: what a step did when, and where it stalled."""
