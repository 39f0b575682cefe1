"""Passes: forward, backward and step of one model, from the hooks in its modules to the updates."""
