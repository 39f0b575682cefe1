"""Models that never were whole in memory: built from a config, or filled from pretrained weights."""
