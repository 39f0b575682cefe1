"""Machines: their figures, and how they are measured."""
