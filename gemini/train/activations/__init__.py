"""Activations: what autograd saves, offloaded and fetched again."""
